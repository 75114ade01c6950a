package installer_test

import (
	"os"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
)

// BenchmarkHeal is the time from tampering to the healed file, as another process sees it. The agent is started again
// before it would take the benchmark for a fight.
func BenchmarkHeal(b *testing.B) {
	const peace = 5 // rewrites in a minute
	for _, tc := range []struct {
		name   string
		tamper func(*nodetest.Node) error
		healed func(*nodetest.Node) bool
	}{
		{
			"config replaced", func(n *nodetest.Node) error { return n.Replace(listFile, nodetest.BridgeList) },
			func(n *nodetest.Node) bool { return strings.Contains(read(n, listFile), `"istio-cni"`) },
		},
		{
			"config truncated and written", func(n *nodetest.Node) error { return n.Overwrite(listFile, nodetest.BridgeList) },
			func(n *nodetest.Node) bool { return strings.Contains(read(n, listFile), `"istio-cni"`) },
		},
		{
			"kubeconfig removed", func(n *nodetest.Node) error { return n.Remove(kubeconfig) },
			func(n *nodetest.Node) bool { return n.Has(kubeconfig) },
		},
		{
			"program removed", func(n *nodetest.Node) error { return n.Remove(nodetest.BinDir + "/istio-cni") },
			func(n *nodetest.Node) bool { return n.Has(nodetest.BinDir + "/istio-cni") },
		},
		{
			"link replaced by a file",
			func(n *nodetest.Node) error { return n.Replace(nodetest.BinDir+"/istio-iptables", "another") },
			func(n *nodetest.Node) bool {
				target, err := os.Readlink(n.Path(nodetest.BinDir + "/istio-iptables"))
				return err == nil && target == "istio-cni"
			},
		},
	} {
		b.Run(tc.name, func(b *testing.B) {
			n := newNode(b)
			var a *nodetest.Agent
			times := 0
			for b.Loop() {
				b.StopTimer()
				if times%peace == 0 {
					if a != nil {
						a.Kill()
					}
					a = n.Start()
					a.AwaitReady()
				}
				times++
				b.StartTimer()
				if err := tc.tamper(n); err != nil {
					b.Fatal(err)
				}
				nodetest.Await(b, "the healed file", func() error {
					if !tc.healed(n) {
						return notYet("it is not healed")
					}
					return nil
				})
			}
		})
	}
}

// read gives a file or nothing.
func read(n *nodetest.Node, name string) string {
	text, _ := os.ReadFile(n.Path(name)) // it may be away for an instant
	return string(text)
}
