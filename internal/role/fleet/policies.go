package fleet

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"

	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
)

// hbonePort is where ztunnel receives in a pod, and probeSources are the default sources of the node's connections to pods of ambient mode.
const hbonePort, probeSources = 15008, "169.254.7.127 and fd16:9254:7127:1337:ffff:ffff:ffff:ffff"

// policy has the fields of a NetworkPolicy that decide about incoming connections.
type policy struct {
	object

	Spec struct {
		PodSelector json.RawMessage
		PolicyTypes []string
		Ingress     []struct {
			Ports []struct {
				Protocol string
				Port     json.RawMessage
				EndPort  int
			}
			From []struct{ IPBlock *block }
		}
	}
}

type block struct {
	CIDR   string
	Except []string
}

// hbone reports whether some peer reaches port 15008.
func (p policy) hbone() bool {
	for _, rule := range p.Spec.Ingress {
		for _, port := range rule.Ports {
			var from int
			named := json.Unmarshal(port.Port, &from) != nil && len(port.Port) > 0
			if (port.Protocol == "" || port.Protocol == "TCP") && !named && (len(port.Port) == 0 || from <= hbonePort && hbonePort <= max(from, port.EndPort)) {
				return true
			}
		}
		if len(rule.Ports) == 0 {
			return true
		}
	}
	return false
}

// probes reports whether probes reach some port.
func (p policy) probes() bool {
	source := netip.MustParseAddr("169.254.7.127")
	within := func(text string) bool {
		prefix, err := netip.ParsePrefix(text)
		return err == nil && prefix.Contains(source)
	}
	for _, rule := range p.Spec.Ingress {
		for _, from := range rule.From {
			if from.IPBlock != nil && within(from.IPBlock.CIDR) && !slices.ContainsFunc(from.IPBlock.Except, within) {
				return true
			}
		}
		if len(rule.From) == 0 {
			return true
		}
	}
	return false
}

// policies checks which NetworkPolicies keep out what ambient mode needs, if their pods move to it. Policies add up: another one for the same
// pods, or for all of the namespace, may let it in.
func (f *fleet) policies(ctx context.Context) document.Check {
	check := document.Check{
		Name: "ambient-policies", Result: document.Warn,
		Remedy: fmt.Sprintf("if their pods move to ambient mode, let in TCP port %d from all pods of the mesh, and %s for probes; policies by port of the app do not apply inside the tunnel",
			hbonePort, probeSources),
	}
	found, err := query[policy](ctx, f, "networkpolicies.networking.k8s.io", "--all-namespaces")
	if err != nil {
		check.Text = fmt.Sprintf("network policies could not be checked: %v", err)
		return check
	}
	found = slices.DeleteFunc(found, func(p policy) bool {
		return p.Metadata.Namespace == "kube-system" || len(p.Spec.PolicyTypes) > 0 && !slices.Contains(p.Spec.PolicyTypes, "Ingress")
	})
	without := func(lets func(policy) bool) (names []string) {
		for _, p := range found {
			if !slices.ContainsFunc(found, func(other policy) bool { return other.covers(p) && lets(other) }) {
				names = append(names, p.Metadata.Namespace+"/"+p.Metadata.Name)
			}
		}
		return names
	}
	hbone, probes := without(policy.hbone), without(policy.probes)
	if check.Text = "no NetworkPolicy keeps out port 15008 or probes"; len(hbone)+len(probes) == 0 {
		check.Result = document.OK
		return check
	}
	check.Text = fmt.Sprintf("NetworkPolicies that keep out TCP port %d: %s; probes: %s", hbonePort, some(hbone), some(probes))
	return check
}

// covers reports whether the policy is for all pods of another one.
func (p policy) covers(other policy) bool {
	all := len(p.Spec.PodSelector) == 0 || bytes.Equal(p.Spec.PodSelector, []byte("{}"))
	return p.Metadata.Namespace == other.Metadata.Namespace && (all || bytes.Equal(p.Spec.PodSelector, other.Spec.PodSelector))
}

// some names the first of some names, and "none".
func some(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return printable.Some(names, mostNames)
}
