package main

import (
	"embed"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"helm.sh/helm/v3/pkg/chart"
)

// reference has values files as written for the reference's chart.
//
//go:embed testdata/reference/*.yaml
var reference embed.FS

// sample is a rendering that must be valid: values under a name.
type sample struct {
	Name string
	// Values are YAML texts; later ones override earlier ones.
	Values []string
}

// samples returns all renderings that the tests cover: every option, profile and compatibility version on every
// platform, values files for the reference's chart, and the values files in ../examples of the chart's directory.
func samples(c *chart.Chart, dir string) ([]sample, error) {
	all := options()
	for _, name := range named(c, "profile") {
		all["profile "+name] = "profile: " + name
	}
	for _, name := range named(c, "compatibility") {
		all["as "+name] = fmt.Sprintf("compatibilityVersion: %q", name)
	}
	var out []sample
	for _, name := range slices.Sorted(maps.Keys(all)) {
		for _, platform := range platforms(c) {
			on := fmt.Sprintf("global: {platform: %q}", platform)
			out = append(out, sample{fmt.Sprintf("%s on %q", name, platform), []string{all[name], on}})
		}
	}
	files, err := referenceValues()
	if err != nil {
		return nil, err
	}
	examples, err := filepath.Glob(filepath.Join(dir, "../examples/values-*.yaml"))
	if err != nil {
		return nil, fmt.Errorf("looking for examples: %w", err)
	}
	for _, name := range examples {
		text, err := os.ReadFile(name) //nolint:gosec // a file of this tree
		if err != nil {
			return nil, fmt.Errorf("reading an example: %w", err)
		}
		files = append(files, sample{"examples/" + filepath.Base(name), []string{string(text)}})
	}
	return append(out, files...), nil
}

// renderAll returns the text of each rendering and of each ready manifest, by name.
func renderAll(c *chart.Chart, r release, dir string) (map[string][]byte, error) {
	all, err := samples(c, dir)
	if err != nil {
		return nil, err
	}
	texts := map[string][]byte{}
	for _, s := range all {
		given, err := parseValues(s.Values...)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.Name, err)
		}
		rendered, err := render(c, r, given)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", s.Name, err)
		}
		texts[s.Name] = rendered.text()
	}
	for _, name := range ready() {
		text, err := os.ReadFile(filepath.Join(dir, "..", name)) //nolint:gosec // a file of this tree
		if err != nil {
			return nil, fmt.Errorf("reading a manifest: %w", err)
		}
		texts[name] = text
	}
	return texts, nil
}

