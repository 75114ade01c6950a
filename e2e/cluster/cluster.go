package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	core "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Tier selects the servers that run.
type Tier string

// Tiers.
const (
	ControlPlane Tier = "control-plane"
	Node         Tier = "node"
)

// Options configure a cluster.
type Options struct {
	// Kube is the path of the binary built by hack/kube.sh. Required.
	Kube string
	Tier Tier
	// ControllerManager starts kube-controller-manager in tier ControlPlane; tier Node always starts it. Without it
	// service accounts are not created, garbage is not collected, and the status of nodes without a kubelet never
	// becomes Unknown.
	ControllerManager bool
	// Runtime is a directory built by hack/containerd.sh, of which tier Node uses containerd, runc and the CNI plugins. If
	// empty, Debian's are used, containerd 1.6.
	Runtime string
	// Images are paths of image archives that are imported into containerd (tier Node).
	Images []string
	// Pause is the sandbox image of pods (tier Node), which must be in one of Images.
	Pause string
	// Families are the IP families of the pod network, the node, and the Service network (default IPv4).
	Families Families
	// Networks are CNI configurations by file name (tier Node). They are templates with .Ranges and .Routes for
	// host-local, and .PodCIDR. If nil, 10-e2e.conflist configures a bridge with portmap; if empty, the node is NotReady
	// until PutNetwork.
	Networks map[string]string
	// NetDir and BinDir are where containerd looks for CNI configurations and plugins, below /etc/cni and /opt/cni (default
	// /etc/cni/net.d and /opt/cni/bin).
	NetDir, BinDir string
	// NodeMonitorGracePeriod is the time without a report after which a node counts as lost (default: the controller
	// manager's).
	NodeMonitorGracePeriod time.Duration
	// RegisterWithTaints are the taints with which kubelets register their nodes (tier Node).
	RegisterWithTaints []core.Taint
	// Dir is the parent of the cluster's directory, by default os.TempDir(). Not below /etc, /opt, /var or /run.
	Dir string
	// Log receives progress messages, by default io.Discard.
	Log io.Writer
}

// Families are IP families.
type Families string

// Families. With DualStack each pod has one address per family, IPv4 first; all else is as with IPv4.
const (
	IPv4      Families = ""
	DualStack Families = "dual-stack"
	IPv6      Families = "ipv6"
)

// Names and addresses in each cluster.
const (
	// NodeName is the name of the first node.
	NodeName     = "e2e-node"
	serviceIP    = "10.96.0.1"
	serviceIP6   = "fd00:96::1"
	serviceCIDR  = "10.96.0.0/16"
	serviceCIDR6 = "fd00:96::/112"
	podCIDR6     = "fd00:88::/64"
	apiPort      = "443" // then the Service's address and port on lo are the API server's own
)

// Timeout bounds each wait. It is generous: other work may share the CPUs, and the kubelet retries a failed init container after
// up to 80 seconds.
const Timeout = 3 * time.Minute

// Cluster is a running cluster. Methods of Machine concern its first machine.
type Cluster struct {
	*Machine // with the control plane
	machines []*Machine
	options  Options
	ca       *authority
	config   *rest.Config
	client   kubernetes.Interface

	stopping sync.Mutex
	stopped  bool
}

// Start starts a cluster, which runs until Stop or until this process exits; ctx bounds only the start.
func Start(ctx context.Context, o Options) (*Cluster, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	if o.Log == nil {
		o.Log = io.Discard
	}
	c := &Cluster{options: o}
	var err error
	if c.Machine, err = c.newMachine(); err != nil {
		return nil, err
	}
	if err := c.start(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("starting a cluster: %w", err), c.Stop())
	}
	return c, nil
}

func (c *Cluster) start(ctx context.Context) error {
	began := time.Now()
	if err := c.startInit(ctx); err != nil {
		return err
	}
	if err := c.connect(ctx); err != nil {
		return err
	}
	if err := c.configure(ctx); err != nil {
		return err
	}
	if err := c.startServers(ctx); err != nil {
		return err
	}
	c.logf("the API server at %s is ready after %s", c.config.Host, time.Since(began).Round(10*time.Millisecond))
	return nil
}

