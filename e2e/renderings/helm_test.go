package renderings

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/yaml"

	"github.com/meshcni/istio-cni/e2e/cluster"
)

const (
	release = "istio-cni"
	image   = "--set=global.hub=r.example/mesh,global.tag=2"
	// limited is the account of a test that may do everything in the release's namespace, and nothing elsewhere.
	limited = "system:serviceaccount:istio-system:limited"
)

// helm runs Helm with an empty home directory.
func helm(t *testing.T, args ...string) (string, error) {
	t.Helper()
	home := t.TempDir()
	args = append(args, "--namespace=istio-system", "--kubeconfig="+shared.cluster.Kubeconfig())
	command := exec.CommandContext(context.WithoutCancel(t.Context()), shared.reference.Helm, args...)
	command.Env = append(os.Environ(), "HOME="+home, "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home)
	text, err := command.CombinedOutput()
	t.Logf("helm %s: %v\n%s", strings.Join(args, " "), err, text[:min(len(text), 2000)])
	return string(text), err
}

func mustHelm(t *testing.T, args ...string) string {
	t.Helper()
	text, err := helm(t, args...)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func ours() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "../../manifests/istio-cni")
}

// agent returns the image and the configuration of the installed agent.
func agent(t *testing.T) (image string, config map[string]string) {
	t.Helper()
	read := func(version, kind, name string) map[string]any {
		o := &object{}
		o.SetAPIVersion(version)
		o.SetKind(kind)
		o.SetNamespace("istio-system")
		o.SetName(name)
		now, err := shared.server.get(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		return now.Object
	}
	containers, _, err := unstructured.NestedSlice(read("apps/v1", "DaemonSet", "istio-cni-node"), "spec", "template", "spec", "containers")
	if err != nil {
		t.Fatal(err)
	}
	config, _, err = unstructured.NestedStringMap(read("v1", "ConfigMap", "istio-cni-config"), "data")
	if err != nil {
		t.Fatal(err)
	}
	return containers[0].(map[string]any)["image"].(string), config
}

// TestHelm_UpgradeFromTheReference upgrades a release of the reference's chart with the values that Helm has of it.
func TestHelm_UpgradeFromTheReference(t *testing.T) {
	mustHelm(t, "install", release, shared.reference.Chart, "--set=excludeNamespaces={a,b},pilot.x=y,variant=distroless")
	t.Cleanup(func() { mustHelm(t, "uninstall", release) })
	upgrade := []string{"upgrade", release, ours()}
	if text, err := helm(t, append(upgrade, "--reuse-values")...); err == nil || !strings.Contains(text, "set global.hub and global.tag to this program's image") {
		t.Errorf("without an image: error %v", err)
	}
	mustHelm(t, append(upgrade, "--reuse-values", image, "--dry-run=server")...)
	for _, how := range []string{"--reuse-values", "--reset-then-reuse-values", "--reuse-values"} {
		text := mustHelm(t, append(upgrade, how, image)...)
		have, config := agent(t)
		if have != "r.example/mesh/install-cni:2" || config["EXCLUDE_NAMESPACES"] != "a,b" || config["AUDIT_INTERVAL"] != "5m" {
			t.Errorf("%s: image %q, configuration %q", how, have, config)
		}
		for _, words := range []string{"Ignored: values of other charts: pilot.", "variant=distroless is ignored"} {
			if !strings.Contains(text, words) {
				t.Errorf("%s: the notes do not have %q", how, words)
			}
		}
	}
	mustHelm(t, "rollback", release, "1")
}

// TestHelm_ValuesOfOtherCharts gives whole values files of other charts, as they are and without the prefix of defaults.
func TestHelm_ValuesOfOtherCharts(t *testing.T) {
	tried := 0
	err := filepath.WalkDir(shared.reference.Charts, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Base(path) != "values.yaml" {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		var all map[string]any
		if err = yaml.Unmarshal(text, &all); err != nil {
			return err
		}
		if below, is := all["_internal_defaults_do_not_set"]; is {
			if text, err = yaml.Marshal(below); err != nil {
				return err
			}
		}
		flat := filepath.Join(t.TempDir(), "values.yaml")
		if err = os.WriteFile(flat, text, 0o600); err != nil {
			return err
		}
		for _, file := range []string{path, flat} {
			tried++
			out := mustHelm(t, "template", release, ours(), "--kube-version=v1.30.0", "-f="+file, "--set=hub=r.example/mesh,tag=2", image)
			if !strings.Contains(out, `image: "r.example/mesh/install-cni:2"`) {
				t.Errorf("%s: the agent has another image", path)
			}
		}
		return nil
	})
	if err != nil || tried < 14 {
		t.Errorf("%d files, error %v", tried, err)
	}
}

// TestHelm_NewNodesAreTainted: the first event of a new Node has the taint, once, beside its others. A node that has it is not changed.
func TestHelm_NewNodesAreTainted(t *testing.T) {
	mustHelm(t, "install", release, ours(), image, "--set=taint.newNodes=true")
	t.Cleanup(func() { mustHelm(t, "uninstall", release) })
	node := func(name string, taints ...any) *object {
		o := &object{Object: map[string]any{"spec": map[string]any{}}}
		o.SetAPIVersion("v1")
		o.SetKind("Node")
		o.SetName(name)
		if len(taints) > 0 {
			o.Object["spec"] = map[string]any{"taints": taints}
		}
		return o
	}
	// The server gives each new Node the first taint.
	const notReady = "map[effect:NoSchedule key:node.kubernetes.io/not-ready]"
	taints := func(o *object) string {
		all := fmt.Sprint(o.Object["spec"].(map[string]any)["taints"])
		return strings.Replace(strings.Replace(all, notReady+" ", "", 1), " "+notReady, "", 1)
	}
	const added = "map[effect:NoSchedule key:cni.istio.io/not-ready value:true]"
	err := cluster.Until(t.Context(), "the policy is in force", func() (bool, error) {
		o, err := shared.server.create(t.Context(), node("tried"), metav1.DryRunAll)
		return err == nil && taints(o) == "["+added+"]", err
	})
	if err != nil {
		t.Fatal(err)
	}
	other := map[string]any{"key": "a", "effect": "NoSchedule"}
	already := map[string]any{"key": "cni.istio.io/not-ready", "effect": "NoExecute"}
	for name, c := range map[string]struct {
		taints []any
		want   string
	}{
		"bare":    {nil, "[" + added + "]"},
		"other":   {[]any{other}, "[map[effect:NoSchedule key:a] " + added + "]"},
		"already": {[]any{already}, "[map[effect:NoExecute key:cni.istio.io/not-ready]]"},
	} {
		o := node(name, c.taints...)
		events, err := shared.server.watch(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := shared.server.create(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { uninstall(t, []*object{o}) })
		first := <-events.ResultChan()
		events.Stop()
		if got := taints(first.Object.(*object)); first.Type != watch.Added || got != c.want {
			t.Errorf("%s: %s, taints %s, want %s", name, first.Type, got, c.want)
		}
	}
}

// TestHelm_AccountOfOneNamespace installs what is in the release's namespace by an account that may do nothing elsewhere.
func TestHelm_AccountOfOneNamespace(t *testing.T) {
	binding := &object{Object: map[string]any{
		"roleRef":  map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
		"subjects": []any{map[string]any{"kind": "ServiceAccount", "name": "limited", "namespace": "istio-system"}},
	}}
	binding.SetAPIVersion("rbac.authorization.k8s.io/v1")
	binding.SetKind("RoleBinding")
	binding.SetNamespace("istio-system")
	binding.SetName("limited")
	if _, err := shared.server.create(t.Context(), binding); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { uninstall(t, []*object{binding}) })
	mustHelm(t, "install", "cluster", ours(), image, "--set=taint.enabled=true,global.resourceScope=cluster")
	t.Cleanup(func() { mustHelm(t, "uninstall", "cluster") })
	values := []string{ours(), image, "--set=taint.enabled=true,provider=multus,chained=false,networkAttachmentDefinition=false," +
		"resourceQuotas.enabled=true,global.networkPolicy.enabled=true", "--kube-as-user=" + limited}
	if _, err := helm(t, slices.Concat([]string{"install", release}, values)...); err == nil {
		t.Fatal("the account may create objects without a namespace")
	}
	mustHelm(t, "uninstall", release, "--ignore-not-found")
	mustHelm(t, slices.Concat([]string{"install", release}, values, []string{"--set=global.resourceScope=namespace"})...)
	mustHelm(t, "uninstall", release, "--kube-as-user="+limited)
}
