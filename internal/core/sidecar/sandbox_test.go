package sidecar_test

import (
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

func TestDecide_Sandbox(t *testing.T) {
	t.Parallel()
	defaults, own := cniconf.SandboxedRuntimes(), []string{"vm-?", "kata-own"}
	for _, test := range []struct {
		class    string
		patterns []string
		want     sidecar.Sandbox
	}{
		{"", defaults, ""},
		{"nvidia", defaults, ""},
		{"crun-kata", defaults, ""},
		{"katana", defaults, ""},
		{"gvisor", defaults, sidecar.GVisor},
		{"runsc", defaults, sidecar.GVisor},
		{"runsc-kvm", defaults, sidecar.GVisor},
		{"kata", defaults, sidecar.Kata},
		{"kata-qemu", defaults, sidecar.Kata},
		{"kata-mshv-vm-isolation", defaults, sidecar.Kata},
		{"gvisor", own, ""},
		{"kata-own", own, sidecar.Kata},
		{"vm-1", own, sidecar.Other},
		{"vm-12", own, ""},
		{"gvisor", nil, ""},
		{"a", []string{"["}, ""},
	} {
		f, p := pod(func(f *sidecar.Facts, p *sidecar.Policy) {
			f.RuntimeClass, p.SandboxedRuntimes = test.class, test.patterns
		})
		d := sidecar.Decide(f, p)
		if d.Outcome != sidecar.Capture || d.Sandbox != test.want {
			t.Errorf("%q with %q: %v, sandbox %q, want %q", test.class, test.patterns, d.Outcome, d.Sandbox, test.want)
		}
		trimmedAlike(t, f, p)
	}
}

// TestSandbox_Texts: a flag helps only gVisor, and another start helps only if rules are copied.
func TestSandbox_Texts(t *testing.T) {
	t.Parallel()
	for s, want := range map[sidecar.Sandbox]struct{ flag, copies bool }{"": {false, true}, sidecar.GVisor: {true, true}, sidecar.Kata: {}, sidecar.Other: {copies: true}} {
		if strings.Contains(s.Remedy(), "reproduce-nftables") != want.flag || s.Copies() != want.copies || s.Sentence() == "" {
			t.Errorf("%q: %q, %q, copies %v", s, s.Sentence(), s.Remedy(), s.Copies())
		}
	}
}
