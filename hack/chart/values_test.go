package main

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	yamlv3 "go.yaml.in/yaml/v3"
	"sigs.k8s.io/yaml"
)

// setting is one key of values.yaml with its comment.
type setting struct {
	path, comment string
	node          *yamlv3.Node
}

// documented returns the leaf settings of values.yaml.
func documented(t *testing.T) []setting {
	t.Helper()
	text, err := os.ReadFile(chartDir + "/values.yaml")
	noError(t, err)
	var file yamlv3.Node
	noError(t, yamlv3.Unmarshal(text, &file))
	root := file.Content[0]
	if len(root.Content) != 2 || root.Content[0].Value != "_internal_defaults_do_not_set" {
		t.Fatal("values.yaml has more than the defaults")
	}
	return settingsBelow("", root.Content[1])
}

// free are settings with arbitrary keys.
var free = []string{"agent", "resources", "updateStrategy", "taint.resources", "monitoring.dashboard.labels", "global.defaultResources"}

func settingsBelow(prefix string, node *yamlv3.Node) []setting {
	var out []setting
	for i := 0; i < len(node.Content); i += 2 {
		key, value := node.Content[i], node.Content[i+1]
		path := strings.TrimPrefix(prefix+"."+key.Value, ".")
		if value.Kind == yamlv3.MappingNode && len(value.Content) > 0 && !slices.Contains(free, path) {
			out = append(out, settingsBelow(path, value)...)
			continue
		}
		out = append(out, setting{path, key.HeadComment, value})
	}
	return out
}

func TestEverySettingIsDocumented(t *testing.T) {
	t.Parallel()
	all := documented(t)
	if len(all) < 90 {
		t.Fatalf("only %d settings found", len(all))
	}
	for _, s := range all {
		if !strings.HasSuffix(s.comment, ".") {
			t.Errorf("%s: comment %q", s.path, s.comment)
		}
	}
}

// schemaPaths returns the paths of all settings in a schema.
func schemaPaths(schema map[string]any, prefix string) []string {
	properties, ok := schema["properties"].(map[string]any)
	if !ok || slices.Contains(append(free, "seccompProfile", "seLinuxOptions"), prefix) {
		return []string{prefix}
	}
	var out []string
	for name, below := range properties {
		out = append(out, schemaPaths(below.(map[string]any), strings.TrimPrefix(prefix+"."+name, "."))...)
	}
	return out
}

// TestSchemaAndDefaultsNameTheSame compares values.schema.json with values.yaml.
func TestSchemaAndDefaultsNameTheSame(t *testing.T) {
	t.Parallel()
	var schema struct {
		Properties  map[string]any
		Definitions struct{ Settings map[string]any }
	}
	noError(t, yaml.Unmarshal(theChart(t).Schema, &schema))
	have := schemaPaths(schema.Definitions.Settings, "")
	chosen := []string{"profile", "platform", "compatibilityVersion"}
	for _, name := range chosen {
		chosen = append(chosen, "global."+name)
	}
	want := append(slices.Clone(chosen), "enabled") // of other charts
	for _, s := range documented(t) {
		want = append(want, s.path)
	}
	slices.Sort(have)
	slices.Sort(want)
	equal(t, cmp.Diff(want, have), "", "-values.yaml +values.schema.json")
	// Each setting that is allowed below "cni" is also allowed at the top level.
	tops := slices.Sorted(maps.Keys(schema.Properties))
	inside := append(slices.Collect(maps.Keys(schema.Definitions.Settings["properties"].(map[string]any))),
		"cni", "_internal_defaults_do_not_set")
	slices.Sort(inside)
	equal(t, cmp.Diff(inside, tops), "", "-settings +top level")
}

// mutation is another value of a setting, in YAML, with values in which it has an effect.
type mutation struct {
	to   string
	with string
	// refused has words of the error, if the chart rejects the value.
	refused string
}

// ignored are settings that are accepted without effect, as documented in values.yaml.
var ignored = []string{"variant", "global.variant", "repair.hub", "repair.tag", "ambient.configDir"}

