package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// eachRendering runs a subtest with the rendering of each sample.
func eachRendering(t *testing.T, do func(t *testing.T, r rendering)) {
	t.Helper()
	all, err := samples(theChart(t), chartDir)
	if err != nil || len(all) < 300 {
		t.Fatalf("%d samples, error %v", len(all), err)
	}
	for _, s := range all {
		t.Run(s.Name, func(t *testing.T) {
			t.Parallel()
			do(t, mustRender(t, s.Values...))
		})
	}
}

// TestWriteAll: --all writes exactly one file for each name.
func TestWriteAll(t *testing.T) {
	t.Parallel()
	to := filepath.Join(t.TempDir(), "all")
	if err := run([]string{"--chart", chartDir, "--all", to}, io.Discard, io.Discard); err != nil {
		t.Fatal(err)
	}
	all, err := samples(theChart(t), chartDir)
	if err != nil {
		t.Fatal(err)
	}
	want := ready()
	for _, s := range all {
		want = append(want, s.Name)
	}
	files, err := os.ReadDir(to)
	if err != nil {
		t.Fatal(err)
	}
	var have []string
	for _, f := range files {
		text, err := os.ReadFile(filepath.Join(to, f.Name()))
		if err != nil {
			t.Fatal(err)
		}
		head, _, _ := strings.Cut(string(text), "\n")
		have = append(have, strings.TrimPrefix(head, "# "))
	}
	same(t, "renderings", want, have)
	if err := run([]string{"--chart", chartDir, "--all", to}, io.Discard, io.Discard); err == nil {
		t.Error("wrote to an existing directory")
	}
}

// TestEveryObjectIsOfTheAPI decodes each rendering strictly into the types of the oldest and the newest Kubernetes.
func TestEveryObjectIsOfTheAPI(t *testing.T) {
	t.Parallel()
	newest := tool(t, "newest", "strict")
	oldest := tool(t, "oldest", "strict", "-modfile=oldest.mod")
	eachRendering(t, func(t *testing.T, r rendering) {
		var core rendering
		for _, o := range r.Objects {
			switch o.Kind {
			case "PodMonitor":
				var m monitoringv1.PodMonitor
				if err := yaml.UnmarshalStrict([]byte(o.Text), &m); err != nil {
					t.Errorf("%s: %v", o.id(), err)
				}
			case "NetworkAttachmentDefinition":
				if len(o.Fields) != 3 {
					t.Errorf("%s has more than a head: %s", o.id(), o.Text)
				}
			default:
				core.Objects = append(core.Objects, o)
			}
		}
		text := core.text()
		if out, code := output(t, nil, text, newest); code != 0 || out != fmt.Sprintln(len(core.Objects), "objects") {
			t.Errorf("newest: exit %d\n%s", code, out)
		}
		// For older versions the chart rejects the field for AppArmor.
		if strings.Contains(string(text), "appArmorProfile") {
			return
		}
		if out, code := output(t, nil, text, oldest); code != 0 {
			t.Errorf("oldest: exit %d\n%s", code, out)
		}
	})
}

// TestStrictDecodingRefuses shows that the test above can fail.
func TestStrictDecodingRefuses(t *testing.T) {
	t.Parallel()
	for _, program := range []string{tool(t, "newest", "strict"), tool(t, "oldest", "strict", "-modfile=oldest.mod")} {
		for _, text := range []string{
			"apiVersion: apps/v1\nkind: DaemonSet\nspec: {template: {spec: {volume: []}}}\n",
			"apiVersion: v1\nkind: ConfigMap\ndata: {a: true}\n",
			"apiVersion: v1\nkind: ConfigMap\ndata: {a: b}\ndata: {a: c}\n",
			"apiVersion: apps/v1beta1\nkind: DaemonSet\n",
		} {
			if out, code := output(t, nil, []byte(text), program); code == 0 {
				t.Errorf("%q was accepted: %s", text, out)
			}
		}
	}
	field := "apiVersion: v1\nkind: Pod\nspec: {securityContext: {appArmorProfile: {type: Unconfined}}}\n"
	if out, code := output(t, nil, []byte(field), tool(t, "oldest", "strict")); code == 0 {
		t.Errorf("the oldest Kubernetes knows a field of 1.30: %s", out)
	}
}

// TestEveryObjectHasANameAndLabels checks constraints of the API server beyond types.
func TestEveryObjectHasANameAndLabels(t *testing.T) {
	t.Parallel()
	cluster := []string{"ClusterRole", "ClusterRoleBinding"}
	eachRendering(t, func(t *testing.T, r rendering) {
		ids := r.ids()
		slices.Sort(ids)
		if unique := slices.Compact(slices.Clone(ids)); len(unique) != len(ids) {
			t.Errorf("duplicate object: %q", ids)
		}
		for _, o := range r.Objects {
			if (o.Namespace == "") != slices.Contains(cluster, o.Kind) {
				t.Errorf("%s: namespace", o.id())
			}
			var head struct {
				Metadata struct{ Labels map[string]string }
			}
			if err := yaml.Unmarshal([]byte(o.Text), &head); err != nil {
				t.Fatal(err)
			}
			for _, label := range []string{"release", "istio.io/rev", "app.kubernetes.io/name", "operator.istio.io/component"} {
				if head.Metadata.Labels[label] == "" {
					t.Errorf("%s has no label %s", o.id(), label)
				}
			}
		}
		if r.has("DaemonSet/istio-system/istio-cni-node") {
			checkVolumes(t, agent(t, r).Spec.Template.Spec)
		}
	})
}

// checkVolumes reports mounts without a volume, volumes without a mount, and paths that are mounted twice.
func checkVolumes(t *testing.T, pod corev1.PodSpec) {
	t.Helper()
	var have, used, paths []string
	for _, v := range pod.Volumes {
		have = append(have, v.Name)
	}
	for _, m := range pod.Containers[0].VolumeMounts {
		used = append(used, m.Name)
		paths = append(paths, m.MountPath)
	}
	for _, list := range [][]string{have, used, paths} {
		slices.Sort(list)
	}
	if !slices.Equal(have, used) || len(slices.Compact(paths)) != len(used) {
		t.Errorf("volumes %q, mounts %q at %q", have, used, paths)
	}
}
