package sidecar

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/meshcni/istio-cni/internal/core/redirect"
)

// Keys of annotations (InjectKey is a label, too). All are protocol.
const (
	InjectKey = "sidecar.istio.io/inject"
	StatusKey = "sidecar.istio.io/status"
	ModeKey   = "sidecar.istio.io/interceptionMode"

	OutboundKey             = "traffic.sidecar.istio.io/includeOutboundIPRanges"
	OutboundExcludeKey      = "traffic.sidecar.istio.io/excludeOutboundIPRanges"
	InboundPortsKey         = "traffic.sidecar.istio.io/includeInboundPorts"
	InboundPortsExcludeKey  = "traffic.sidecar.istio.io/excludeInboundPorts"
	OutboundPortsKey        = "traffic.sidecar.istio.io/includeOutboundPorts"
	OutboundPortsExcludeKey = "traffic.sidecar.istio.io/excludeOutboundPorts"
	ExcludeInterfacesKey    = "traffic.sidecar.istio.io/excludeInterfaces"
	RerouteInterfacesKey    = "istio.io/reroute-virtual-interfaces"
	// KubevirtInterfacesKey is the old name of RerouteInterfacesKey and counts only where that one is absent.
	KubevirtInterfacesKey = "traffic.sidecar.istio.io/kubevirtInterfaces"
)

// modeNone is what the injector accepts, and writes, for a pod that is not to be captured.
const modeNone = "NONE"

// fields says which setting each annotation is.
var fields = map[string]redirect.Field{ //nolint:gochecknoglobals // a constant table
	ModeKey:                 redirect.FieldMode,
	OutboundKey:             redirect.FieldOutbound,
	OutboundExcludeKey:      redirect.FieldOutboundExclude,
	InboundPortsKey:         redirect.FieldInbound,
	InboundPortsExcludeKey:  redirect.FieldInboundExclude,
	OutboundPortsKey:        redirect.FieldOutboundPorts,
	OutboundPortsExcludeKey: redirect.FieldOutboundPortsExclude,
	ExcludeInterfacesKey:    redirect.FieldExcludeInterfaces,
	RerouteInterfacesKey:    redirect.FieldRerouteInterfaces,
}

// proxy is what is read of the container istio-proxy. Should an init container and a container both have the name, the
// later one wins value by value.
type proxy struct {
	present     bool
	role        string // second argument of "proxy ROLE"
	env         map[string]string
	user, group *int64
}

func proxyOf(f Facts) proxy {
	p := proxy{env: map[string]string{}}
	for _, c := range f.Containers {
		if c.Name != proxyContainer {
			continue
		}
		p.present = true
		if len(c.Args) >= 2 && c.Args[0] == "proxy" {
			p.role = c.Args[1]
		}
		for _, e := range c.Env {
			p.env[e.Name] = e.Value
		}
		p.user, p.group = later(p.user, c.RunAsUser), later(p.group, c.RunAsGroup)
	}
	// The kubelet applies the pod's securityContext where the container has none; the reference forgets it.
	p.user, p.group = later(f.RunAsUser, p.user), later(f.RunAsGroup, p.group)
	return p
}

func later(a, b *int64) *int64 {
	if b != nil {
		return b
	}
	return a
}

// settings reads annotations, the proxy's identity and its environment. The error holds everything that is wrong.
func settings(f Facts, p proxy) (redirect.Spec, []string, error) {
	base := redirect.Default()
	values := redirect.Values{}
	for key, field := range fields {
		if text, ok := f.Annotations[key]; ok {
			values[field] = redirect.Value{Source: annotation(key), Text: text}
		}
	}
	if _, ok := values[redirect.FieldRerouteInterfaces]; !ok {
		if text, ok := f.Annotations[KubevirtInterfacesKey]; ok {
			values[redirect.FieldRerouteInterfaces] = redirect.Value{Source: annotation(KubevirtInterfacesKey), Text: text}
		}
	}
	spec, err := redirect.Parse(base, values, redirect.Dialect{Strict: true})
	spec.InboundExclude = withSidecarPorts(spec.InboundExclude)
	var badUser, badGroup error
	spec.UIDs, badUser = identity("runAsUser", p.user)
	spec.GIDs, badGroup = identity("runAsGroup", p.group)
	var warnings []string
	flag := func(name string) bool {
		on, warning := envFlag(p.env, name)
		warnings = append(warnings, warning...)
		return on
	}
	if flag("ISTIO_META_DNS_CAPTURE") {
		spec.DNS = redirect.DNSAll
	}
	spec.DualStack = flag("ISTIO_DUAL_STACK")
	spec.DropInvalid = flag("INVALID_DROP")
	return spec, warnings, errors.Join(err, badUser, badGroup)
}

func annotation(key string) string { return fmt.Sprintf("annotation %q", key) }

// withSidecarPorts adds the sidecar's own ports to the excluded ones and drops repetitions, keeping the first.
func withSidecarPorts(ports []uint16) []uint16 {
	var out []uint16
	for _, p := range slices.Concat(ports, redirect.AlwaysExcluded()) {
		if !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	return out
}

// identity turns a securityContext value into the proxy's id. None and 0 mean 1337: a proxy that runs as root (TPROXY,
// or with NET_BIND_SERVICE) keeps that group, and root must not be exempt from capture.
func identity(field string, id *int64) ([]uint32, error) {
	if id == nil || *id == 0 {
		return []uint32{redirect.DefaultID}, nil
	}
	if *id < 0 || *id >= math.MaxUint32 {
		return nil, fmt.Errorf("securityContext.%s of container %q or its pod: value %d is not a user or group id", field, proxyContainer, *id)
	}
	return []uint32{uint32(*id)}, nil
}

// envFlag reads a switch from the proxy's environment. One that cannot be read is off and worth a warning, as in the
// reference: the proxy itself treats it so.
func envFlag(env map[string]string, name string) (bool, []string) {
	text := env[name]
	if text == "" {
		return false, nil
	}
	on, err := strconv.ParseBool(text)
	if err != nil {
		return false, []string{fmt.Sprintf("ignoring environment variable %s of container %q: it is not a boolean", name, proxyContainer)}
	}
	return on, nil
}
