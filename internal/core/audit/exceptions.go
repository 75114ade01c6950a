package audit

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// Exception is a setting of the pod by which traffic bypasses the proxy.
type Exception struct {
	// Setting is the name of the setting, such as an annotation.
	Setting string `json:"setting"`
	// Value is its text.
	Value string `json:"value"`
	// Traffic is the traffic that is not redirected.
	Traffic string `json:"traffic"`
}

// maxValue bounds the text of a value in bytes: a list of a pod can be long.
const maxValue = 256

// Exceptions lists the settings, by the names of annotations, that let traffic of a pod bypass the mesh, except the defaults of every pod.
func Exceptions(want redirect.Wanted) []Exception {
	switch s := want.(type) {
	case redirect.Spec:
		return ofSpec(s)
	case ambient.Spec:
		if s.Ingress {
			return []Exception{{ambient.BypassInboundKey, "true", "inbound connections"}}
		}
	}
	return nil
}

func ofSpec(s redirect.Spec) (all []Exception) {
	name := sidecar.KeysOf(s)
	add := func(field redirect.Field, value, traffic string) {
		if value != "" {
			all = append(all, Exception{name(field), printable.Text(value, maxValue), traffic})
		}
	}
	if !s.Inbound.All {
		add(redirect.FieldInbound, cmp.Or(join(s.Inbound.List), "none"), "inbound connections to any other port")
	}
	own := slices.DeleteFunc(slices.Clone(s.InboundExclude), func(p ruleset.PortRange) bool { return slices.Contains(redirect.AlwaysExcluded(), p) })
	if s.Inbound.All {
		add(redirect.FieldInboundExclude, join(own), "inbound connections to these ports")
	}
	if !s.Outbound.All {
		traffic := "outbound connections to any other address"
		if len(s.OutboundPorts) > 0 {
			traffic += ", except to the ports " + join(s.OutboundPorts)
		}
		add(redirect.FieldOutbound, cmp.Or(join(s.Outbound.List), "none"), traffic)
	}
	add(redirect.FieldOutboundExclude, join(s.OutboundExclude), "outbound connections to these addresses")
	defaults := redirect.Default().OutboundPortsExclude
	own = slices.DeleteFunc(slices.Clone(s.OutboundPortsExclude), func(p ruleset.PortRange) bool { return slices.Contains(defaults, p) })
	add(redirect.FieldOutboundPortsExclude, join(own), "outbound traffic to these ports")
	add(redirect.FieldExcludeInterfaces, strings.Join(s.ExcludeInterfaces, ","), "traffic of these interfaces")
	if !s.OwnerGroups.All {
		add(redirect.FieldOwnerGroups, cmp.Or(join(s.OwnerGroups.List), "none"), "outbound traffic of processes of any other group")
	}
	add(redirect.FieldOwnerGroupsExclude, join(s.OwnerGroupsExclude), "outbound traffic of processes of these groups")
	return all
}

// maxItems bounds the printed items of a list.
const maxItems = 50

func join[T any](all []T) string {
	some := make([]string, 0, min(len(all), maxItems+1))
	for i, one := range all {
		if i == maxItems {
			some = append(some, fmt.Sprintf("and %d more", len(all)-i))
			break
		}
		some = append(some, fmt.Sprint(one))
	}
	return strings.Join(some, ",")
}