const (
	tainting  = `taint: {enabled: true}`
	tagged    = `global: {hub: r.example/x, tag: 1.2.3}`
	labelling = `repair: {repairPods: false, labelPods: true}`
	deleting  = `repair: {repairPods: false, deletePods: true}`
)

func mutations() map[string]mutation {
	return map[string]mutation{
		"hub": {to: `r.example/mesh`}, "tag": {to: `"9"`}, "image": {to: `other`},
		"pullPolicy": {to: `Always`}, "logging.level": {to: `debug`}, "logging.pluginLevel": {to: `debug`},
		"cniBinDir": {to: `/b`}, "cniBinDirs": {to: `[/b, /d]`}, "cniConfDir": {to: `/c`}, "cniConfFileName": {to: `10-x.conflist`},
		"cniNetnsDir": {to: `/n`}, "cniCacheDir": {to: `/l`},
		"istioOwnedCNIConfigFileName": {to: `01-x.conflist`, with: `istioOwnedCNIConfig: true`},
		"confMode":                    {to: `dropin`}, "networkConfig": {to: `'{"type": "istio-cni"}'`}, "provider": {to: `multus`},
		"confVersion":                 {to: `1.0.0`, with: `chained: false`},
		"networkAttachmentDefinition": {to: `false`, with: `provider: multus`},
		"excludeNamespaces":           {to: `[a]`}, "secondIPFamily": {to: `reject`}, "apiTimeout": {to: `3s`},
		"sandboxedRuntimes":   {to: `[a]`},
		"forceIptablesBinary": {to: `legacy`}, "backend": {to: `native`}, "uninstallOnExit": {to: `never`}, "healthPort": {to: `8080`},
		"monitoringPort": {to: `9090`}, "affinity": {to: `{nodeAffinity: {}}`}, "nodeSelector": {to: `{a: b}`},
		"priorityClassName": {to: `other`}, "tolerations": {to: `[{operator: Exists}]`},
		"updateStrategy":                {to: `{type: OnDelete, rollingUpdate: null}`},
		"terminationGracePeriodSeconds": {to: `60`}, "daemonSetLabels": {to: `{a: b}`},
		"podAnnotations": {to: `{a: b}`}, "podLabels": {to: `{a: b}`}, "resources": {to: `{limits: {memory: 1Gi}}`},
		"agent": {to: `{kubeconfigMode: "0640"}`}, "env": {to: `{GOMAXPROCS: "1"}`}, "seccompProfile": {to: `{type: Unconfined}`},
		"seLinuxOptions":      {to: `{level: s0}`},
		"resourceQuotas.pods": {to: `7`, with: `resourceQuotas: {enabled: true}`},
		"revision":            {to: `canary`}, "ownerName": {to: `me`},
		"repair.deletePods":        {with: `repair: {repairPods: false}`},
		"repair.labelPods":         {with: `repair: {repairPods: false}`},
		"repair.evict":             {with: deleting},
		"repair.initContainerName": {to: `other`},
		"audit.interval":           {to: `0s`}, "audit.mode": {to: `repair`},
		"repair.brokenPodLabelKey":   {to: `a.b/c`, with: labelling},
		"repair.brokenPodLabelValue": {to: `"no"`, with: labelling},
		"taint.mode":                 {to: `legacy`, with: tainting}, "taint.name": {to: `a.b/c`, with: tainting},
		"taint.value": {to: `x`, with: tainting}, "taint.effect": {to: `NoExecute`, with: tainting},
		"taint.newNodes": {to: `true`, refused: "needs Kubernetes 1.36"},
		"taint.add":      {to: `true`, with: tainting}, "taint.hysteresis": {to: `5m`, with: tainting},
		"taint.requireNodeReady": {to: `true`, with: tainting}, "taint.nodeCondition": {to: `a.b/C`, with: tainting},
		"taint.namespaces":     {to: `[a, b]`, with: tainting},
		"taint.requirements":   {to: `[{name: a, selector: a=b}]`, with: `taint: {enabled: true, mode: legacy}`},
		"taint.leaseNamespace": {to: `a`, with: tainting}, "taint.replicas": {to: `1`, with: tainting},
		"taint.priorityClassName": {to: `other`, with: tainting}, "taint.affinity": {to: `{nodeAffinity: {}}`, with: tainting},
		"taint.nodeSelector": {to: `{a: b}`, with: tainting}, "taint.tolerations": {to: `[{operator: Exists}]`, with: tainting},
		"taint.resources":                {to: `{limits: {memory: 1Gi}}`, with: tainting},
		"monitoring.podMonitor.labels":   {to: `{a: b}`, with: `monitoring: {podMonitor: {enabled: true}}`},
		"monitoring.podMonitor.interval": {to: `15s`, with: `monitoring: {podMonitor: {enabled: true}}`},
		"monitoring.dashboard.labels":    {to: `{a: b}`, with: `monitoring: {dashboard: {enabled: true}}`},
		"ambient.enablementSelectors":    {to: `[]`},
		"ambient.shareHostNetworkNamespace": {
			to: `true`, with: `ambient: {enabled: true}`,
		},
		"global.hub": {to: `r.example/mesh`}, "global.tag": {to: `"9"`},
		"global.imagePullPolicy": {to: `Always`}, "global.imagePullSecrets": {to: `[a]`}, "global.logging.level": {to: `debug`},
		"global.resourceScope":    {to: `cluster`},
		"global.defaultResources": {to: `{limits: {memory: 1Gi}}`, with: `resources: null`},
	}
}

