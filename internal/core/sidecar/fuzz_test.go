package sidecar_test

import (
	"slices"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// keys and variables are all that decisions read.
var keys, variables = sidecar.Keys()

// Bits that choose the rest of the pod.
const (
	bitHostNetwork = 1 << iota
	bitIstioInit
	bitNoProxy
	bitNative
	bitNoStatus
	bitAmbient
	bitLabel
	bitNoArgs
)

// FuzzDecide writes any text into annotations, label, environment and arguments of a pod. There is always a decision
// with a Reason of the closed set, and a captured pod has rules that can be printed and read.
func FuzzDecide(f *testing.F) {
	for i, key := range keys {
		for _, text := range []string{"", "*", "80,443", "10.0.0.0/8,fd00::/8", "TPROXY", "false", "eth1", "x,"} {
			f.Add(byte(i), text, byte(i+3), "22", "true", byte(i), "sidecar", int64(i*1000), byte(0))
		}
		f.Add(byte(0), key, byte(2), "NONE", "false", byte(1), "router", int64(-1), byte(1<<(i%8)))
	}
	f.Fuzz(func(t *testing.T, key1 byte, text1 string, key2 byte, text2, value string, variable byte, role string, user int64, bits byte) {
		facts, policy := pod(
			annotation(keys[int(key1)%len(keys)], text1), annotation(keys[int(key2)%len(keys)], text2),
			env(variables[int(variable)%len(variables)], value), runAs(new(user), nil), podRunAs(nil, new(user/2)),
		)
		shape(&facts, &policy, bits, text2, role)
		d := sidecar.Decide(facts, policy)
		if !slices.Contains(sidecar.Reasons(), d.Reason) || d.Reason.Sentence() == "" {
			t.Errorf("the decision has reason %q", d.Reason)
		}
		wellFormed(t, d)
		trimmedAlike(t, facts, policy)
		annotationsAgree(t, facts, policy)
		if d.Outcome != sidecar.Capture {
			return
		}
		if len(d.Spec.UIDs) == 0 || len(d.Spec.GIDs) == 0 {
			t.Error("the proxy has no identity: it would capture itself")
		}
		for _, port := range redirect.AlwaysExcluded() {
			if !slices.Contains(d.Spec.InboundExclude, port) {
				t.Errorf("the sidecar's own port %d is not excluded", port)
			}
		}
		for _, family := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
			set := redirect.Rules(d.Spec, family)
			if parsed, err := ruleset.Parse(family, set.String()); err != nil || !parsed.Equal(set) {
				t.Errorf("the rules are not read as they are (error %v):\n%s", err, set)
			}
		}
	})
}

func shape(f *sidecar.Facts, p *sidecar.Policy, bits byte, text, role string) {
	f.HostNetwork = bits&bitHostNetwork != 0
	p.AmbientEnabled = bits&bitAmbient != 0
	for bit, c := range map[byte]change{
		bitIstioInit: also(sidecar.Container{Name: "istio-init", Init: true}),
		bitNative:    also(sidecar.Container{Name: "istio-proxy", Init: true, Args: []string{text, role}}),
		bitNoStatus:  notInjected,
		bitLabel:     injectLabel(text),
	} {
		if bits&bit != 0 {
			c(f, p)
		}
	}
	if bits&bitNoArgs == 0 {
		args("proxy", role)(f, p)
	}
	if bits&bitNoProxy != 0 {
		proxyCalled("x")(f, p)
	}
}
