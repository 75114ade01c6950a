package podwork

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
	"github.com/meshcni/istio-cni/internal/node/selfcheck"
)

// Turn is the work on one version of a pod.
type Turn struct {
	*Env

	Pod kube.Pod
	// Conf is the plugin's configuration. Err is set if it cannot be read.
	Conf cniconf.NetConf
	Err  error
	// Decision is the plugin's decision about the pod.
	Decision sidecar.Decision
	Log      *slog.Logger
	// Began is the start of the turn.
	Began time.Time

	// Ambient is set if the turn is about the rules of ambient mode.
	Ambient bool

	// Place is where the namespace was found in this turn, or is known to be from an earlier one.
	Place Place

	pods  pods
	found *sandbox.Namespace
	atEnd []func()
}

// pods is a turn's view of the Controller.
type pods interface {
	podWithSameIP(kube.Pod) string
	unchanged(kube.Pod) bool
	again(kube.Pod, time.Duration)
}

// Place is a path to a network namespace, and the inode number that identifies it.
type Place struct {
	Path  string
	Inode netns.Inode
}

func (c *Controller[M]) newTurn(p kube.Pod) *Turn {
	return &Turn{
		Env: &c.Env, Pod: p, pods: c, Began: c.Clock.Now(),
		Log: c.Log.With(slog.String("pod", p.Facts.Namespace+"/"+p.Facts.Name), slog.String("uid", p.Facts.UID)),
	}
}

func (c *Controller[M]) again(p kube.Pod, d time.Duration) { c.queue.AddAfter(p.Key(), d) }

// close releases the namespace.
func (t *Turn) close() {
	if t.found != nil {
		t.found.Close()
		t.found = nil
	}
}

// AtEnd calls fn after the memory of the turn is stored. fn must not call the Controller.
func (t *Turn) AtEnd(fn func()) { t.atEnd = append(t.atEnd, fn) }

// Again gives the pod another turn after d.
func (t *Turn) Again(d time.Duration) { t.pods.again(t.Pod, d) }

// Unchanged reports whether the pod still has the UID and addresses of the turn, and has not begun to end.
func (t *Turn) Unchanged() bool { return t.pods.unchanged(t.Pod) }

// Reachable reports whether this process can reach the namespaces of the pod's node.
func (t *Turn) Reachable() bool {
	return t.Find != nil && t.Node != "" && t.Pod.NodeName == t.Node
}

// InNamespace runs fn with the pod's network namespace. It returns an error if the namespace is uncertain: when found
// by its addresses, it may belong to another pod with one of them in the API. A turn searches once.
func (t *Turn) InNamespace(ctx context.Context, fn func(redirection.Namespace) error) (err error) {
	if t.found == nil {
		if t.found, err = t.search(ctx); err != nil {
			t.found = nil
			return err
		}
	}
	return fn(t.Space(t.found.Namespace))
}

// Report returns the plugin's own latest decision about the pod, if the agent knows one.
func (t *Turn) Report() (r agentapi.Report, known bool) {
	if t.Reported == nil {
		return r, false
	}
	r, known = t.Reported(t.Pod.Is)
	return r, known && r.Command == "ADD"
}

func (t *Turn) search(ctx context.Context) (*sandbox.Namespace, error) {
	report, _ := t.Report()
	found, err := t.Find(ctx, sandbox.Pod{
		Namespace: t.Pod.Facts.Namespace, Name: t.Pod.Facts.Name, UID: t.Pod.Facts.UID, Addresses: t.Pod.Addresses, Sandbox: report.Container,
	})
	if err != nil {
		return nil, fmt.Errorf("finding the pod's network namespace: %w", err)
	}
	if err = t.Claims(found); err != nil {
		found.Close()
		return nil, err
	}
	t.Log.DebugContext(ctx, "found the pod's network namespace", slog.String("source", string(found.Source)))
	t.Place = Place{Path: found.Place, Inode: found.Inode()}
	return found, nil
}

// Claims returns an error for a namespace that was found by the pod's addresses if another pod has, or may have, one of them.
func (t *Turn) Claims(found *sandbox.Namespace) error {
	if !found.Inhabited {
		return ErrUninhabited
	}
	if other := t.pods.podWithSameIP(t.Pod); other != "" && found.Source != sandbox.FromCache {
		return fmt.Errorf("%w: pod %s has the same ones", sandbox.ErrClaimed, other)
	}
	return nil
}

// ErrUninhabited is the error of [Turn.Claims] for a namespace that is not known to be in use: see [sandbox.Namespace].
var ErrUninhabited = fmt.Errorf("%w: no process is in it yet, and it may be that of a pod in creation", sandbox.ErrClaimed)

// InKnownNamespace is InNamespace for a read-only fn. It does not search if t.Place still leads to its namespace and no other pod has
// the pod's addresses.
func (t *Turn) InKnownNamespace(ctx context.Context, fn func(redirection.Namespace) error) error {
	if t.found == nil && t.Place.Path != "" && t.pods.podWithSameIP(t.Pod) == "" {
		if known, err := netns.Open(t.Place.Path); err == nil {
			defer known.Close()
			if known.Inode() == t.Place.Inode {
				return fn(t.Space(known))
			}
		}
	}
	return t.InNamespace(ctx, fn)
}

// Space returns a namespace with the plugin's settings. No program of the node writes the rules of ambient mode.
func (t *Turn) Space(n *netns.Namespace) redirection.Namespace {
	space := redirection.Namespace{
		NetNS: n, Log: t.Log, Backend: t.Conf.Backend, Sandboxed: t.Decision.Sandbox != "",
		Auto:  selfcheck.Recorded(t.Conf.RunDir).Choice,
		Tools: iptables.Host{Path: t.ToolPath, Force: iptables.Variant(t.Conf.ForceIptables)},
	}
	if !t.Ambient {
		return space
	}
	for _, backend := range []*redirect.Backend{&space.Backend, &space.Auto} {
		if *backend == redirect.Tools {
			*backend = redirect.Netlink
		}
	}
	space.Tools.Force = ""
	return space
}