// nested writes a value at a dotted path.
func nested(path, value string) string {
	keys := strings.Split(path, ".")
	return "{" + strings.Join(keys, ": {") + ": " + value + strings.Repeat("}", len(keys))
}

// TestEverySettingHasAnEffect changes each setting of values.yaml separately and expects another rendering.
func TestEverySettingHasAnEffect(t *testing.T) {
	t.Parallel()
	table := mutations()
	for _, s := range documented(t) {
		m, found := table[s.path]
		delete(table, s.path)
		if slices.Contains(ignored, s.path) {
			contains(t, s.comment, "without effect")
			if s.node.Tag == "!!str" {
				m.to, found = "changed", true
			}
		}
		if m.to == "" && s.node.Tag == "!!bool" {
			m.to = fmt.Sprint(s.node.Value != "true")
			found = true
		}
		if !found {
			t.Errorf("%s: no other value is known to try", s.path)
			continue
		}
		t.Run(s.path, func(t *testing.T) {
			t.Parallel()
			changed := nested(s.path, m.to)
			if m.refused != "" {
				mustRefuse(t, m.refused, m.with+"\n", changed)
				return
			}
			before, after := mustRender(t, m.with+"\n"), mustRender(t, m.with+"\n", changed)
			effect, is := unsaid(before) != unsaid(after), slices.Contains(ignored, s.path)
			if effect == is || is != strings.Contains(said(t, after), " is ignored") {
				t.Errorf("%s has an effect: %t; %q", changed, effect, said(t, after))
			}
		})
	}
	for path := range table {
		t.Errorf("%s is no setting of values.yaml", path)
	}
}

