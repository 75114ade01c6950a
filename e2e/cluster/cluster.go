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
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	core "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Tier is how much of Kubernetes runs.
type Tier string

// Tiers.
const (
	ControlPlane Tier = "control-plane"
	Node         Tier = "node"
)

// Options say what to start.
type Options struct {
	// Kube is the path of the program made by hack/kube.sh. Required.
	Kube string
	Tier Tier
	// ControllerManager is for tier ControlPlane; tier Node always has it. Without it nothing makes service accounts,
	// collects garbage, or watches over nodes that have no kubelet.
	ControllerManager bool
	// Images are paths of archives that containerd is to know (tier Node).
	Images []string
	// Pause is the name of the image of a pod's sandbox (tier Node), which must be in one of Images.
	Pause string
	// Families are those of the network of pods, the node, and the Service (IPv4 unless given).
	Families Families
	// Networks are the node's network configurations by the names of their files (tier Node), templates with .Ranges and .Routes for host-local, and .PodCIDR. nil is a
	// bridge with portmap as 10-e2e.conflist; none at all leaves the node NotReady until PutNetwork.
	Networks map[string]string
	// RegisterWithTaints are on the node from the moment that its kubelet makes it (tier Node).
	RegisterWithTaints []core.Taint
	// Dir is where the cluster's directory is made, os.TempDir() unless given. Not below /etc, /opt, /var or /run.
	Dir string
	// Log is told of progress, nobody unless given.
	Log io.Writer
}

// Families are IP families.
type Families string

// Families. With DualStack pods have an address of each, the first being of IPv4, and all else is as with IPv4.
const (
	IPv4      Families = ""
	DualStack Families = "dual-stack"
	IPv6      Families = "ipv6"
)

// Names in each cluster.
const (
	NodeName     = "e2e-node"
	serviceIP    = "10.96.0.1"
	serviceIP6   = "fd00:96::1"
	serviceCIDR  = "10.96.0.0/16"
	serviceCIDR6 = "fd00:96::/112"
	podCIDR      = "10.88.0.0/24"
	podCIDR6     = "fd00:88::/64"
	apiPort      = "443" // then the Service's address and port on lo are the API server's own
)

// timeout is for how long a server may take to answer. It is generous: other work may share the cores.
const timeout = 2 * time.Minute

// Cluster is a running one.
type Cluster struct {
	options Options
	run     directory
	address address
	inside  *pidOne
	config  *rest.Config
	client  kubernetes.Interface

	mu       sync.Mutex
	commands map[Server][]string
	stopped  bool
}

// Start starts a cluster. It lives until Stop or the end of this process; ctx only bounds the start.
func Start(ctx context.Context, o Options) (*Cluster, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	if o.Log == nil {
		o.Log = io.Discard
	}
	run, err := newDirectory(o.Dir)
	if err != nil {
		return nil, err
	}
	c := &Cluster{options: o, run: run, commands: map[Server][]string{}}
	if err := c.start(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("starting a cluster: %w", err), c.Stop())
	}
	return c, nil
}

