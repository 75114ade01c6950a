package sidecar

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// proxy has the inputs from the container istio-proxy. If an init container and a container both have the name, the
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
		if c.Name != ProxyContainer {
			continue
		}
		p.present = true
		if len(c.Args) >= 2 && c.Args[0] == "proxy" {
			p.role = c.Args[1]
		}
		for _, e := range c.Env {
			p.env[e.Name] = e.Value
		}
		p.user, p.group = cmp.Or(c.RunAsUser, p.user), cmp.Or(c.RunAsGroup, p.group)
	}
	// The kubelet applies the pod's securityContext if the container has none; the reference does not.
	p.user, p.group = cmp.Or(p.user, f.RunAsUser), cmp.Or(p.group, f.RunAsGroup)
	return p
}

// settings makes a Spec from the annotations and the proxy's identity and environment. The error joins all invalid settings.
func settings(f Facts, p proxy) (redirect.Spec, []string, error) {
	values := redirect.Values{}
	for _, in := range inputs {
		text, written := f.Annotations[in.key]
		if _, set := values[in.field]; in.kind == setting && written && !set {
			values[in.field] = redirect.Value{Source: fmt.Sprintf("annotation %q", in.key), Text: text}
		}
	}
	spec, err := redirect.Parse(redirect.Default(), values, redirect.Dialect{Strict: true})
	spec.InboundExclude = withSidecarPorts(spec.InboundExclude)
	spec.Annotations = annotations(values)
	var badUser, badGroup error
	spec.UIDs, badUser = identity("runAsUser", p.user)
	spec.GIDs, badGroup = identity("runAsGroup", p.group)
	var warnings []string
	if _, written := values[redirect.FieldMoreInbound]; written && spec.Inbound.All {
		warnings = append(warnings, fmt.Sprintf("ignoring annotation %q: all inbound ports are captured; set annotation %q to the ports, or to nothing", MoreInboundPortsKey, InboundPortsKey))
	}
	for _, in := range inputs {
		if text := p.env[in.key]; in.enable != nil && text != "" {
			on, unread := strconv.ParseBool(text)
			if unread != nil { // off, as in the proxy itself
				warnings = append(warnings, fmt.Sprintf("ignoring environment variable %s of container %q: it is not a boolean", in.key, ProxyContainer))
			} else if on {
				in.enable(&spec)
			}
		}
	}
	return spec, warnings, errors.Join(err, badUser, badGroup)
}

// annotations names the annotations of each field that this program's annotations set or add to.
func annotations(values redirect.Values) map[redirect.Field]string {
	var all map[redirect.Field]string
	for more, field := range added {
		if values[more].Text == "" {
			continue
		}
		if all == nil {
			all = map[redirect.Field]string{}
		}
		all[field] = KeyOf(more)
		if values[field].Text != "" {
			all[field] = KeyOf(field) + " and " + KeyOf(more)
		}
	}
	return all
}

// withSidecarPorts adds the sidecar's own ports to the excluded ones and drops duplicates, keeping the first.
func withSidecarPorts(ports []ruleset.PortRange) []ruleset.PortRange {
	var out []ruleset.PortRange
	for _, p := range slices.Concat(ports, redirect.AlwaysExcluded()) {
		if !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	return out
}

// identity converts a securityContext value to the proxy's ID. Without a value and for 0 it is 1337: a proxy that runs
// as root (TPROXY, or with NET_BIND_SERVICE) keeps that group, and root must not be exempt from capture.
func identity(field string, id *int64) ([]uint32, error) {
	if id == nil || *id == 0 {
		return []uint32{redirect.DefaultID}, nil
	}
	if *id < 0 || *id >= math.MaxUint32 {
		return nil, fmt.Errorf("securityContext.%s of container %q or its pod: value %d is not a user or group id", field, ProxyContainer, *id)
	}
	return []uint32{uint32(*id)}, nil
}