// TestTheChartRefuses_NamesAndTypes: the schema refuses what it can say well, and the templates the rest.
func TestTheChartRefuses_NamesAndTypes(t *testing.T) {
	t.Parallel()
	for _, s := range documented(t) {
		wrong := "[[]]"
		if s.node.Kind == yamlv3.SequenceNode {
			wrong = "{}"
		}
		t.Run(s.path, func(t *testing.T) {
			t.Parallel()
			for _, path := range []string{s.path, "cni." + s.path} {
				_, err := tryRender(t, nested(path, wrong))
				text := fmt.Sprint(err)
				if !strings.Contains(text, "\n"+path+": got "+wrong) && !strings.Contains(text, "at '/"+strings.ReplaceAll(path, ".", "/")+"': ") {
					t.Errorf("%s: %s is not refused with its path: %v", path, wrong, err)
				}
			}
		})
	}
	for text, words := range map[string]string{
		`cni: {logLevel: info}`:                "\ncni.logLevel: use logging.level",
		`cni: {foo: 1}`:                        "\ncni.foo: unknown; cni has affinity, agent, ",
		`cni: {pilot: {}}`:                     "\ncni.pilot: unknown; ",
		`cni: {psp_cluster_role: x}`:           "\ncni.psp_cluster_role: not supported, remove it",
		`repair: {enable: true}`:               "\nrepair.enable: unknown; did you mean repair.enabled?",
		`repair: {repairpods: true}`:           "\nrepair.repairpods: unknown; did you mean repair.repairPods?",
		`repair: {delete: true}`:               "\nrepair.delete: unknown; did you mean repair.deletePods?",
		`taint: {nam: x}`:                      "\ntaint.nam: unknown; did you mean taint.name?",
		`taint: {namespace: x}`:                "\ntaint.namespace: use taint.namespaces; this name is of istiod's chart",
		`chained: "yes"`:                       "\nchained: got \"yes\", want true or false",
		`agent: {skipTlsVerify: "yes"}`:        "\nagent.skipTlsVerify: got \"yes\", want true or false",
		`taint: {replicas: "-1"}`:              "\ntaint.replicas: got \"-1\", want a number from 0",
		`platform: eks`:                        "/platform",
		`global: {platform: gkee}`:             "/global/platform",
		`profile: minimal`:                     "/profile",
		`compatibilityVersion: "1.19"`:         "/compatibilityVersion",
		`excludeNamespaces: kube-system`:       "\nexcludeNamespaces: got \"kube-system\", want a list",
		`sandboxedRuntimes: ["a,b"]`:           "/sandboxedRuntimes/0",
		`excludeNamespaces: ["Kube_System"]`:   "/excludeNamespaces/0",
		`cniBinDir: opt/cni/bin`:               "/cniBinDir",
		`cniConfFileName: /etc/x.conf`:         "/cniConfFileName",
		`audit: {interval: 5}`:                 "\naudit.interval: got 5, want a duration such as 5m, or 0",
		`audit: {interval: soon}`:              "\naudit.interval: got \"soon\", want a duration",
		`audit: {interval: ""}`:                "\naudit.interval: got \"\", want a duration",
		`audit: {mode: heal}`:                  "/audit/mode",
		`apiTimeout: 5`:                        "\napiTimeout: got 5, want a duration such as 10s",
		`apiTimeout: 5 seconds`:                "\napiTimeout: got \"5 seconds\", want a duration",
		`apiTimeout: 91s`:                      "\napiTimeout: \"91s\" is longer than 1m30s",
		`apiTimeout: 2m`:                       "\napiTimeout: \"2m\" is longer",
		`apiTimeout: 1m31s`:                    "\napiTimeout: \"1m31s\" is longer",
		`apiTimeout: 1h`:                       "\napiTimeout: \"1h\" is longer",
		`networkConfig: "{"`:                   "\nnetworkConfig: want a JSON object with \"type\": \"istio-cni\"",
		`networkConfig: '{"type": 1}'`:         "\nnetworkConfig: want a JSON object",
		`networkConfig: "[]"`:                  "\nnetworkConfig: want a JSON object",
		`networkConfig: '{"type": "x"}'`:       "\nnetworkConfig: want a JSON object",
		`healthPort: 9876`:                     "\nhealthPort: 9876 is the port of the agent's page",
		`monitoringPort: "9876"`:               "\nmonitoringPort: 9876 is the port of the agent's page",
		`logging: {level: verbose}`:            "/logging/level",
		`logging: {level: "debug,"}`:           "/logging/level",
		`global: {logging: {level: INFO}}`:     "/global/logging/level",
		`hub: https://r.example/mesh`:          "/hub",
		`global: {hub: r.example/mesh/}`:       "/global/hub",
		`global: {hub: ""}`:                    "/global/hub",
		`healthPort: 0`:                        "\nhealthPort: got 0, want a number from 1 to 65535",
		`monitoringPort: 70000`:                "\nmonitoringPort: got 70000, want a number from 0 to 65535",
		`monitoringPort: "70000"`:              "\nmonitoringPort: got \"70000\", want a number",
		`healthPort: abc`:                      "\nhealthPort: got \"abc\", want a number",
		`healthPort: "0"`:                      "\nhealthPort: got \"0\", want a number",
		`tolerations: [{keys: a}]`:             "\ntolerations[0].keys: unknown; did you mean tolerations[0].key?",
		`resources: {request: {}}`:             "\nresources.request: unknown; did you mean resources.requests?",
		`env: {"A B": c}`:                      "invalid propertyName 'A B'",
		`env: {A: {b: c}}`:                     "/env/A",
		`taint: {effect: NoRun}`:               "/taint/effect",
		`taint: {requirements: [{name: a}]}`:   "/taint/requirements/0",
		`taint: {add: "yes"}`:                  "/taint/add",
		`revision: "a b"`:                      "/revision",
		`cni: {global: {resourceScope: some}}`: "/cni/global/resourceScope",
		`seLinuxOptions: {types: x}`:           "\nseLinuxOptions.types: unknown; did you mean seLinuxOptions.type?",
		`repiar: {delete: true}`:               "repiar: unknown; did you mean repair?",
		`exclude: [a]`:                         "did you mean excludeNamespaces?",
		`excludedNamespaces: [a]`:              "did you mean excludeNamespaces?",
		`CNIBinDir: /a`:                        "CNIBinDir: unknown; did you mean cniBinDir?",
		`meshconfig: {}`:                       "meshconfig: unknown; did you mean meshConfig?",
		`istio-cni: {chained: no}`:             "istio-cni: unknown; values of this chart have no prefix, or cni",
		`privileged: true`:                     "privileged: not supported, remove it; ",
		`zzz: null`:                            "zzz: unknown to this chart and to Istio's other charts",
		`"z\u001b[31m\nz": 1`:                  `z\x1b[31m\nz: unknown`,
		`repair: {"a\u202e": {}}`:              `repair.a\u202e: unknown; repair has `,
		`tag: 1.30`:                            "tag: 1.3 is a number, and YAML takes 1.3 and 1.30 for the same number: write it in quotes",
		`global: {tag: 1.3}`:                   "global.tag: 1.3 is a number",
		`audit: off`:                           "\naudit: got false, want a map of interval, mode, podCondition",
		`cni: {audit: "off"}`:                  "\n" + `cni.audit: got "off", want a map of interval, mode, podCondition`,
		`repair: null`:                         "\nrepair: got null, want a map of brokenPodLabelKey, ",
		`global: {logging: debug}`:             "\n" + `global.logging: got "debug", want a map of level`,
		`tolerations: {operator: Exists}`:      "\n" + `tolerations: got {"operator":"Exists"}, want a list`,
		`env: [{name: A, value: b}]`:           "\n" + `env: got [{"name":"A","value":"b"}], want a map`,
		`updateStrategy: OnDelete`:             "\n" + `updateStrategy: got "OnDelete", want a map of rollingUpdate, type`,
		`ambient: {enablementSelectors: [{podSelector: {matchExpressions: [{key: a, operator: in}]}}]}`: "/matchExpressions/0/operator",
	} {
		mustRefuse(t, words, text)
	}
	for _, text := range []string{
		`env: {AMBIENT_ENABLED: "true", AMBIENT_PODS: ignore}`, // set explicitly
		`resources: null`, `taint: {resources: null}`, `global: {defaultResources: null}`, `resources: {limits: null}`, `updateStrategy: {rollingUpdate: null}`,
		`logging: {level: "default:info, cni-plugin:debug,xds:none"}`, `global: {logging: {level: warn}}`, `hub: "localhost:5000/a/b"`, `hub: localhost:5000`, `global: {hub: "[2001:db8::1]:5000/a"}`,
		`apiTimeout: 1m30s`, `apiTimeout: 0.5m`, `apiTimeout: 90s`, `apiTimeout: 10000ms`, `networkConfig: '{"type": "istio-cni", "a": [__A__, "__B_C__"]}'`,
		`{backend: native, forceIptablesBinary: nft, global: {nativeNftables: true}}`, `istioOwnedCNIConfigFileName: a.conf`,
	} {
		mustRender(t, text)
	}
}

