package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// Cilium's ConfigMap in its default namespace.
const (
	ciliumNamespace = "kube-system"
	ciliumConfig    = "cilium-config"
)

// ciliumRuntime is where Cilium's agent writes its settings in force, the JSON text of its option.DaemonConfig.
const ciliumRuntime = "/var/run/cilium/state/agent-runtime-config.json"

// readCilium reads the ConfigMap or, without access to it, the settings of Cilium's agent on this node.
func (v *view) readCilium() (c cilium) {
	c.err = v.noAPI
	if v.api != nil {
		c.data, c.err = v.api.ConfigMap(context.Background(), ciliumNamespace, ciliumConfig)
	}
	if c.whole = c.err == nil; c.whole || v.root == "" {
		return c
	}
	var inForce struct{ BPFSocketLBHostnsOnly, EnableSocketLB *bool }
	text, _, err := hostfs.ReadFile(v.below(ciliumRuntime), maxConf)
	if err != nil || json.Unmarshal(text, &inForce) != nil || inForce.BPFSocketLBHostnsOnly == nil {
		return c
	}
	if *inForce.BPFSocketLBHostnsOnly || inForce.EnableSocketLB != nil { // releases since 1.18 have EnableSocketLB in another place
		c.data, c.err = map[string]string{
			"bpf-lb-sock-hostns-only": fmt.Sprint(*inForce.BPFSocketLBHostnsOnly), "bpf-lb-sock": fmt.Sprint(inForce.EnableSocketLB == nil || *inForce.EnableSocketLB),
		}, nil
	}
	return c
}

// socketLB checks whether Cilium translates the addresses of Services in a pod's sockets (bpf-lb-sock, which kube-proxy-replacement
// includes) before iptables sees the connection; bpf-lb-sock-hostns-only excludes pods.
func socketLB(_ context.Context, v *view) document.Check {
	c := v.cilium()
	switch {
	case c.err != nil && !v.present() && (v.root != "" || v.network().err == nil):
		return ok("Cilium is not on this node")
	case c.err != nil:
		return warn("kubectl -n kube-system get configmap cilium-config -o yaml | grep -E 'bpf-lb-sock|kube-proxy-replacement': with socket load "+
			"balancing, bpf-lb-sock-hostns-only has to be true", "whether Cilium's socket load balancing bypasses the rules is not known: %v", c.err)
	}
	for key, on := range map[string][]string{
		"kube-proxy-replacement": {"true", "strict"}, "bpf-lb-sock": {"true"}, "enable-host-reachable-services": {"true"},
	} {
		if slices.Contains(on, c.data[key]) && c.data["bpf-lb-sock-hostns-only"] != "true" {
			return fail("set socketLB.hostNamespaceOnly=true in Cilium's chart (bpf-lb-sock-hostns-only), and restart its agents",
				"Cilium translates addresses of Services in the pods' sockets (%s=%s): the sidecar sees pods' addresses, and its routes do not apply", key, c.data[key])
		}
	}
	return ok("Cilium leaves the sockets of pods alone")
}

// token checks the credentials that the agent has written for the plugin.
func token(ctx context.Context, v *view) document.Check {
	const remedy = "see the agent's log: it rewrites the file when its own token changes"
	if kube.ClassOf(v.noAgent) == kube.InvalidConfig && !errors.Is(v.noAgent, fs.ErrPermission) {
		return fail(remedy, "the plugin cannot use the kubeconfig %s: %v", v.shown(v.kubeconfig), errors.Unwrap(v.noAgent))
	}
	if v.agent == nil {
		return warn("none before the installation; else see the agent's log", "%v", v.noAgent)
	}
	if _, err := v.agent.Allowed(ctx, kube.Right{Verb: "get", Resource: "pods"}); kube.ClassOf(err) == kube.Unauthorized {
		return fail(remedy, "the API server refuses the token in %s", v.shown(v.kubeconfig))
	} else if err != nil {
		return warn("see whether this node reaches the API server", "the token in %s cannot be tried: %v", v.shown(v.kubeconfig), err)
	}
	t, err := v.agent.Token()
	left := time.Until(t.Expires).Round(time.Second)
	const soon = 5 * time.Minute // the kubelet renews a token when a fifth of its time is left, at least two minutes
	switch {
	case err != nil:
		return ok("the API server accepts the credentials in %s; when they expire is not known: %v", v.shown(v.kubeconfig), err)
	case t.Expires.IsZero():
		return ok("the API server accepts the token of %s, which does not expire", t.Subject)
	case left <= 0:
		return fail(remedy, "the token of %s in %s has expired, %s ago", t.Subject, v.shown(v.kubeconfig), -left)
	case left < soon:
		return warn(remedy, "the token of %s expires in %s", t.Subject, left)
	}
	return ok("the API server accepts the token of %s, which expires in %s", t.Subject, left)
}

