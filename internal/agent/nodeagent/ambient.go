package nodeagent

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/agent/cmdadd"
	"github.com/meshcni/istio-cni/internal/agent/enrol"
	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/probes"
	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/agent/unixsock"
	"github.com/meshcni/istio-cni/internal/agent/ztunnels"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/probeset"
)

// partAmbient is a part of the agent's health. docs/errors.md has the comment.
const (
	// Ambient mode serves pods: its sockets listen, and the pods of the node and all namespaces are known.
	partAmbient health.PartName = "ambient"
)

// ambientMode has the parts of ambient mode.
type ambientMode struct {
	pods     *enrol.Controller
	ztunnels *ztunnels.Server
	events   *unixsock.Server
	host     *netns.Namespace
	// connected is the number of ztunnels.
	connected atomic.Int64
	// end ends the work on pods, and returns when it has ended.
	end func()
}

// openAmbient begins the service of pods in ambient mode. It must precede the installation: the plugin hands such pods to the agent.
func (n *node) openAmbient(ctx context.Context) (err error) { //nolint:contextcheck // its work ends with the agent, after ctx
	c := n.Config
	if !c.Ambient.Enabled || c.Observe {
		return nil
	}
	if n.pods == nil {
		return fmt.Errorf("ambient mode needs the address of the API server and the name of the node (KUBERNETES_NODE_NAME)")
	}
	m := &ambientMode{}
	if m.host, err = netns.Open(c.HostNamespace()); err != nil {
		return fmt.Errorf("ambient mode needs the node's network namespace: %w", err)
	}
	if first, unread := netns.InodeOf(c.nodeNamespace()); unread == nil && first != m.host.Inode() {
		n.Log.WarnContext(ctx, "the agent's own network namespace is taken for the node's, and is not: probes of ambient pods will be captured "+
			"(set ALLOW_SWITCH_TO_HOST_NS=true, or hostNetwork)")
	}
	notify := func(uid string) { m.pods.Notify(uid) }
	m.ztunnels, err = ztunnels.Open(ctx, ztunnels.Options{
		Path: c.Ambient.Socket, Log: n.Log, Changed: notify, Connected: func(now int) { m.connected.Store(int64(now)) },
	})
	if err != nil {
		return fmt.Errorf("opening the socket for ztunnel: %w", err)
	}
	o := n.podOptions(c.NodeName)
	m.pods = enrol.New(enrol.Options{
		Env: o.Env, API: n.api, Follow: n.pods.Follow, Pod: n.pods.Pod, Places: c.Places, Host: m.host.Inode(), Ztunnels: m.ztunnels,
		Probes:     probes.New(probes.Options{Host: m.host, V4: c.Ambient.ProbeV4, V6: c.Ambient.ProbeV6, IPv6: c.Ambient.IPv6, Log: n.Log, Changed: notify}),
		TrustRules: !c.Ambient.ReconcileOnStart, SystemNamespace: c.Ambient.SystemNamespace, Failed: n.metrics.AmbientFailed, Moved: n.moved,
	})
	m.events, err = unixsock.Open(ctx, cmdadd.Socket(c.eventSocket(), c.RunDirMode, n.Log))
	if err != nil {
		return fmt.Errorf("opening the socket for the events of plugins: %w", err)
	}
	n.ambient = m
	n.metrics.ReadAmbient(func() metrics.AmbientCounts {
		enrolled, pending := m.pods.Counts()
		return metrics.AmbientCounts{Ztunnels: int(m.connected.Load()), Enrolled: enrolled, Pending: pending}
	})
	working, cancel := context.WithCancel(n.background)
	done := make(chan struct{})
	m.end = func() { cancel(); <-done }
	n.work.Go(func() {
		defer close(done)
		m.pods.Run(working)
	})
	n.work.Go(func() {
		m.events.Serve(n.background, cmdadd.Handler(cmdadd.Options{Add: m.pods.Add, Count: n.metrics.EventAnswered}))
	})
	n.work.Go(func() {
		select {
		case <-m.pods.Primed():
			n.health.Ready(partAmbient)
		case <-n.background.Done():
		}
	})
	return nil
}

// moved has the audit look at a pod.
func (n *node) moved(k types.NamespacedName) {
	if pods := n.audit.Load(); pods != nil {
		pods.Notify(k)
	}
}

// probeSet reads what another plugin's agent has written.
func (n *node) probeSet() (map[netip.Addr]string, error) {
	host, err := netns.Open(n.Config.nodeNamespace())
	if err != nil {
		return nil, fmt.Errorf("the node's network namespace: %w", err)
	}
	defer host.Close()
	return probeset.ReadAny(host)
}

// missing is nodepods.Options.Enrolment.
func (m *ambientMode) missing(uid string) (step string, known bool) {
	s, known := m.pods.Status(uid)
	return s.Missing, known && s != (enrol.Status{}) // set by the first turn
}

// selectors returns the enablement selectors in force, nil without ambient mode.
func (n *node) selectors() *selector.Ambient {
	if !n.Config.Ambient.Enabled {
		return nil
	}
	return n.stanza.Load().selectors
}

// closeAmbient removes the node's own part of ambient mode. The rules of pods stay: ztunnel may still serve them.
func (n *node) closeAmbient(ctx context.Context) error {
	if n.ambient == nil {
		return nil
	}
	n.ambient.end() // it would restore the table
	n.Log.InfoContext(ctx, "removing the table of probes", slog.String("namespace", n.Config.HostNamespace()))
	return probeset.Remove(n.ambient.host)
}