// TestTheChartRefuses_AllAtOnce: each fault is a line, which begins with the path of the value.
func TestTheChartRefuses_AllAtOnce(t *testing.T) {
	t.Parallel()
	_, err := tryRender(t, `{cni: {ambient: {Enabled: true}, logLevel: info}, chaind: true, audit: {interval: 5}, hub: docker.io/istio, chained: false,
confMode: inline, ambient: {enablementSelectors: [{podSelectors: {}}]}, monitoring: {podMonitor: {enable: true}}, repairPods: true}`)
	if err == nil {
		t.Fatal("faults are rendered")
	}
	head, faults, _ := strings.Cut(err.Error(), "\n")
	equal(t, head, "rendering: execution error at (cni/templates/values-check.yaml:2:4): ", "the first line is")
	same(t, "faults", []string{
		"ambient.enablementSelectors[0].podSelectors: unknown; did you mean ambient.enablementSelectors[0].podSelector?",
		"audit.interval: got 5, want a duration such as 5m, or 0 for none",
		"chaind: unknown; did you mean chained?",
		"cni.ambient.Enabled: unknown; did you mean cni.ambient.enabled?",
		"cni.logLevel: use logging.level",
		`confMode: "inline" contradicts chained=false, which is standalone`,
		`hub: "docker.io/istio/install-cni:` + theChart(t).AppVersion() + `" is Istio's image, not this one: set global.hub and global.tag to this ` +
			"program's image; if other charts read global, too, set cni.hub and cni.tag",
		"monitoring.podMonitor.enable: unknown; did you mean monitoring.podMonitor.enabled?",
		"repairPods: unknown; did you mean repair.repairPods?",
	}, strings.Split(faults, "\n"))
}