// configure writes the configuration of servers and clients once; PowerOff keeps it.
func (c *Cluster) configure(ctx context.Context) error {
	c.ca = newAuthority()
	if err := c.ca.controlPlane(c.run.pki(), c.address); err != nil {
		return err
	}
	if err := c.configureControlPlane(); err != nil {
		return err
	}
	if c.options.Tier == Node {
		if err := c.configureNode(ctx); err != nil {
			return err
		}
	}
	var err error
	if c.config, err = clientcmd.BuildConfigFromFlags("", c.Kubeconfig()); err != nil {
		return fmt.Errorf("reading the administrator's kubeconfig: %w", err)
	}
	c.config.QPS, c.config.Burst = -1, -1
	if c.client, err = kubernetes.NewForConfig(c.config); err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	return nil
}

// PowerOn starts the first machine again after PowerOff, at the same address and with another boot ID. It returns when
// the API server is ready.
func (c *Cluster) PowerOn(ctx context.Context) error {
	began := time.Now()
	if err := c.boot(ctx); err != nil {
		return err
	}
	if err := c.startServers(ctx); err != nil {
		return err
	}
	c.logf("the API server is ready again after %s", time.Since(began).Round(10*time.Millisecond))
	return nil
}

// startServers starts the servers in the order of their dependencies.
func (c *Cluster) startServers(ctx context.Context) error {
	if err := c.startControlPlane(); err != nil {
		return err
	}
	if c.options.Tier == Node {
		if err := c.startNode(ctx); err != nil {
			return err
		}
	}
	// The API server creates their roles before it becomes ready; started earlier, these servers lose seconds to
	// back-off.
	if err := c.waitReady(ctx); err != nil {
		return err
	}
	if c.options.Tier == Node || c.options.ControllerManager {
		if err := c.startControllers(); err != nil {
			return err
		}
	}
	return nil
}

func (o Options) check() error {
	var errs []error
	if os.Geteuid() != 0 {
		errs = append(errs, errors.New("it needs root, for its namespaces"))
	}
	if info, err := os.Stat(o.Kube); err != nil || info.Mode()&0o111 == 0 {
		errs = append(errs, fmt.Errorf("Options.Kube: %q is not an executable file: run hack/kube.sh", o.Kube))
	}
	tools := map[string]string{"ip": "iproute2", "nsenter": "util-linux"}
	switch o.Tier {
	case ControlPlane:
	case Node:
		maps.Copy(tools, nodeTools())
		if len(o.Images) == 0 || o.Pause == "" {
			errs = append(errs, errors.New("tier node needs Options.Images, and of these the name of one for Options.Pause"))
		}
	default:
		errs = append(errs, fmt.Errorf("Options.Tier: want %q or %q, not %q", ControlPlane, Node, o.Tier))
	}
	switch o.Families {
	case IPv4, DualStack, IPv6:
	default:
		errs = append(errs, fmt.Errorf("Options.Families: want %q, %q or %q, not %q", IPv4, DualStack, IPv6, o.Families))
	}
	for name, of := range tools {
		if _, err := exec.LookPath(name); err != nil {
			errs = append(errs, fmt.Errorf("%s is missing: install %s (hack/e2e.sh does)", name, of))
		}
	}
	if !mainCalled {
		errs = append(errs, errors.New("TestMain has not called cluster.Main"))
	}
	return errors.Join(errs...)
}

func (c *Cluster) logf(format string, args ...any) {
	_, _ = fmt.Fprintf(c.options.Log, "cluster: "+format+"\n", args...)
}

// Stop kills all processes and removes the directories. A second call does nothing.
func (c *Cluster) Stop() error {
	c.stopping.Lock()
	defer c.stopping.Unlock()
	if c.stopped {
		return nil
	}
	c.stopped = true
	var errs []error
	for _, m := range slices.Backward(c.machines) {
		errs = append(errs, m.stop())
	}
	return errors.Join(errs...)
}

