package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// platforms are those of the chart, and none.
func platforms() []string {
	return []string{"", "gke", "openshift", "k3s", "k3d", "microk8s", "minikube"}
}

// options are values that change what is rendered, one feature each.
func options() map[string]string {
	return map[string]string{
		"defaults":       `{}`,
		"no repair":      `repair: {enabled: false}`,
		"repair delete":  `repair: {repairPods: false, deletePods: true}`,
		"repair evict":   `repair: {repairPods: false, deletePods: true, evict: true}`,
		"repair label":   `repair: {repairPods: false, labelPods: true}`,
		"repair detect":  `repair: {repairPods: false}`,
		"AppArmor field": `useAppArmorAnnotation: false`,
		"SELinux":        `seLinuxOptions: {level: s0}`,
		"seccomp":        `seccompProfile: {type: Localhost, localhostProfile: cni.json}`,
		"root's files":   `foreignOwners: false`,
		"host network":   `{hostNetwork: true, healthPort: 18000, monitoringPort: 25014, livenessProbe: {enabled: true}}`,
		"no metrics":     `monitoringPort: 0`,
		"owned":          `{chained: true, istioOwnedCNIConfig: true, istioOwnedCNIConfigFileName: 01-mesh.conflist}`,
		"owned by mode":  `{chained: true, confMode: owned, confGroupRead: true}`,
		"dropin":         `{chained: true, confMode: dropin}`,
		"auto":           `{chained: true, confMode: auto}`,
		"inline":         `{chained: true, confMode: inline, cniConfFileName: 10-calico.conflist}`,
		"standalone":     `{chained: false, provider: multus}`,
		"template":       `networkConfig: '{"type": "istio-cni", "kubernetes": {"kubeconfig": "__KUBECONFIG_FILEPATH__"}}'`,
		"what it is told": `{secondIPFamily: capture, apiTimeout: 5s, forceIptablesBinary: nft,
logging: {level: "default:info,cni-plugin:debug", pluginLevel: warn}, global: {nativeNftables: true}}`,
		"not live":       `liveConfiguration: false`,
		"never leaves":   `uninstallOnExit: never`,
		"quota":          `resourceQuotas: {enabled: true, pods: 100}`,
		"network policy": `global: {networkPolicy: {enabled: true}}`,
		"monitoring": `monitoring: {podMonitor: {enabled: true, interval: 15s, labels: {release: prometheus}},
dashboard: {enabled: true}}`,
		"taint": `taint: {enabled: true}`,
		"taint everywhere": `taint: {enabled: true, namespaces: ["*"], add: true, requireNodeReady: false, hysteresis: 3m,
effect: NoExecute, value: "no", name: example.com/not-ready, nodeCondition: cni.istio.io/MeshCNIReady}`,
		"taint legacy": `taint: {enabled: true, mode: legacy, requirements: [{name: a, selector: "a=b", namespace: kube-system},
 {name: istio-cni, selector: k8s-app=istio-cni-node}]}`,
		"everything": `{taint: {enabled: true}, monitoring: {podMonitor: {enabled: true}, dashboard: {enabled: true}},
global: {networkPolicy: {enabled: true}, logAsJson: true, imagePullSecrets: [one, {name: two}]},
resourceQuotas: {enabled: true}, revision: canary, ownerName: me}`,
		"environment": `env: {GOMAXPROCS: 2, KUBECONFIG_MODE: "0640", NODE_NAME: other}`,
		"scheduling": `{nodeSelector: {pool: mesh}, affinity: {nodeAffinity: {}}, tolerations: [{operator: Exists}],
priorityClassName: mine, updateStrategy: {rollingUpdate: {maxUnavailable: 10%}}}`,
		"resources":      `resources: {limits: {memory: 200Mi, cpu: 1}, requests: {cpu: null}}`,
		"no resources":   `resources: null`,
		"labels":         `{podLabels: {a: true}, podAnnotations: {b: 1}, daemonSetLabels: {c: "x"}}`,
		"cluster only":   `{global: {resourceScope: cluster}, taint: {enabled: true}}`,
		"namespace only": `{global: {resourceScope: namespace}, taint: {enabled: true}}`,
		"historic":       `cni: {chained: true, excludeNamespaces: [istio-system, kube-system], repair: {deletePods: true}}`,
		"demo":           `profile: demo`,
		"as 1.25":        `compatibilityVersion: "1.25"`,
		"verbatim image": `image: registry.example/mesh/cni@sha256:0000000000000000000000000000000000000000000000000000000000000000`,
	}
}

// eachRendering renders every option on every platform, and the reference's values.
func eachRendering(t *testing.T, do func(t *testing.T, r rendering)) {
	t.Helper()
	all := options()
	for _, name := range slices.Sorted(maps.Keys(all)) {
		for _, platform := range platforms() {
			if platform == "openshift" && strings.Contains(all[name], "confMode") && !strings.Contains(all[name], "chained") {
				continue
			}
			t.Run(fmt.Sprintf("%s on %q", name, platform), func(t *testing.T) {
				t.Parallel()
				do(t, mustRender(t, all[name], fmt.Sprintf(`global: {platform: %q}`, platform)))
			})
		}
	}
	for name, text := range referenceValues(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			do(t, mustRender(t, text))
		})
	}
}

// referenceValues are files of values as users of the reference's chart have them.
func referenceValues(t *testing.T) map[string]string {
	t.Helper()
	names, err := filepath.Glob("testdata/reference/*.yaml")
	if err != nil || len(names) < 6 {
		t.Fatalf("files of the reference's users: %q, error %v", names, err)
	}
	out := map[string]string{}
	for _, name := range names {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		out[name] = string(text)
	}
	return out
}

// TestEveryObjectIsOfTheAPI decodes each rendering strictly as the oldest and the newest Kubernetes do.
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
		// The field for AppArmor is refused by the chart where there is none.
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
				t.Errorf("%q was taken: %s", text, out)
			}
		}
	}
	field := "apiVersion: v1\nkind: Pod\nspec: {securityContext: {appArmorProfile: {type: Unconfined}}}\n"
	if out, code := output(t, nil, []byte(field), tool(t, "oldest", "strict")); code == 0 {
		t.Errorf("the oldest Kubernetes knows a field of 1.30: %s", out)
	}
}

// TestEveryObjectHasANameAndLabels looks at what the API server would refuse beyond types.
func TestEveryObjectHasANameAndLabels(t *testing.T) {
	t.Parallel()
	cluster := []string{"ClusterRole", "ClusterRoleBinding"}
	eachRendering(t, func(t *testing.T, r rendering) {
		ids := r.ids()
		slices.Sort(ids)
		if unique := slices.Compact(slices.Clone(ids)); len(unique) != len(ids) {
			t.Errorf("an object comes twice: %q", ids)
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

// checkVolumes tells of mounts without a volume, volumes without a mount, and paths that are mounted twice.
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
