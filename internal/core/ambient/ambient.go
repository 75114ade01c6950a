// Package ambient decides which traffic of a pod goes to the node's ztunnel and by which rules, in the dialects of iptables and nft.
//
// It promises that a Spec's rules are those of Istio's node agent, one by one, in the spelling of the kernel's tools; and that Of
// returns valid Specs only. No function fails, asks the system or the time. Spec is a redirect.Wanted: packages below node
// write it into a namespace as they write a sidecar's rules. Names, marks, ports and addresses are protocol: ztunnel has them built in.
//
// Start reading at Spec, then rules.go.
package ambient

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// RedirectionKey is the annotation that tells istiod whether a pod is captured: only RedirectionEnabled says so. RedirectionPending
// is for a pod whose rules may be in place and that ztunnel need not serve.
const (
	RedirectionKey     = "ambient.istio.io/redirection"
	RedirectionEnabled = "enabled"
	RedirectionPending = "pending"
)

// The label of ztunnel's own pods.
const (
	ZtunnelLabel = "app"
	ZtunnelApp   = "ztunnel"
)

// Keys of the annotations that change a pod's rules.
const (
	BypassInboundKey     = "ambient.istio.io/bypass-inbound-capture" //nolint:gosec // an annotation
	DNSCaptureKey        = "ambient.istio.io/dns-capture"
	RerouteInterfacesKey = "istio.io/reroute-virtual-interfaces"
)

// Marks of packets and of connections, with the mask of all rules, and the routing of marked packets.
const (
	ProxyMark      = 0x539 // ztunnel sets it on its sockets
	ConnectionMark = 0x111 // of connections from ztunnel to the app
	MarkMask       = 0xfff
	Table          = 100
	Priority       = 32764 // of the policy rule
)

// Config holds the node's settings for the rules of its pods.
type Config struct {
	// DNSCapture sends DNS queries to ztunnel. IPv6 captures IPv6; otherwise IPv6 runs past the mesh.
	DNSCapture, IPv6 bool
	// ProbeV4 and ProbeV6 are the sources of packets of the node itself, such as the kubelet's probes: they are not captured.
	ProbeV4, ProbeV6 netip.Addr
}

// DefaultConfig returns the settings with the reference's probe addresses.
func DefaultConfig() Config {
	return Config{
		ProbeV4: netip.AddrFrom4([4]byte{169, 254, 7, 127}),
		ProbeV6: netip.MustParseAddr("fd16:9254:7127:1337:ffff:ffff:ffff:ffff"),
	}
}

// probe returns the probe address of a family.
func (c Config) probe(f ruleset.Family) netip.Addr {
	if f == ruleset.IPv6 {
		return c.ProbeV6
	}
	return c.ProbeV4
}

// Spec describes the traffic to capture in one pod. It is a [redirect.Wanted].
type Spec struct {
	Config

	// Ingress leaves incoming connections alone.
	Ingress bool
	// Interfaces are those of virtual machines: TCP that enters by them is outbound.
	Interfaces []string
}

// Of returns the Spec of a pod with the annotations. It ignores bad values, and returns a warning for each.
func Of(c Config, annotations map[string]string) (s Spec, warnings []string) {
	s.Config = c
	ignored := func(key, problem string) {
		warnings = append(warnings, fmt.Sprintf("annotation %s: value %s: %s; it is ignored", key, printable.Quote(annotations[key], maxShown), problem))
	}
	set := func(key string, to *bool) {
		text, there := annotations[key]
		if value, err := strconv.ParseBool(text); err == nil {
			*to = value
		} else if there {
			ignored(key, "want true or false")
		}
	}
	set(BypassInboundKey, &s.Ingress)
	set(DNSCaptureKey, &s.DNSCapture)
	if text, there := annotations[RerouteInterfacesKey]; there && strings.TrimSpace(text) != "" {
		names, err := redirect.Interfaces(text)
		if err != nil {
			ignored(RerouteInterfacesKey, err.Error())
		}
		s.Interfaces = names
	}
	return s, warnings
}

// maxShown bounds an annotation in a warning.
const maxShown = 128

// Owner recognises the rules. Sidecars have the same chain prefix, and share the name ISTIO_OUTPUT: a pod has one mode or the other.
func Owner() redirect.Owner {
	const prefix = "istio-ambient-"
	return redirect.Owner{
		ChainPrefix: redirect.Sidecar().ChainPrefix, NativePrefix: prefix, Mark: ConnectionMark, Mask: MarkMask,
		Native: []string{prefix + "nat", prefix + "mangle", prefix + "raw"},
	}
}

// Owner is Owner.
func (Spec) Owner() redirect.Owner { return Owner() }

// FamiliesOf captures IPv4 always, and IPv6 if it is configured and the kernel has it, whatever the addresses are.
func (s Spec) FamiliesOf(addresses []netip.Addr, kernelHasIPv6 bool) (redirect.Families, error) {
	f := redirect.Addressed(addresses)
	switch {
	case s.IPv6 && kernelHasIPv6:
		f.IPv6 = redirect.Captured
	case f.HasIPv6:
		f.IPv6 = redirect.Bypassed
	}
	return f, nil
}

// Routing delivers the packets of ztunnel's connections to the app locally: the app's answers go to the client's address.
func (s Spec) Routing(f redirect.Families) redirect.Routing {
	return redirect.Routing{MarkFamilies: f.Captured(), Mark: ConnectionMark, Mask: MarkMask, Table: Table, Priority: Priority}
}
