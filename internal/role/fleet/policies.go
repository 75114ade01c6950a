package fleet

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
)

// hbonePort is where ztunnel receives in a pod, and probeSources are the default sources of the node's connections to pods of ambient mode.
const hbonePort, probeSources = 15008, "169.254.7.127 and fd16:9254:7127:1337:ffff:ffff:ffff:ffff"

// hbone reports whether some peer reaches port 15008.
func hbone(p networkingv1.NetworkPolicy) bool {
	admits := func(port networkingv1.NetworkPolicyPort) bool {
		isTCP := port.Protocol == nil || *port.Protocol == corev1.ProtocolTCP
		if port.Port == nil || !isTCP {
			return isTCP
		}
		first := port.Port.IntVal // 0 of a named port
		return first <= hbonePort && hbonePort <= max(first, ptr.Deref(port.EndPort, 0))
	}
	return slices.ContainsFunc(p.Spec.Ingress, func(rule networkingv1.NetworkPolicyIngressRule) bool {
		return len(rule.Ports) == 0 || slices.ContainsFunc(rule.Ports, admits)
	})
}

// probes reports whether probes reach some port.
func probes(p networkingv1.NetworkPolicy) bool {
	source := netip.MustParseAddr("169.254.7.127")
	within := func(text string) bool {
		prefix, err := netip.ParsePrefix(text)
		return err == nil && prefix.Contains(source)
	}
	admits := func(from networkingv1.NetworkPolicyPeer) bool {
		return from.IPBlock != nil && within(from.IPBlock.CIDR) && !slices.ContainsFunc(from.IPBlock.Except, within)
	}
	return slices.ContainsFunc(p.Spec.Ingress, func(rule networkingv1.NetworkPolicyIngressRule) bool {
		return len(rule.From) == 0 || slices.ContainsFunc(rule.From, admits)
	})
}

// policies checks which NetworkPolicies keep out what ambient mode needs, if their pods move to it. Policies add up: another one for the same
// pods, or for all of the namespace, may let it in.
func (f *fleet) policies(ctx context.Context) document.Check {
	const name = "ambient-policies"
	remedy := fmt.Sprintf("if their pods move to ambient mode, let in TCP port %d from all pods of the mesh, and %s for probes; policies by port of the app do not apply inside the tunnel",
		hbonePort, probeSources)
	found, err := query[networkingv1.NetworkPolicy](ctx, f, "networkpolicies.networking.k8s.io", "--all-namespaces")
	if err != nil {
		return result(name, document.Warn, remedy, "network policies could not be checked: %v", err)
	}
	found = slices.DeleteFunc(found, func(p networkingv1.NetworkPolicy) bool {
		return p.Namespace == "kube-system" || len(p.Spec.PolicyTypes) > 0 && !slices.Contains(p.Spec.PolicyTypes, networkingv1.PolicyTypeIngress)
	})
	keepOut, keepOutProbes := keptOut(found, hbone), keptOut(found, probes)
	if len(keepOut)+len(keepOutProbes) == 0 {
		return result(name, document.OK, "", "no NetworkPolicy keeps out port 15008 or probes")
	}
	return result(name, document.Warn, remedy, "NetworkPolicies that keep out TCP port %d: %s; probes: %s", hbonePort, some(keepOut), some(keepOutProbes))
}

// keptOut returns the policies whose pods no policy lets something in for: none with the same selector, and none for all of the namespace.
// It reads each policy once, because a cluster can have many.
func keptOut(found []networkingv1.NetworkPolicy, lets func(networkingv1.NetworkPolicy) bool) (names []string) {
	pods := func(namespace string, selector metav1.LabelSelector) [2]string {
		text, _ := json.Marshal(selector) // it has texts only
		return [2]string{namespace, string(text)}
	}
	in := map[[2]string]bool{}
	for _, p := range found {
		if lets(p) {
			in[pods(p.Namespace, p.Spec.PodSelector)] = true
		}
	}
	for _, p := range found {
		if !in[pods(p.Namespace, metav1.LabelSelector{})] && !in[pods(p.Namespace, p.Spec.PodSelector)] {
			names = append(names, p.Namespace+"/"+p.Name)
		}
	}
	return names
}

// some names the first of some names, and "none".
func some(names []string) string { return cmp.Or(printable.Some(names, mostNames), "none") }
