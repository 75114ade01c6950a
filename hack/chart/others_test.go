package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
)

// TestValues_OfOtherCharts: one values file for all charts of the mesh; e2e/renderings takes the real ones.
func TestValues_OfOtherCharts(t *testing.T) {
	t.Parallel()
	defaults := mustRender(t)
	for values, named := range map[string]string{
		`{pilot: {cni: {enabled: true}}, meshConfig: {}, gateways: null, ztunnel: 1}`: "gateways, meshConfig, pilot, ztunnel",
		`{defaults: {cni: {}}, base: {}, istiod: {}, gateway: {}, istio_cni: {}}`:     "base, defaults, gateway, istio_cni, istiod",
		`{x-anchors: {a: b}, .common: 1, revisionTags: [], logLevel: info}`:           ".common, logLevel, revisionTags, x-anchors",
		`_internal_defaults_do_not_set: {pilot: {}, image: pilot, tolerations: []}`:   "_internal_defaults_do_not_set",
		`{image: pilot, telemetry: {}}`:                                               "image, telemetry",
		`{enabled: "true", cni: {enabled: true, provider: default}}`:                  "",
		`{priorityClassName: "", taint: {enabled: false, namespace: ""}}`:             "",
	} {
		r := mustRender(t, values)
		equal(t, cmp.Diff(unsaid(defaults), unsaid(r)), "", values, "changes the rendering")
		want := "Ignored: values of other charts: " + named + "."
		if named == "" {
			want = ""
		}
		if text := said(t, r); !strings.HasPrefix(text, want) || (text == "") != (want == "") || !strings.Contains(r.Notes, want) {
			t.Errorf("%s: annotation %q, notes %q", values, text, r.Notes)
		}
	}
}

// TestValues_IgnoredOnesAreNamed: what a user may expect to have an effect is in the notes, and in an annotation for who sees no notes.
func TestValues_IgnoredOnesAreNamed(t *testing.T) {
	t.Parallel()
	for values, want := range map[string]string{
		`pilot: {cni: {enabled: true}}`:                              "pilot.cni.enabled is ignored: istiod's chart reads it, so istiod's release must get it.",
		`imagePullSecrets: [a]`:                                      "imagePullSecrets is ignored: for this chart use global.imagePullSecrets.",
		`resourceScope: cluster`:                                     "resourceScope is ignored: for this chart use global.resourceScope.",
		`enabled: false`:                                             "enabled=false is ignored: this chart is installed; a parent chart can use it as a condition.",
		`cni: {enabled: "false"}`:                                    "cni.enabled=false is ignored",
		`global: {resourcescope: cluster}`:                           "global.resourcescope is ignored: did you mean global.resourceScope?",
		`global: {networkPolicy: {enable: true}}`:                    "global.networkPolicy.enable is ignored: did you mean global.networkPolicy.enabled?",
		`global: {variant: debug}`:                                   "variant=debug is ignored",
		`repair: {hub: x}`:                                           "repair.hub is ignored, as in Istio's chart.",
		`{resourceScope: cluster, global: {resourceScope: cluster}}`: "",
		`{pilot: {cni: true}, global: {proxy: {}, meshID: a, tracer: b, sts: {}, network: c, certSigners: []}}`: "",
	} {
		r := mustRender(t, values)
		for _, text := range []string{r.Notes, said(t, r)} {
			if want == "" && strings.Contains(text, " is ignored") || !strings.Contains(text, want) {
				t.Errorf("%s: want %q in %q", values, want, text)
			}
		}
	}
	equal(t, said(t, mustRender(t)), "", "the defaults")
}

// TestNotes_NextCommands: the notes say what to do next, and what does not work yet.
func TestNotes_NextCommands(t *testing.T) {
	t.Parallel()
	const none = "cannot pull the image localhost/istio-cni/install-cni:"
	agent := []string{
		"kubectl -n istio-system rollout status daemonset/istio-cni-node\n", "kubectl istio-cni doctor\n",
		"kubectl -n istio-system exec daemonset/istio-cni-node -- istio-cni doctor\n", "pilot.cni.enabled=true",
	}
	for values, want := range map[string][]string{
		`{}`:                       append(slices.Clone(agent), none),
		`global: {hub: r.example}`: agent,
		`observe: true`:            {"rollout status daemonset/istio-cni-observer\n", "kubectl istio-cni pods --agent-namespace=istio-system\n", none},
		`global: {resourceScope: cluster, hub: r.example}`: {"a release with global.resourceScope=namespace installs the others"},
	} {
		notes := mustRender(t, values).Notes
		for _, words := range append(slices.Clone(agent), none, want[0], want[len(want)-1]) {
			equal(t, strings.Contains(notes, words), slices.Contains(want, words), values, "the notes have", words, notes)
		}
	}
}