// Kubeconfig returns the path of an administrator's kubeconfig (group system:masters).
func (c *Cluster) Kubeconfig() string { return filepath.Join(c.run.pki(), "admin.kubeconfig") }

// REST returns a copy of an administrator's client configuration, without a rate limit.
func (c *Cluster) REST() *rest.Config { return rest.CopyConfig(c.config) }

// Client returns an administrator's client.
func (c *Cluster) Client() kubernetes.Interface { return c.client }

// finish runs a command and waits for it. An error includes its output.
func finish(command *exec.Cmd) error {
	text, err := command.CombinedOutput()
	if err != nil {
		return fmt.Errorf("running %q: %w: %s", strings.Join(command.Args, " "), err, strings.TrimSpace(string(text)))
	}
	return nil
}

// Until polls done until it returns true or an error, ctx is done, or [Timeout] has passed.
func Until(ctx context.Context, what string, done func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, Timeout)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		ok, err := done()
		if ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w", what, context.Cause(ctx))
		case <-tick.C:
		}
	}
}

// directory is the path of the directory with all files of a cluster.
type directory string

const directoryPrefix = "istio-cni-e2e-"

// newDirectory creates a directory, locks it for the lifetime of this process, and removes directories left by
// processes that exited without Stop.
func newDirectory(parent string) (directory, error) {
	if parent == "" {
		parent = os.TempDir()
	}
	sweep(parent)
	dir, err := os.MkdirTemp(parent, directoryPrefix)
	if err != nil {
		return "", fmt.Errorf("making the cluster's directory: %w", err)
	}
	d := directory(dir)
	if free, err := d.lock(); err != nil || !free {
		return "", errors.Join(fmt.Errorf("locking %q: locked by another process", dir), err)
	}
	for _, sub := range []string{d.pki(), d.logs(), d.state()} {
		if err := os.MkdirAll(sub, 0o755); err != nil {
			return "", errors.Join(fmt.Errorf("making the cluster's directory: %w", err), d.remove())
		}
	}
	return d, nil
}

func (d directory) path(parts ...string) string {
	return filepath.Join(append([]string{string(d)}, parts...)...)
}
func (d directory) pki() string              { return d.path("pki") }
func (d directory) logs() string             { return d.path("log") }
func (d directory) state() string            { return d.path("state") }
func (d directory) cgroups() string          { return d.path("cgroups") }
func (d directory) log(server Server) string { return d.path("log", string(server)+".log") }
func (d directory) audit() string            { return d.path("log", "audit.log") }
func (d directory) auditPolicy() string      { return d.path("state", "audit.yaml") }
func (d directory) bootID() string           { return d.path("state", "boot_id") }

// lock acquires the directory's flock without waiting. The kernel releases it when the process exits: the descriptor
// is never closed.
func (d directory) lock() (free bool, err error) {
	fd, err := unix.Open(d.path("lock"), unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return false, fmt.Errorf("opening the lock of %q: %w", string(d), err)
	}
	if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = unix.Close(fd)
		return false, nil //nolint:nilerr // another process holds it
	}
	return true, nil
}

func (d directory) remove() error {
	if err := os.RemoveAll(string(d)); err != nil {
		return fmt.Errorf("removing the cluster's directory: %w", err)
	}
	return nil
}

// sweep removes the directories and cgroups of killed tests, which it recognises by a free lock: no process of theirs
// runs any more.
func sweep(parent string) {
	left, _ := filepath.Glob(filepath.Join(parent, directoryPrefix+"*"))
	for _, dir := range left {
		d := directory(dir)
		if _, err := os.Stat(d.path("lock")); err != nil {
			continue // being made just now
		}
		if free, err := d.lock(); err == nil && free {
			_ = removeCgroups(d.cgroups())
			_ = d.remove()
		}
	}
}