func (c *Cluster) start(ctx context.Context) error {
	began := time.Now()
	if err := c.enclose(ctx); err != nil {
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

// configure writes what servers and clients need, once: it outlives a loss of power.
func (c *Cluster) configure(ctx context.Context) error {
	if err := writeCredentials(c.run.pki(), c.address); err != nil {
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

// PowerOff ends all processes at once, as a loss of power does: the disks stay, and nothing else.
func (c *Cluster) PowerOff() error {
	return errors.Join(c.inside.end(), removeCgroups(c.run.cgroups()))
}

// PowerOn starts the cluster again after PowerOff, at the same address, as another boot of its node. It returns when the API
// server is ready.
func (c *Cluster) PowerOn(ctx context.Context) error {
	began := time.Now()
	if err := c.enclose(ctx); err != nil {
		return err
	}
	if err := c.reconnect(ctx); err != nil {
		return err
	}
	if err := c.startServers(ctx); err != nil {
		return err
	}
	c.logf("the API server is ready again after %s", time.Since(began).Round(10*time.Millisecond))
	return nil
}

// startServers starts them in the order in which they can begin to work.
func (c *Cluster) startServers(ctx context.Context) error {
	if err := c.startControlPlane(); err != nil {
		return err
	}
	if c.options.Tier == Node {
		if err := c.startNode(ctx); err != nil {
			return err
		}
	}
	// The roles of these exist once the API server is ready; started before, they lose seconds to their back-off.
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
		errs = append(errs, fmt.Errorf("Options.Kube: %q is no program: run hack/kube.sh", o.Kube))
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
			errs = append(errs, fmt.Errorf("%s is missing here: install %s (hack/e2e.sh does)", name, of))
		}
	}
	if !enclosable {
		errs = append(errs, errors.New("TestMain has not called cluster.Main"))
	}
	return errors.Join(errs...)
}

func (c *Cluster) logf(format string, args ...any) {
	_, _ = fmt.Fprintf(c.options.Log, "cluster: "+format+"\n", args...)
}

// Stop ends everything and removes the directory. A second call does nothing.
func (c *Cluster) Stop() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped {
		return nil
	}
	c.stopped = true
	var errs []error
	if c.inside != nil {
		errs = append(errs, c.inside.end())
	}
	errs = append(errs, c.disconnect(), removeCgroups(c.run.cgroups()), c.run.remove())
	return errors.Join(errs...)
}

// Kubeconfig is the path of an administrator's, of group system:masters.
func (c *Cluster) Kubeconfig() string { return filepath.Join(c.run.pki(), "admin.kubeconfig") }

// REST is an administrator's way to the API server, without a limit of requests. It is the caller's own copy.
func (c *Cluster) REST() *rest.Config { return rest.CopyConfig(c.config) }

// Client is an administrator's.
func (c *Cluster) Client() kubernetes.Interface { return c.client }

// Dir is the cluster's directory, for files that end with it.
func (c *Cluster) Dir() string { return string(c.run) }

// Pid is that of the process whose end ends the cluster.
func (c *Cluster) Pid() int { return c.inside.pid }

// Command is a program in the namespaces of the cluster, as on its node. It ends with the cluster.
func (c *Cluster) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	target := strconv.Itoa(c.inside.pid)
	enter := []string{"--target", target, "--mount", "--net", "--pid", "--uts", "--ipc"}
	if c.options.Tier == Node {
		enter = append(enter, "--cgroup")
	}
	return exec.CommandContext(ctx, "nsenter", append(append(enter, "--", name), args...)...)
}

// do runs a command inside to its end.
func (c *Cluster) do(ctx context.Context, name string, args ...string) error {
	return finish(c.Command(ctx, name, args...))
}

// finish runs a command to its end. What it says is part of the error if there is one.
func finish(command *exec.Cmd) error {
	text, err := command.CombinedOutput()
	if err != nil {
		return fmt.Errorf("running %q: %w: %s", strings.Join(command.Args, " "), err, strings.TrimSpace(string(text)))
	}
	return nil
}

// Until polls until done says so or fails, or ctx ends, and for two minutes at most.
func Until(ctx context.Context, what string, done func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
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

// directory is where all of a cluster is.
type directory string

const directoryPrefix = "istio-cni-e2e-"

// newDirectory makes one that is locked for as long as this process lives, and removes those whose process ended without
// removing its own.
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
		return "", errors.Join(fmt.Errorf("locking %q: taken by another run", dir), err)
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

// lock takes the directory's lock without waiting. It is given up when the process ends: the descriptor is never closed.
func (d directory) lock() (free bool, err error) {
	fd, err := unix.Open(d.path("lock"), unix.O_CREAT|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return false, fmt.Errorf("opening the lock of %q: %w", string(d), err)
	}
	if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = unix.Close(fd)
		return false, nil //nolint:nilerr // somebody else has it
	}
	return true, nil
}

func (d directory) remove() error {
	if err := os.RemoveAll(string(d)); err != nil {
		return fmt.Errorf("removing the cluster's directory: %w", err)
	}
	return nil
}

// sweep removes what killed tests left. Nothing runs there any more: the lock was theirs.
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
