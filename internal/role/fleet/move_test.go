package fleet_test

import (
	"cmp"
	"fmt"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/test/check"
	"github.com/meshcni/istio-cni/internal/test/documenttest"
)

// policies are the namespace, the selector of pods and the rest of the spec of NetworkPolicies.
type policies [][3]string

// plane is what differs from a control plane in order, as kubectl shows it; a ztunnel "none" is not there.
type plane struct {
	istiod, ztunnel, env, mesh, values string
	policies                           policies
	// plain are pods whose sidecars do not accept HBONE.
	plain string
}

// An istiod and a ztunnel that are in order.
const (
	istiod   = "docker.io/istio/pilot:1.31.2-distroless"
	ztunnel  = "registry:5000/istio/ztunnel:1.30-alpha.1@sha256:0123"
	ambient  = `"env":[{"name":"PILOT_ENABLE_AMBIENT","value":"true"}]`
	withMesh = "defaultConfig:\n  # ISTIO_META_ENABLE_HBONE: \"false\"\n  proxyMetadata:\n    ISTIO_META_ENABLE_HBONE: \"true\"\n"
	withCNI  = `{"pilot":{"cni":{"enabled":true,"provider":"default"}}}`
)

const (
	hooks           = "get -o json mutatingwebhookconfigurations.admissionregistration.k8s.io -l app=sidecar-injector"
	meshPods        = "get -o json pods -n istio-system -l app in (istiod, ztunnel)"
	configs         = "get -o json configmaps -n istio-system --ignore-not-found istio istio-sidecar-injector"
	sidecars        = "get pods --all-namespaces -l security.istio.io/tlsMode=istio,networking.istio.io/tunnel!=http"
	networkPolicies = "get -o json networkpolicies.networking.k8s.io --all-namespaces"
	forbidden       = "Error from server (Forbidden): it is forbidden\n"
)

// web selects pods, and letsIn is what ambient mode needs.
const (
	web    = `{"matchLabels":{"app":"web"}}`
	letsIn = `,"ingress":[{"ports":[{"port":15008}]},{"from":[{"ipBlock":{"cidr":"169.254.7.127/32"}}]}]`
)

func meshPod(app, container, image, more string) string {
	return fmt.Sprintf(`{"metadata":{"namespace":"istio-system","name":"%s-1","labels":{"app":%[1]q,"istio.io/rev":"default"}},"status":{"phase":"Running"},
		"spec":{"containers":[{"name":"added","image":"other:1.2"},{"name":%q,"image":%q%s}]}}`, app, container, image, more)
}

// answers returns kubectl's answers, after the given ones.
func (p plane) answers(first ...answer) []answer {
	pods := []string{meshPod("istiod", "discovery", cmp.Or(p.istiod, istiod), ","+cmp.Or(p.env, ambient))}
	if p.ztunnel != "none" {
		pods = append(pods, meshPod("ztunnel", "istio-proxy", cmp.Or(p.ztunnel, ztunnel), ""))
	}
	config := func(name, key, text string) string {
		return fmt.Sprintf(`{"metadata":{"name":%q},"data":{%q:%q}}`, name, key, text)
	}
	var rules []string
	for i, policy := range p.policies {
		rules = append(rules, fmt.Sprintf(`{"metadata":{"namespace":%q,"name":"p%d"},"spec":{"podSelector":%s%s}}`, policy[0], i, policy[1], policy[2]))
	}
	const row = `[{"name":"ambient","result":"ok","text":"serves"},{"name":"ambient-policies","result":"warn","text":"the agent may not"}]`
	return fleetOf(2, append(first,
		of(1, "doctor", row), of(2, "doctor", row),
		answer{For: hooks, Out: list(`{"webhooks":[{"clientConfig":{"service":{"namespace":"istio-system"}}}]}`)},
		answer{For: meshPods, Out: list(pods...)},
		answer{For: "get -o json pods -n kube-system -l app in (istiod, ztunnel)", Out: list()},
		answer{For: configs, Out: list(config("istio", "mesh", cmp.Or(p.mesh, withMesh)), config("istio-sidecar-injector", "values", cmp.Or(p.values, withCNI)))},
		answer{For: sidecars, Out: p.plain},
		answer{For: networkPolicies, Out: list(rules...)},
	)...)
}