// TestSchemaLeavesGlobalsOfOthersAlone: unknown names below global are allowed, because subcharts share them.
func TestSchemaLeavesGlobalsOfOthersAlone(t *testing.T) {
	t.Parallel()
	mustRender(t, `global: {proxy: {image: proxyv2}, meshID: m}`, `enabled: true`)
}

// TestTheChartRefuses tests constraints that a schema cannot express.
func TestTheChartRefuses(t *testing.T) {
	t.Parallel()
	for text, words := range map[string]string{
		`env: {AMBIENT_ENABLED: "true"}`:                                   "env.AMBIENT_ENABLED: set ambient.enabled=true instead",
		`env: {AMBIENT_ENABLED: true}`:                                     "env.AMBIENT_ENABLED: set ambient.enabled=true instead",
		`{confMode: inline, chained: false}`:                               "contradicts chained=false",
		`{confMode: inline, platform: openshift}`:                          "contradicts chained=false",
		`{confMode: dropin, istioOwnedCNIConfig: true}`:                    "contradicts istioOwnedCNIConfig=true",
		`{chained: false, istioOwnedCNIConfig: true}`:                      "contradicts chained=false",
		`{observe: true, repair: {enabled: true}}`:                         "repair.enabled=true contradicts observe=true",
		`{observe: true, audit: {mode: repair}}`:                           "audit.mode=repair contradicts observe=true",
		`{observe: true, audit: {interval: 0}}`:                            "audit.interval=0 contradicts observe=true",
		`{observe: true, audit: {podCondition: true}}`:                     "audit.podCondition=true contradicts observe=true",
		`{cni: {observe: true}, taint: {enabled: yes}}`:                    "taint.enabled=true contradicts observe=true",
		`{observe: true, taint: {newNodes: true}}`:                         "taint.newNodes=true contradicts observe=true",
		`{observe: true, hostNetwork: true}`:                               "hostNetwork=true contradicts observe=true",
		`{istioOwnedCNIConfig: true, istioOwnedCNIConfigFileName: a.conf}`: `istioOwnedCNIConfigFileName: "a.conf": want a name that ends in .conflist`,
		`{backend: netlink, global: {nativeNftables: true}}`:               `backend: "netlink" contradicts global.nativeNftables=true`,
		`{backend: native, forceIptablesBinary: legacy}`:                   `backend: "native" contradicts forceIptablesBinary=legacy`,
		`{healthPort: 15014}`:                                              "is also the monitoringPort",
		`global: {hub: docker.io/istio}`:                                   "is Istio's image, not this one: set global.hub",
		`global: {hub: gcr.io/istio-release}`:                              "is Istio's image, not this one: set global.hub",
		`image: docker.io/istio/install-cni:1.31.1`:                        "image: \"docker.io/istio/install-cni:1.31.1\" is Istio's image, not this one",
		`resourceScope: foo`:                                               "resourceScope: got \"foo\", want all, cluster or namespace; this chart reads global.resourceScope",
		`hub: registry.istio.io/release`:                                   "is Istio's image, not this one: set global.hub",
	} {
		mustRefuse(t, words, text)
	}
	old := defaultRelease()
	old.Kubernetes = "v1.29.3"
	_, err := render(theChart(t), old, values(t, `useAppArmorAnnotation: false`))
	if err == nil || !strings.Contains(err.Error(), "needs Kubernetes 1.30") {
		t.Errorf("AppArmor's field on %s: error %v", old.Kubernetes, err)
	}
	old.Kubernetes = "v1.24.9"
	if _, err := render(theChart(t), old, nil); err == nil || !strings.Contains(err.Error(), ">=1.25") {
		t.Errorf("Kubernetes %s: error %v", old.Kubernetes, err)
	}
}