// named returns the NAMEs of the chart's files KIND-NAME.yaml.
func named(c *chart.Chart, kind string) []string {
	var out []string
	for _, f := range c.Files {
		dir, file := path.Split(f.Name)
		if name, is := strings.CutPrefix(strings.TrimSuffix(file, ".yaml"), kind+"-"); is && dir == "files/" {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// platforms returns the chart's platforms and "".
func platforms(c *chart.Chart) []string { return append([]string{""}, named(c, "platform")...) }

// options returns values that change the rendering, one feature each.
func options() map[string]string {
	return map[string]string{
		"defaults":           `{}`,
		"no repair":          `repair: {enabled: false}`,
		"repair delete":      `repair: {repairPods: false, deletePods: true}`,
		"repair evict":       `repair: {repairPods: false, deletePods: true, evict: true}`,
		"repair label":       `repair: {repairPods: false, labelPods: true}`,
		"repair detect":      `repair: {repairPods: false}`,
		"audit repairs":      `audit: {interval: 90s, mode: repair, podCondition: true}`,
		"audit alone":        `{repair: {enabled: false}, audit: {podCondition: true}}`,
		"no audit":           `audit: {interval: 0, podCondition: true}`,
		"neither":            `{repair: {enabled: false}, audit: {interval: 0}}`,
		"AppArmor field":     `useAppArmorAnnotation: false`,
		"observer":           `{observe: true, ambient: {enabled: true}, global: {networkPolicy: {enabled: true}}}`,
		"SELinux":            `seLinuxOptions: {level: s0}`,
		"seccomp":            `seccompProfile: {type: Localhost, localhostProfile: cni.json}`,
		"root's files":       `foreignOwners: false`,
		"ambient":            `ambient: {enabled: true}`,
		"ambient alone":      `{ambient: {enabled: true, shareHostNetworkNamespace: true}, repair: {enabled: false}, audit: {interval: 0}}`,
		"host network":       `{hostNetwork: true, healthPort: 18000, monitoringPort: 25014, livenessProbe: {enabled: false}}`,
		"no metrics":         `monitoringPort: 0`,
		"owned":              `{chained: true, istioOwnedCNIConfig: true, istioOwnedCNIConfigFileName: 01-mesh.conflist}`,
		"owned by mode":      `{chained: true, confMode: owned, confGroupRead: true}`,
		"dropin":             `{chained: true, confMode: dropin}`,
		"auto":               `{chained: true, confMode: auto}`,
		"inline":             `{chained: true, confMode: inline, cniConfFileName: 10-calico.conflist}`,
		"standalone":         `{chained: false, provider: multus}`,
		"attached by others": `{chained: false, provider: multus, networkAttachmentDefinition: false}`,
		"shared values": `{pilot: {}, meshConfig: {}, variant: debug, repair: {deletePods: "true"}, healthPort: "8001",
tolerations: [{operator: Exists, effect: NoExecute, tolerationSeconds: "30"}], updateStrategy: {rollingUpdate: {maxUnavailable: "2"}}}`,
		"template": `networkConfig: '{"type": "istio-cni", "kubernetes": {"kubeconfig": "__KUBECONFIG_FILEPATH__"}}'`,
		"plugin settings": `{secondIPFamily: capture, sandboxedRuntimes: [vm-*], apiTimeout: 5s, forceIptablesBinary: nft,
logging: {level: "default:info,cni-plugin:debug", pluginLevel: warn}, global: {nativeNftables: true}}`,
		"not live":          `liveConfiguration: false`,
		"agent's settings":  `agent: {kubeconfigMode: "0640", skipTlsVerify: true, skipCniBinaries: istio-iptables, repairInitContainerExitCode: 55}`,
		"never uninstalled": `uninstallOnExit: never`,
		"quota":             `resourceQuotas: {enabled: true, pods: 100}`,
		"network policy":    `global: {networkPolicy: {enabled: true}}`,
		"monitoring":        `monitoring: {podMonitor: {enabled: true, interval: 15s, labels: {release: prometheus}}, dashboard: {enabled: true}}`,
		"taint":             `taint: {enabled: true}`,
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
		"verbatim image": `image: registry.example/mesh/cni@sha256:0000000000000000000000000000000000000000000000000000000000000000`,
	}
}

func referenceValues() ([]sample, error) {
	const dir = "testdata/reference"
	entries, err := reference.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("reading values of the reference's users: %w", err)
	}
	var out []sample
	for _, e := range entries {
		text, err := reference.ReadFile(path.Join(dir, e.Name()))
		if err != nil {
			return nil, fmt.Errorf("reading values of the reference's users: %w", err)
		}
		out = append(out, sample{"reference/" + e.Name(), []string{string(text)}})
	}
	return out, nil
}

// ready returns the manifests that are not rendered here, by their paths relative to the chart's parent directory.
func ready() []string {
	return []string{"istio-cni.yaml", "examples/network-config.yaml", "examples/doctor.yaml"}
}

// writeAll creates a directory and writes each rendering and each ready manifest to a file. The first line of each
// file is a comment with its name.
func writeAll(c *chart.Chart, r release, dir, to string) error {
	texts, err := renderAll(c, r, dir)
	if err != nil {
		return err
	}
	if err := os.Mkdir(to, 0o750); err != nil {
		return fmt.Errorf("making a directory for the renderings: %w", err)
	}
	for i, name := range slices.Sorted(maps.Keys(texts)) {
		file := filepath.Join(to, fmt.Sprintf("%03d.yaml", i))
		text := append(comment(name), texts[name]...)
		if err := os.WriteFile(file, text, 0o600); err != nil { //nolint:forbidigo // not read concurrently
			return fmt.Errorf("writing a rendering: %w", err)
		}
	}
	return nil
}