// TestDoctor_ForAmbient: each fault of the control plane is found once, and what cannot be read is no pass.
func TestDoctor_ForAmbient(t *testing.T) {
	t.Parallel()
	no := func(what string) answer { return answer{For: what, Code: 1, Err: forbidden} }
	for name, test := range map[string]struct {
		plane plane
		first []answer
		want  string // the beginnings of the lines that are not ✓
		text  string
	}{
		"all is well":                       {},
		"ztunnel is newer":                  {plane{ztunnel: "ztunnel:1.32.0"}, nil, "✗ ambient-versions", "ztunnel 1.32 (istio-system/ztunnel-1) with istiod 1.31 (istio-system/istiod-1)"},
		"ztunnel is too old":                {plane{ztunnel: "ztunnel:1.29.9"}, nil, "✗ ambient-versions", "ztunnel 1.29"},
		"a digest only":                     {plane{ztunnel: "ztunnel@sha256:1.31"}, nil, "! ambient-versions", "could not be checked, because the images name none: istio-system/ztunnel-1 (image ztunnel@sha256:1.31)"},
		"a port is no version":              {plane{istiod: "host:1.31/pilot"}, nil, "! ambient-versions", "istiod-1 (image host:1.31/pilot)"},
		"the tag of another version scheme": {plane{istiod: "pilot:latest"}, nil, "! ambient-versions", "(image pilot:latest)"},
		"no ztunnel":                        {plane{ztunnel: "none"}, nil, "! ambient-versions", "ztunnel's version could not be checked: not found in"},
		"ambient off":                       {plane{env: `"env":[{"name":"X","value":"true"}]`}, nil, "✗ ambient-istiod", "PILOT_ENABLE_AMBIENT is not true, so istiod refuses ztunnels: istio-system/istiod-1"},
		"ambient set to no":                 {plane{env: `"env":[{"name":"PILOT_ENABLE_AMBIENT","value":"no"}]`}, nil, "✗ ambient-istiod", "not true"},
		"ambient of a ConfigMap":            {plane{env: `"envFrom":[{"configMapRef":{"name":"x"}}]`}, nil, "! ambient-istiod", "could not be checked, because these pods do not have it themselves: istio-system/istiod-1"},
		"ambient of a key":                  {plane{env: `"env":[{"name":"PILOT_ENABLE_AMBIENT","valueFrom":{"x":{}}}]`}, nil, "! ambient-istiod", "do not have it themselves"},
		"the last one counts":               {plane{env: `"env":[{"name":"PILOT_ENABLE_AMBIENT","value":"false"},{"name":"PILOT_ENABLE_AMBIENT","value":"true"}]`}, nil, "", ""},
		"HBONE off":                         {plane{mesh: "defaultConfig: {}\n"}, nil, "! ambient-sidecars", "ISTIO_META_ENABLE_HBONE is not true in ConfigMap istio-system/istio"},
		"sidecars without HBONE":            {plane{plain: "shop/a\nshop/b\n"}, nil, "✗ ambient-sidecars", "2 pods with a sidecar that does not accept HBONE: shop/a, shop/b"},
		"a damaged mesh":                    {plane{mesh: "a: b: c"}, nil, "! ambient-sidecars", "could not be checked"},
		"pilot.cni off":                     {plane{values: `{"pilot":{"cni":{"enabled":false}}}`}, nil, "! ambient-injection", "pilot.cni.enabled is off in ConfigMap istio-system/istio-sidecar-injector"},
		"a policy that denies":              {plane{policies: policies{{"shop", "{}", ""}}}, nil, "! ambient-policies", "keep out TCP port 15008: shop/p0; probes: shop/p0 [the cluster]"},
		"egress only":                       {plane{policies: policies{{"shop", "{}", `,"policyTypes":["Egress"]`}, {"kube-system", "{}", ""}}}, nil, "", "no NetworkPolicy keeps out"},
		"a port of the app":                 {plane{policies: policies{{"shop", web, `,"ingress":[{"ports":[{"port":8080},{"port":"http"},{"port":15008,"protocol":"UDP"}]}]`}}}, nil, "! ambient-policies", "15008: shop/p0; probes: none"},
		"a range of ports":                  {plane{policies: policies{{"shop", web, `,"ingress":[{"ports":[{"port":15000,"endPort":15010}]}]`}}}, nil, "", ""},
		"peers only":                        {plane{policies: policies{{"shop", web, `,"ingress":[{"from":[{"namespaceSelector":{}},{"ipBlock":{"cidr":"0.0.0.0/0","except":["169.254.0.0/16"]}}]}]`}}}, nil, "! ambient-policies", "15008: none; probes: shop/p0"},
		"another policy lets in":            {plane{policies: policies{{"shop", web, ""}, {"shop", web, letsIn}, {"other", "{}", ""}}}, nil, "! ambient-policies", "15008: other/p2; probes: other/p2"},
		"one for all pods":                  {plane{policies: policies{{"shop", web, ""}, {"shop", "{}", letsIn}}}, nil, "", ""},
		"one for all pods, no labels":       {plane{policies: policies{{"shop", web, ""}, {"shop", `{"matchLabels":{}}`, letsIn}}}, nil, "", ""},
		"no access to policies":             {plane{}, []answer{no(networkPolicies)}, "! ambient-policies", "network policies could not be checked: Error from server (Forbidden)"},
		"no access to webhooks":             {plane{}, []answer{no(hooks)}, "", ""},
		"no access to pods":                 {plane{}, []answer{no(meshPods)}, "! ambient-versions, ! ambient-istiod, ! ambient-sidecars, ! ambient-injection", "could not be checked: the pods of namespace istio-system: Error from server (Forbidden)"},
		"no access to ConfigMaps":           {plane{}, []answer{no(configs)}, "! ambient-sidecars, ! ambient-injection", "istiod's ConfigMaps in namespace istio-system: Error from server (Forbidden)"},
		"no access to sidecars":             {plane{}, []answer{no(sidecars)}, "! ambient-sidecars", "pods with a sidecar: Error from server (Forbidden)"},
		"one ConfigMap":                     {plane{}, []answer{{For: configs, Out: `{"kind":"ConfigMap","metadata":{"name":"istio"},"data":{"mesh":"defaultConfig: {proxyMetadata: {ISTIO_META_ENABLE_HBONE: 'true'}}"}}`}}, "! ambient-injection", "could not be checked"},
		"no ConfigMap":                      {plane{}, []answer{{For: configs}}, "! ambient-sidecars, ! ambient-injection", "could not be checked"},
		"no JSON":                           {plane{}, []answer{{For: configs, Out: "x"}}, "! ambient-sidecars, ! ambient-injection", "reading its output"},
		"other containers": {
			plane{},
			[]answer{{For: meshPods, Out: list(meshPod("istiod", "x", "pilot:1.31.0", ""), meshPod("ztunnel", "y", "ztunnel:1.31.0", ""))}},
			"! ambient-versions, ! ambient-istiod",
			"istio-system/istiod-1 (image not known), istio-system/ztunnel-1 (image not known)",
		},
		"no answer": {
			plane{},
			[]answer{{For: hooks, Hang: true}},
			"! ambient-versions, ! ambient-istiod, ! ambient-sidecars, ! ambient-injection, ! ambient-policies",
			"istiod's webhooks: no answer within 8s",
		},
		"istiod elsewhere": {
			plane{},
			[]answer{{For: hooks, Out: list(`{"webhooks":[{"clientConfig":{"url":"https://istiod.example"}}]}`)}, {For: meshPods, Out: list()}},
			"! ambient-versions, ! ambient-istiod, ! ambient-sidecars, ! ambient-injection",
			"outside of the cluster",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := run(t, test.plane.answers(test.first...), "doctor", "--for", "ambient", "--timeout=8s")
			var found []string
			for line := range strings.Lines(r.stdout) {
				if strings.HasPrefix(line, "!") || strings.HasPrefix(line, "✗") {
					found = append(found, strings.SplitN(line, ":", 2)[0])
				}
			}
			check.Equal(t, strings.Join(found, ", "), test.want, r.stdout)
			fails := 0
			if strings.Contains(test.want, "✗") {
				fails = 1
			}
			r.want(t, fails, test.text, "")
			check.Equal(t, strings.Count(r.stdout, "[the cluster]"), 5, "lines about the cluster", r.stdout)
		})
	}
}