// wanted are the rights that the agent and the plugin need, as in e2e/rights/agent.yaml. namespace is the agent's.
func (f *features) wanted(namespace string) (all []kube.Right) {
	audits, enrols := f.audit.Interval > 0, f.ambient && !f.observe
	deletes := f.repairEnabled && f.repair.Switches.Delete
	labels := f.repairEnabled && f.repair.Switches.Label && !f.repair.Switches.Delete
	pods, status := kube.Right{Resource: "pods"}, kube.Right{Resource: "pods", Subresource: "status"}
	for _, row := range []struct {
		needed bool
		right  kube.Right
		verbs  string
	}{
		{!f.observe, pods, "get"},
		{!f.observe, kube.Right{Resource: "nodes"}, "get"},
		{!f.observe, kube.Right{Group: "apps", Resource: "daemonsets", Namespace: namespace, Name: f.daemon}, "get"},
		{true, pods, "list watch"},
		{f.ambient, kube.Right{Resource: "namespaces"}, "list watch"},
		{enrols, kube.Right{Resource: "namespaces"}, "get"},
		{f.repairEnabled || audits, kube.Right{Resource: "events"}, "create patch"},
		{deletes && f.repair.Evict, kube.Right{Resource: "pods", Subresource: "eviction"}, "create"},
		{deletes && !f.repair.Evict, pods, "delete"},
		{enrols || labels || audits && f.audit.PodCondition, status, "patch"},
		{f.configMap != "", kube.Right{Resource: "configmaps", Namespace: namespace, Name: f.configMap}, "list watch"},
		{true, kube.Right{Resource: "events", Namespace: "default"}, "create patch"},
	} {
		for verb := range strings.FieldsSeq(row.verbs) {
			if row.right.Verb = verb; row.needed {
				all = append(all, row.right)
			}
		}
	}
	return all
}

// rights asks the API server whether the agent's identity has the rights of the enabled features.
func rights(ctx context.Context, v *view) document.Check {
	agent, err := v.agent, v.noAgent
	if v.features.observe { // the kubeconfig is another agent's
		agent, err = v.api, v.noAPI
	}
	if agent == nil {
		return warn("none before the installation; else see the agent's log", "the agent's rights cannot be reviewed: %v", err)
	}
	t, _ := agent.Token()
	namespace := v.Namespace
	if namespace == "" {
		namespace = t.Namespace()
	}
	if namespace == "" {
		return warn("set --pod-namespace", "the agent's namespace is not known, so its rights cannot be reviewed")
	}
	var missing []string
	all := v.features.wanted(namespace)
	for _, right := range all {
		allowed, err := agent.Allowed(ctx, right)
		if err != nil {
			return warn("see whether this node reaches the API server", "the agent's rights cannot be reviewed: %v", err)
		}
		if !allowed {
			missing = append(missing, right.String())
		}
	}
	if len(missing) > 0 && !v.isAgent {
		return warn("run it in the agent's container (kubectl istio-cni doctor); the rights of each feature are in docs/security.md",
			"the agent (%s) may not: %s, and whether its settings need that does not show here", t.Subject, printable.Some(missing, mostNames))
	}
	if len(missing) > 0 {
		return fail("grant them as docs/security.md has them, or switch the feature off", "the agent (%s) may not: %s", t.Subject, printable.Some(missing, mostNames))
	}
	return ok("the agent (%s) has the %d rights that its features need", t.Subject, len(all))
}

// mostPods bounds the number of inspected pods of a node.
const mostPods = 500

// injection checks which init container istiod has injected: istio-validation with pilot.cni.enabled, else istio-init, which
// programs the rules itself and needs its privileges.
func injection(ctx context.Context, v *view) document.Check {
	if v.api == nil {
		return noCluster(v.noAPI)
	}
	pods, err := v.api.Pods(ctx, v.Node, mostPods)
	if err != nil {
		return noCluster(err)
	}
	var validated, own []string
	for _, p := range pods {
		if p.Phase == "Succeeded" || p.Phase == "Failed" { // its containers have ended for good
			continue
		}
		switch has := func(name string) bool {
			return slices.ContainsFunc(p.Facts.Containers, func(c sidecar.Container) bool { return c.Name == name })
		}; {
		case has("istio-init"):
			own = append(own, p.Key().String())
		case has(sidecar.ValidationContainer):
			validated = append(validated, p.Key().String())
		}
	}
	const remedy = "set pilot.cni.enabled=true (values.pilot.cni.enabled) for istiod and its webhook, and restart these pods"
	switch {
	case len(own) > 0 && len(validated) == 0:
		return fail(remedy, "istiod injects istio-init, not istio-validation: pilot.cni.enabled is off, and the plugin leaves these pods alone: %s", printable.Some(own, mostNames))
	case len(own) > 0:
		return warn(remedy, "%s injected with pilot.cni.enabled, and %d without it: %s", output.Plural(len(validated), "pod"), len(own), printable.Some(own, mostNames))
	case len(validated) == 0:
		return warn("start a pod with a sidecar on this node", "no pod on node %s was injected by istiod, so its setting pilot.cni.enabled does not show", v.Node)
	}
	return ok("istiod injects istio-validation (pilot.cni.enabled), as of %s on this node", output.Plural(len(validated), "pod"))
}
