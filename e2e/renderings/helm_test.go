package renderings

import (
	"context"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
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
	if text, err := helm(t, append(upgrade, "--reuse-values")...); err == nil || !strings.Contains(text, "set global.hub (and global.tag) to where the image") {
		t.Errorf("without an image: error %v", err)
	}
	mustHelm(t, append(upgrade, "--reuse-values", image, "--dry-run=server")...)
	for _, how := range []string{"--reuse-values", "--reset-then-reuse-values", "--reuse-values"} {
		text := mustHelm(t, append(upgrade, how, image)...)
		have, config := agent(t)
		if have != "r.example/mesh/install-cni:2" || config["EXCLUDE_NAMESPACES"] != "a,b" || config["AUDIT_INTERVAL"] != "5m" {
			t.Errorf("%s: image %q, configuration %q", how, have, config)
		}
		for _, words := range []string{"Ignored, as values of other charts: pilot.", "variant=distroless is ignored"} {
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