// TestPrecedenceOfValues sets one setting in every place and removes the one with the highest precedence step by step.
func TestPrecedenceOfValues(t *testing.T) {
	t.Parallel()
	bin := func(texts ...string) string {
		for _, v := range agent(t, mustRender(t, texts...)).Spec.Template.Spec.Volumes {
			if v.Name == "cni-bin-dir" {
				return v.HostPath.Path
			}
		}
		return ""
	}
	for _, c := range []struct{ values, want string }{
		{`{}`, "/opt/cni/bin"},
		{`platform: microk8s`, "/var/snap/microk8s/current/opt/cni/bin"},
		{`global: {platform: microk8s}`, "/var/snap/microk8s/current/opt/cni/bin"},
		{`cni: {platform: microk8s}`, "/var/snap/microk8s/current/opt/cni/bin"},
		{`{global: {platform: microk8s}, platform: openshift}`, "/var/lib/cni/bin"},
		{`{platform: microk8s, cni: {cniBinDir: /historic}}`, "/historic"},
		{`{platform: microk8s, cni: {cniBinDir: /historic}, cniBinDir: /user}`, "/user"},
	} {
		equal(t, bin(c.values), c.want, c.values, "directory")
	}
	// A later false, an empty list and null override too; maps are merged.
	config := agentConfig(t, mustRender(t, `{platform: openshift, chained: true, excludeNamespaces: []}`))
	if config["CHAINED_CNI_PLUGIN"] != "true" || config["EXCLUDE_NAMESPACES"] != "" ||
		config["CNI_CONF_NAME"] != "istio-cni.conf" {
		t.Errorf("configuration %q", config)
	}
	demo := agent(t, mustRender(t, `profile: demo`, `resources: {requests: {cpu: null}}`))
	requests := demo.Spec.Template.Spec.Containers[0].Resources.Requests
	if len(requests) != 1 || requests.Memory().String() != "40Mi" {
		t.Errorf("requests %v", requests)
	}
	reconcile := func(version string) string {
		return agentConfig(t, mustRender(t, "compatibilityVersion: "+version))["AMBIENT_RECONCILE_POD_RULES_ON_STARTUP"]
	}
	if reconcile(`"1.28"`) != "false" || reconcile(`"1.29"`) != "true" {
		t.Error("compatibilityVersion has no effect")
	}
}
