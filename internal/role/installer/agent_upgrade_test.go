package installer_test

import (
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
)

// shapes are configuration directories that versions of the reference have left.
const shapes = "../../core/cniconf/testdata/shapes"

// TestAgentTakesOverFromTheReference starts an agent on nodes as the reference's node agents left them: with their programs,
// temporary files, stanzas and kubeconfigs. All shapes are planned in core/cniconf.
func TestAgentTakesOverFromTheReference(t *testing.T) {
	t.Parallel()
	calico := []string{"calico", "portmap", "bandwidth", "istio-cni"}
	for _, tc := range []struct {
		shape string
		args  []string
		want  []string
		file  string
	}{
		{"reference-1.1-single", nil, []string{"bridge", "istio-cni"}, "10-bridge.conflist"},
		{"reference-1.7-duplicates", nil, calico, "10-calico.conflist"},
		{"reference-1.30", []string{"CNI_CONF_MODE=dropin"}, calico, "10-calico.conflist"},
		{"reference-1.30-owned", []string{"ISTIO_OWNED_CNI_CONFIG=true"}, calico, "02-istio-cni.conflist"},
		{"reference-1.30-owned-and-inline", nil, calico, "10-calico.conflist"},
	} {
		t.Run(strings.Join(append([]string{tc.shape}, tc.args...), " "), func(t *testing.T) {
			t.Parallel()
			n := nodetest.New(t, program(t))
			n.CopyDir(filepath.Join(shapes, tc.shape), nodetest.NetDir)
			foreign := others(n)
			for _, name := range []string{"istio-cni", "istio-iptables", "istio-cni-taint", "istio-cni.tmp.1234567"} {
				n.Put(path.Join(nodetest.BinDir, name), "a program of the reference")
			}
			n.Put(kubeconfig+".tmp.7654321", "torn")
			n.StartAPI()
			n.GrantAccess()
			a := n.Start(tc.args...)
			a.AwaitReady()

			list, err := n.Load()
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, list.Types()); diff != "" {
				t.Errorf("the runtime loads: -want +got:\n%s", diff)
			}
			if list.File != tc.file {
				t.Errorf("the runtime loads %q, want %q", list.File, tc.file)
			}
			stanza := string(list.Plugins[len(list.Plugins)-1].Bytes)
			if !strings.Contains(stanza, `"cni_agent_run_dir"`) || strings.Contains(stanza, `"kubernetes"`) {
				t.Errorf("the stanza is not ours: %s", stanza)
			}
			swept(t, n)
			if diff := cmp.Diff(foreign, others(n)); diff != "" {
				t.Errorf("files of others changed: -before +after:\n%s", diff)
			}
		})
	}
}

// The reference was killed between writing a list into a single plugin's file and renaming it: no runtime can load anything,
// and only knowledge of the reference shows that it is a list.
func TestAgentFinishesAnInterruptedConversionOfTheReference(t *testing.T) {
	t.Parallel()
	n := nodetest.New(t, program(t))
	n.CopyDir(filepath.Join(shapes, "reference-1.22-interrupted"), nodetest.NetDir)
	n.StartAPI()
	n.GrantAccess()
	n.Start().AwaitReady()
	if diff := cmp.Diff([]string{"bridge", "istio-cni"}, types(t, n)); diff != "" {
		t.Errorf("the runtime loads: -want +got:\n%s", diff)
	}
}

// swept fails unless programs, links and kubeconfigs are ours and nothing temporary is left.
func swept(t *testing.T, n *nodetest.Node) {
	t.Helper()
	if n.Has(nodetest.NetDir + "/ZZZ-istio-cni-kubeconfig") {
		t.Error("the kubeconfig of versions before 1.23 is left")
	}
	want, err := os.ReadFile(program(t))
	if err != nil {
		t.Fatal(err)
	}
	if n.Read(nodetest.BinDir+"/istio-cni") != string(want) {
		t.Error("istio-cni is not this program")
	}
	for _, name := range []string{"istio-iptables", "istio-cni-taint", "istio-cni-repair"} {
		if got, err := os.Readlink(n.Path(nodetest.BinDir + "/" + name)); got != "istio-cni" {
			t.Errorf("%s: a link to %q, %v", name, got, err)
		}
	}
	for _, dir := range []string{nodetest.NetDir, nodetest.BinDir, nodetest.RunDir} {
		for name := range n.Tree(dir) {
			if strings.Contains(name, ".tmp.") {
				t.Errorf("temporary file %s is left in %s", name, dir)
			}
		}
	}
}

// others are the files of the configuration directory that have nothing to do with us.
func others(n *nodetest.Node) map[string]string {
	tree := n.Tree(nodetest.NetDir)
	for name := range tree {
		if name != "calico-kubeconfig" {
			delete(tree, name)
		}
	}
	return tree
}
