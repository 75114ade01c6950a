package inspect

import (
	"context"
	"slices"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

// Picture is what the agent's page draws of a namespace.
type Picture struct {
	// Ways are where packets go.
	Ways []walk.Way `json:"ways"`
	// IPv6 is what happens to IPv6: captured, rejected or bypassed; "" if the pod has no address of this family.
	IPv6 string `json:"ipv6,omitempty"`
	// DNS is the proxy's port for DNS, 0 if DNS is not captured. Tunnel is ztunnel's port for other ztunnels, 0 without ztunnel.
	DNS    uint16 `json:"dns,omitempty"`
	Tunnel uint16 `json:"tunnel,omitempty"`
	// Direct are the inbound ports of the proxy itself, which are not redirected.
	Direct []string `json:"direct,omitempty"`
}

// Draw returns the picture of a namespace, nil if the wanted redirection is not known. want may be nil as in Read.
func Draw(ctx context.Context, space redirection.Namespace, want redirect.Wanted) (*Picture, error) {
	live, err := read(ctx, space, want)
	if err != nil || live.Wanted == nil {
		return nil, err
	}
	p, w := &Picture{Ways: live.Ways()}, live.Wanted
	if w.Families.HasIPv6 {
		p.IPv6 = w.Families.IPv6.String()
	}
	if w.Spec.DNS != redirect.DNSOff {
		p.DNS = redirect.DNSPort
	}
	if w.Ambient != nil {
		p.Tunnel = w.Spec.TunnelPort
	}
	for _, port := range w.Spec.InboundExclude {
		if w.Spec.Inbound.All && slices.Contains(redirect.AlwaysExcluded(), port) {
			p.Direct = append(p.Direct, port.String())
		}
	}
	return p, nil
}
