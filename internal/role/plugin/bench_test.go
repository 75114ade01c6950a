package plugin_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
)

// BenchmarkCommand times whole invocations of the program, from process start to exit: what a runtime waits for.
func BenchmarkCommand(b *testing.B) {
	node := chaintest.New(b, chaintest.Build(b, b.TempDir()))
	list := node.Chain("1.0.0", chaintest.Stanza{"exclude_namespaces": []string{"kube-system"}, "plugin_log_level": "info"})
	legacy := node.Chain("1.0.0", chaintest.Stanza{"force_iptables_binary": "legacy", "plugin_log_level": "info"})
	fresh := func(b *testing.B, p chaintest.Pod) chaintest.Pod {
		b.Helper()
		p.Netns = netnstest.New(b)
		netnstest.Run(b, p.Netns, "ip", "addr", "add", "10.9.0.1/32", "dev", "lo")
		return p
	}
	mesh := node.NewPod("apps", "mesh", chaintest.Sidecar)
	plain := node.NewPod("apps", "plain", chaintest.PlainPod)
	excluded := node.NewPod("kube-system", "coredns", nil)
	once := fresh(b, mesh)
	for _, c := range []struct {
		name string
		run  func(b *testing.B) error
	}{
		{"VERSION", func(*testing.B) error { _, err := node.Exec("VERSION", plain, nil); return err }},
		{"DEL", func(*testing.B) error { _, err := node.Exec("DEL", plain, []byte("{}")); return err }},
		{"ADD excluded namespace", func(*testing.B) error { _, err := node.Ours(list, excluded, nil); return err }},
		{"ADD plain pod", func(*testing.B) error { _, err := node.Ours(list, plain, nil); return err }},
		{"ADD mesh pod", func(b *testing.B) error {
			b.StopTimer()
			p := fresh(b, mesh)
			b.StartTimer()
			_, err := node.Ours(list, p, nil)
			return err
		}},
		{"ADD mesh pod legacy", func(b *testing.B) error {
			b.StopTimer()
			p := fresh(b, mesh)
			b.StartTimer()
			_, err := node.Ours(legacy, p, nil)
			return err
		}},
		{"ADD mesh pod again", func(*testing.B) error { _, err := node.Ours(list, once, nil); return err }},
	} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				if err := c.run(b); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	if _, err := os.Stat(once.Netns); err != nil {
		b.Fatal(fmt.Errorf("the namespace is gone: %w", err))
	}
}