// TestHelmLint_OfRefusedValues: "helm lint" ignores the function fail, and must refuse the values all the same.
func TestHelmLint_OfRefusedValues(t *testing.T) {
	t.Parallel()
	c := theChart(t)
	lint := engine.Engine{LintMode: true}
	for text, words := range map[string]string{
		`{}`: "", `repair: {deletePod: true}`: "repair.deletePod: unknown; did you mean repair.deletePods?", `audit: off`: "audit: got false",
		`global: {hub: docker.io/istio}`: "is Istio's image",
	} {
		known := chartutil.DefaultCapabilities.Copy()
		known.KubeVersion.Version = defaultRelease().Kubernetes
		given, err := chartutil.ToRenderValues(c, values(t, text), chartutil.ReleaseOptions{Name: "x", Namespace: "y"}, known)
		noError(t, err)
		_, err = lint.Render(c, given)
		if (err == nil) != (words == "") || err != nil && !strings.Contains(err.Error(), words) {
			t.Errorf("%s: error %v, want %q", text, err, words)
		}
	}
}

// TestValues_InQuotes sets each boolean and number of values.yaml to its default in quotes, and to another value with and
// without them.
func TestValues_InQuotes(t *testing.T) {
	t.Parallel()
	const with = "{taint: {enabled: true}, resourceQuotas: {enabled: true}}"
	tried := 0
	for _, s := range documented(t) {
		to := map[string]string{"!!bool": fmt.Sprint(s.node.Value != "true"), "!!int": "7"}[s.node.Tag]
		if to == "" || slices.Contains([]string{"observe", "taint.newNodes"}, s.path) { // refused
			continue
		}
		tried++
		for _, value := range []string{s.node.Value, to} {
			plain, quoted := mustRender(t, with, nested(s.path, value)), mustRender(t, with, nested(s.path, fmt.Sprintf("%q", value)))
			equal(t, cmp.Diff(string(plain.text()), string(quoted.text())), "", s.path, value, "in quotes is another value")
		}
	}
	if tried < 30 {
		t.Errorf("only %d values tried", tried)
	}
	for _, pair := range [][2]string{
		{`agent: {skipTlsVerify: true, repairInitContainerExitCode: 5}`, `agent: {skipTlsVerify: "true", repairInitContainerExitCode: "5"}`},
		{`tolerations: [{operator: Exists, tolerationSeconds: 30}]`, `tolerations: [{operator: Exists, tolerationSeconds: "30"}]`},
		{`updateStrategy: {rollingUpdate: {maxUnavailable: 2, maxSurge: 10%}}`, `updateStrategy: {rollingUpdate: {maxUnavailable: "2", maxSurge: 10%}}`},
		{`taint: {enabled: true, add: true, value: "true"}`, `taint: {enabled: "true", add: "true", value: true}`},
		{`audit: {interval: 0}`, `audit: {interval: "0"}`},
		{`{compatibilityVersion: "1.28", revision: "127", tag: "1.27"}`, `{compatibilityVersion: 1.28, revision: 127, tag: 1.27}`},
	} {
		if diff := cmp.Diff(string(mustRender(t, pair[0]).text()), string(mustRender(t, pair[1]).text())); diff != "" {
			t.Errorf("%s is not %s:\n%s", pair[1], pair[0], diff)
		}
	}
}

// reuse renders the chart as "helm upgrade --reuse-values" does: the defaults come from the previous release's chart, merged
// with the values of that release.
func reuse(t *testing.T, before map[string]any, given, now string) (rendering, error) {
	t.Helper()
	old := &chart.Chart{Metadata: &chart.Metadata{Name: "cni"}, Values: before}
	merged, err := chartutil.CoalesceValues(old, values(t, given))
	noError(t, err)
	c := *theChart(t)
	c.Values = merged
	return render(&c, defaultRelease(), chartutil.CoalesceTables(values(t, now), values(t, given)))
}

// TestReuseValues_OfAnOlderChart: each default in turn is one that the previous release's chart did not have.
func TestReuseValues_OfAnOlderChart(t *testing.T) {
	t.Parallel()
	const given = `{repair: {deletePods: true}, taint: {enabled: true}}`
	want := mustRender(t, given)
	for _, s := range documented(t) {
		before := values(t, string(rawDefaults(t)))
		at := before["_internal_defaults_do_not_set"].(map[string]any)
		keys := strings.Split(s.path, ".")
		for len(keys) > 1 {
			at, keys = at[keys[0]].(map[string]any), keys[1:]
		}
		delete(at, keys[0])
		r, err := reuse(t, before, given, `{}`)
		if err != nil || string(r.text()) != string(want.text()) {
			t.Errorf("without %s: error %v\n%s", s.path, err, cmp.Diff(string(want.text()), string(r.text())))
		}
	}
	// An old default stays: Helm does not tell it from a value that the user set.
	before := values(t, `_internal_defaults_do_not_set: {healthPort: 8001}`)
	r, err := reuse(t, before, given, `{}`)
	if err != nil || agentConfig(t, r)["HEALTH_PORT"] != "8001" {
		t.Errorf("the default of the older chart: %v", err)
	}
}