// TestDoctor_ForAmbientTwoRevisions: each revision has ConfigMaps of its own, and a ztunnel fits one of them.
func TestDoctor_ForAmbientTwoRevisions(t *testing.T) {
	t.Parallel()
	canary := strings.NewReplacer("istiod-1", "istiod-canary", `"default"`, `"canary"`).Replace(meshPod("istiod", "discovery", "pilot:1.33.0", ""))
	r := run(t, plane{}.answers(
		answer{For: meshPods, Out: list(meshPod("istiod", "discovery", istiod, ","+ambient), canary, meshPod("ztunnel", "istio-proxy", ztunnel, ""))},
		answer{For: "--ignore-not-found istio-canary istio-sidecar-injector-canary", Out: list(`{"metadata":{"name":"istio-canary"},"data":{"mesh":"{}"}}`)},
	), "doctor", "--for=ambient")
	for _, want := range []string{
		"! ambient-istiod: PILOT_ENABLE_AMBIENT is not true, so istiod refuses ztunnels: istio-system/istiod-canary [the cluster]\n",
		"ztunnel 1.30 (istio-system/ztunnel-1) with istiod 1.33 (istio-system/istiod-canary)",
		"! ambient-sidecars: ISTIO_META_ENABLE_HBONE is not true in ConfigMap istio-system/istio-canary",
		"! ambient-injection: pilot.cni.enabled could not be checked",
	} {
		r.want(t, 1, want, "")
	}
}

// TestDoctor_ForAmbientJSON: rows about the cluster have no node, and those in order no remedy. Without ambient mode there is none.
func TestDoctor_ForAmbientJSON(t *testing.T) {
	t.Parallel()
	r := run(t, plane{}.answers(), "doctor", "--for", "ambient", "-o", "json")
	r.want(t, 0, `"name": "ambient-versions",`, "")
	documenttest.Valid(t, "DoctorReport", r.stdout)
	if n := strings.Count(r.stdout, `"node":`); n != 2 || strings.Contains(r.stdout, `"remedy"`) {
		t.Errorf("%d rows with a node, or a remedy of what is in order:\n%s", n, r.stdout)
	}
	const other = `[{"name":"token","result":"ok","text":"fine"}]`
	run(t, plane{}.answers(of(1, "doctor", other), of(2, "doctor", other)), "doctor").want(t, 0, "agent\n-----\n✓ token: fine [n1, n2]\n\n1 check: 0 failed, 0 need a look\n", "")
}
