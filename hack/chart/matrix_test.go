package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"

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

// TestObjects_OldestKubernetes decodes each rendering strictly into the types of the oldest Kubernetes, and so the examples beside
// the chart. The API server of e2e/renderings checks them by the newest one, and the custom resources.
func TestObjects_OldestKubernetes(t *testing.T) {
	t.Parallel()
	oldest := tool(t, "oldest", "oldest")
	decode := func(t *testing.T, r rendering) {
		t.Helper()
		var known rendering
		for _, o := range r.Objects {
			if o.Kind != "PodMonitor" && o.Kind != "NetworkAttachmentDefinition" {
				known.Objects = append(known.Objects, o)
			}
		}
		text := known.text()
		// For older versions the chart rejects the field for AppArmor.
		if strings.Contains(string(text), "appArmorProfile") {
			return
		}
		if out, code := output(t, nil, text, oldest); code != 0 || out != fmt.Sprintln(len(known.Objects), "objects") {
			t.Errorf("exit %d\n%s", code, out)
		}
	}
	eachRendering(t, decode)
	for _, name := range []string{"network-config.yaml", "doctor.yaml"} {
		decode(t, example(t, name))
	}
}

// TestObjects_LabelsAndVolumes checks what an API server accepts.
func TestObjects_LabelsAndVolumes(t *testing.T) {
	t.Parallel()
	eachRendering(t, func(t *testing.T, r rendering) {
		for _, o := range r.Objects {
			var head struct {
				Metadata struct{ Labels map[string]string }
			}
			noError(t, yaml.Unmarshal([]byte(o.Text), &head))
			for _, label := range []string{"release", "istio.io/rev", "app.kubernetes.io/name", "operator.istio.io/component"} {
				if strings.HasPrefix(label, "operator.") && strings.Contains(o.id(), "istio-cni-observer") {
					continue // the operator manages Istio's own agent
				}
				if head.Metadata.Labels[label] == "" {
					t.Errorf("%s has no label %s", o.id(), label)
				}
			}
		}
		if r.hasAgent() {
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