// TestReuseValues_OfTheReference: defaults of its chart that have other names are ignored, and the usual directories do not count as
// set by the user. e2e/renderings upgrades a release of its newest chart.
func TestReuseValues_OfTheReference(t *testing.T) {
	t.Parallel()
	before := values(t, `_internal_defaults_do_not_set: {hub: "", logLevel: info, privileged: false, psp_cluster_role: "",
rollingMaxUnavailable: 1, cniBinDir: /opt/cni/bin, cniConfDir: /etc/cni/net.d, global: {hub: docker.io/istio, tag: 1.24.0}}`)
	const hub = `cni: {hub: r.example/mesh}`
	for platform, want := range map[string]string{
		"": "/opt/cni/bin", "k3s": "/var/lib/rancher/k3s/data/cni", "k3d": "/var/lib/rancher/k3s/data/cni", "gke": "/home/kubernetes/bin",
	} {
		r, err := reuse(t, before, `{}`, fmt.Sprintf("{platform: %q, %s}", platform, hub))
		noError(t, err)
		config, pod := agentConfig(t, r), agent(t, r).Spec.Template.Spec
		for _, v := range pod.Volumes {
			if v.Name == "cni-bin-dir" && (v.HostPath.Path != want || config["MOUNTED_CNI_BIN_DIRS"] != "") {
				t.Errorf("platform %q: %s, MOUNTED_CNI_BIN_DIRS=%q", platform, v.HostPath.Path, config["MOUNTED_CNI_BIN_DIRS"])
			}
		}
		equal(t, pod.Containers[0].Image, "r.example/mesh/install-cni:"+theChart(t).AppVersion(), "with a hub alone: image")
	}
	r, err := reuse(t, before, `cniBinDir: /opt/cni/bin`, hub)
	if err != nil || agentConfig(t, r)["MOUNTED_CNI_BIN_DIRS"] == "" {
		t.Errorf("a directory of the user's is not kept: %v", err)
	}
}

func rawDefaults(t *testing.T) []byte {
	t.Helper()
	for _, f := range theChart(t).Raw {
		if f.Name == chartutil.ValuesfileName {
			return f.Data
		}
	}
	t.Fatal("the chart has no values.yaml")
	return nil
}

// TestObjects_OneNamespace: no object of the default rendering is in another namespace than the release's, and in no rendering do two
// objects get one name if a tool moves all to one namespace.
func TestObjects_OneNamespace(t *testing.T) {
	t.Parallel()
	for _, text := range []string{
		`{}`, `global: {resourceScope: namespace}`, `{provider: multus, networkAttachmentDefinition: false}`, `taint: {enabled: true}`,
		`{repair: {enabled: false}, audit: {interval: 0}}`, `taint: {enabled: true, mode: legacy, leaseNamespace: istio-system}`,
	} {
		for _, o := range mustRender(t, text).Objects {
			if o.Namespace != "" && o.Namespace != "istio-system" {
				t.Errorf("%s: %s", text, o.id())
			}
		}
	}
	eachRendering(t, func(t *testing.T, r rendering) {
		seen := map[string]bool{}
		for _, o := range r.Objects {
			if name := o.Kind + "/" + o.Name; seen[name] {
				t.Errorf("two objects %s", name)
			} else {
				seen[name] = true
			}
		}
	})
	moved := mustRender(t, `{taint: {enabled: true, mode: legacy, requirements: [{name: a, selector: a, namespace: a}]}}`)
	if args := tainter(t, moved).Spec.Template.Spec.Containers[0].Args; slices.ContainsFunc(args, func(arg string) bool {
		return strings.Contains(arg, "istio-system")
	}) {
		t.Errorf("the controller has the namespace of the rendering: %q", args)
	}
}

// TestParts_AreTheWhole: the two releases of a split installation own each object once, with the same content.
func TestParts_AreTheWhole(t *testing.T) {
	t.Parallel()
	const all = `{taint: {enabled: true}, provider: multus, resourceQuotas: {enabled: true}, global: {networkPolicy: {enabled: true}}}`
	whole, parts := mustRender(t, all).Objects, []object(nil)
	for _, scope := range []string{"cluster", "namespace"} {
		parts = append(parts, mustRender(t, all, "global: {resourceScope: "+scope+"}").Objects...)
	}
	texts := func(objects []object) (out []string) {
		for _, o := range objects {
			out = append(out, o.Text)
		}
		return out
	}
	same(t, "objects", texts(whole), texts(parts))
}
