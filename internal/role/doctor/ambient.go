package doctor

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/probeset"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

// ambientChecks are the checks of a node that serves ambient mode, or shall do so.
func ambientChecks() []named {
	return []named{{"ambient", ambientMode}, {"ambient-kernel", ambientKernel}, {"ambient-limits", ambientLimits}, {"ambient-policies", ambientPolicies}}
}

// connections matches the gauge in the agent's metrics.
var connections = regexp.MustCompile(`(?m)^ztunnel_connected ([0-9]+)$`)

// ambientMode checks that the agent serves ztunnel's socket and that ztunnel is connected.
func ambientMode(ctx context.Context, v *view) document.Check {
	const see = "kubectl get pods -A -l app=ztunnel -o wide, and the log of ztunnel on this node"
	ctx, cancel := context.WithTimeout(ctx, maxRequest)
	defer cancel()
	text, err := agentapi.Ask(ctx, filepath.Join(v.RunDir, agentapi.SocketName), "", func(a *agentapi.Agent) ([]byte, error) {
		return a.Bundle(ctx, agentapi.BundleMetrics, time.Time{})
	})
	found := connections.FindSubmatch(text)
	switch {
	case v.features.observe:
		return ok("an observer does not serve ambient mode: Istio's agent does")
	case err != nil:
		return warn("see the agent's log", "whether ztunnel is connected is not known: %v", err)
	case found == nil:
		return warn("set ambient.enabled=true (or profile=ambient) in the agent's chart, and install Istio's chart ztunnel", "the agent does not serve ambient mode")
	case string(found[1]) == "0":
		return fail(see, "no ztunnel is connected to the agent%s: pods of ambient mode do not start", v.ztunnels(ctx))
	}
	return ok("the agent serves ambient mode; connections of ztunnel: %s%s", found[1], v.ztunnels(ctx))
}

// ztunnels names ztunnel's pods of this node, as far as the API server tells.
func (v *view) ztunnels(ctx context.Context) string {
	if v.api == nil {
		return ""
	}
	pods, err := v.api.Pods(ctx, v.Node, mostPods)
	if err != nil {
		return ""
	}
	var all []string
	for _, p := range pods {
		if p.Facts.Labels["app"] == "ztunnel" {
			all = append(all, fmt.Sprintf("%s, ready: %t", p.Key(), p.Ready))
		}
	}
	if len(all) == 0 {
		return " (no pod with the label app=ztunnel is on this node)"
	}
	return " (" + printable.Some(all, mostNames) + ")"
}

// ambientKernel writes the rules of a pod and of the node into a network namespace of its own.
func ambientKernel(ctx context.Context, v *view) document.Check {
	if v.features.observe {
		return ok("an observer makes no test")
	}
	conf := ambient.DefaultConfig()
	space, err := netns.New()
	if err != nil {
		return warn("run it as root with CAP_SYS_ADMIN and CAP_NET_ADMIN", "no test was made: %v", err)
	}
	defer space.Close()
	_, err = probeset.Apply(space, probeset.Want{V4: conf.ProbeV4, V6: conf.ProbeV6, IPv6: true}) //nolint:contextcheck // a new namespace
	if err == nil {
		pod := redirection.Namespace{NetNS: space, Backend: redirect.Netlink, Log: slog.New(slog.DiscardHandler)}
		_, err = pod.Apply(ctx, ambient.Spec{Config: conf}, redirection.Reconcile)
	}
	if err != nil {
		return fail("update the kernel, or load the modules that the text names", "the kernel cannot serve ambient mode: %v", err)
	}
	return ok("the kernel takes the rules of ambient mode (nat in family inet, a policy rule with a mask)")
}

// Descriptors of the agent: for each pod its namespace and the watch of its rules, and some for all else.
const (
	perPod, maxPods, otherFiles = 2, 250, 256
)

// ambientLimits checks the number of open files, and a setting of the node by which the kubelet's probes miss their sockets.
func ambientLimits(_ context.Context, v *view) document.Check {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err == nil && limit.Max < perPod*maxPods+otherFiles {
		return warn(fmt.Sprintf("raise the container runtime's LimitNOFILE to %d or more", perPod*maxPods+otherFiles),
			"a process may open %d files, which suffices for %d pods in ambient mode", limit.Max, max(0, int(limit.Max)-otherFiles)/perPod)
	}
	var demux []byte
	host, err := netns.Open(v.below("/proc/1/ns/net"))
	if err == nil {
		defer host.Close()
		err = host.Do(func() (err error) {
			demux, _, err = hostfs.ReadFile("/proc/sys/net/ipv4/tcp_early_demux", maxConf)
			return err
		})
	}
	if err == nil && strings.HasPrefix(string(demux), "0") {
		return warn("leave pods with security groups of their own out of ambient mode (label istio.io/dataplane-mode=none); none without such pods",
			"tcp_early_demux is off on this node, as for security groups for pods on AWS: probes of such pods do not reach them in ambient mode")
	}
	return ok("the agent may open %d files; tcp_early_demux is not off, as far as it is seen", limit.Max)
}

// ambientPolicies says what is not checked: the agent has no right to read it.
func ambientPolicies(context.Context, *view) document.Check {
	return warn("kubectl get networkpolicies -A: policies for these pods have to let in TCP port 15008 from all pods of the mesh, and 169.254.7.127 for probes; "+
		"policies by port of the app do not apply inside the tunnel", "the agent may not read network policies, and istiod's settings and versions, which kubectl istio-cni doctor --for ambient checks")
}
