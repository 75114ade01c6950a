package sidecar_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// change alters the facts of a pod, or the policy.
type change func(*sidecar.Facts, *sidecar.Policy)

// pod returns an injected pod that is captured, with the test's changes. The policy excludes two namespaces and has
// the agent's namespace.
func pod(changes ...change) (sidecar.Facts, sidecar.Policy) {
	f := sidecar.Facts{
		Namespace: "shop", Name: "cart-1", UID: "u1",
		Labels:      map[string]string{},
		Annotations: map[string]string{sidecar.StatusKey: `{"containers":["istio-proxy"]}`},
		Containers: []sidecar.Container{
			{Name: "istio-validation", Init: true},
			{Name: "app"},
			{Name: "istio-proxy", Args: []string{"proxy", "sidecar", "--domain", "x"}},
		},
	}
	p := sidecar.Policy{ExcludeNamespaces: []string{"kube-system", "istio-system"}, AgentNamespace: "mesh"}
	for _, c := range changes {
		c(&f, &p)
	}
	return f, p
}

func named(namespace, name string) change {
	return func(f *sidecar.Facts, _ *sidecar.Policy) { f.Namespace, f.Name = namespace, name }
}

func injectLabel(value string) change {
	return func(f *sidecar.Facts, _ *sidecar.Policy) { f.Labels[sidecar.InjectKey] = value }
}

func annotation(key, value string) change {
	return func(f *sidecar.Facts, _ *sidecar.Policy) { f.Annotations[key] = value }
}

func notInjected(f *sidecar.Facts, _ *sidecar.Policy) { delete(f.Annotations, sidecar.StatusKey) }

// proxies changes every container named istio-proxy.
func proxies(do func(*sidecar.Container)) change {
	return func(f *sidecar.Facts, _ *sidecar.Policy) {
		for i := range f.Containers {
			if f.Containers[i].Name == "istio-proxy" {
				do(&f.Containers[i])
			}
		}
	}
}

func args(words ...string) change {
	return proxies(func(c *sidecar.Container) { c.Args = words })
}

func env(name, value string) change {
	return proxies(func(c *sidecar.Container) { c.Env = append(c.Env, sidecar.EnvVar{Name: name, Value: value}) })
}

// also adds a container at the end, or at the beginning if it is an init container.
func also(c sidecar.Container) change {
	return func(f *sidecar.Facts, _ *sidecar.Policy) {
		if c.Init {
			f.Containers = append([]sidecar.Container{c}, f.Containers...)
		} else {
			f.Containers = append(f.Containers, c)
		}
	}
}

func proxyCalled(name string) change {
	return proxies(func(c *sidecar.Container) { c.Name = name })
}

// nativeProxy adds an init container istio-proxy.
func nativeProxy(c sidecar.Container) change {
	c.Name, c.Init = "istio-proxy", true
	return also(c)
}

func hostNetwork(f *sidecar.Facts, _ *sidecar.Policy) { f.HostNetwork = true }

func ambientOn(_ *sidecar.Facts, p *sidecar.Policy) { p.AmbientEnabled = true }

func selected(f *sidecar.Facts, p *sidecar.Policy) { f.Selected, p.AmbientEnabled = true, true }

func ambientOff(_ *sidecar.Facts, p *sidecar.Policy) { p.AmbientEnabled = false }

func noAgent(_ *sidecar.Facts, p *sidecar.Policy) { p.AgentNamespace = "" }

func excludes(namespaces ...string) change {
	return func(_ *sidecar.Facts, p *sidecar.Policy) { p.ExcludeNamespaces = namespaces }
}

// TestDecide has at least one row for every Reason, for every pair of adjacent rules, and for every value that almost
// matches a rule.
func TestDecide(t *testing.T) {
	type row struct {
		name    string
		changes []change
		want    sidecar.Reason
		detail  string
	}
	native, router := sidecar.Container{Args: []string{"proxy", "sidecar"}}, sidecar.Container{Args: []string{"proxy", "router"}}
	disabled := sidecar.Container{Name: "x", Env: []sidecar.EnvVar{{Name: "DISABLE_ENVOY", Value: "true"}}}
	reached := map[sidecar.Reason]bool{}
	byName := []sidecar.Reason{sidecar.NotKubernetes, sidecar.ExcludedNamespace, sidecar.OwnAgent}
	for _, test := range []row{
		{"an injected pod is captured", nil, sidecar.Captured, ""},

		{"a sandbox without namespace is no pod", []change{named("", "cart-1")}, sidecar.NotKubernetes, ""},
		{"a sandbox without name is no pod", []change{named("shop", "")}, sidecar.NotKubernetes, ""},
		{"a sandbox without name in an excluded namespace is no pod", []change{named("kube-system", "")}, sidecar.NotKubernetes, ""},

		{"the first excluded namespace", []change{named("kube-system", "dns")}, sidecar.ExcludedNamespace, "kube-system"},
		{"the last excluded namespace", []change{named("istio-system", "istiod")}, sidecar.ExcludedNamespace, "istio-system"},
		{"a namespace that begins like an excluded one", []change{named("kube-system-2", "x")}, sidecar.Captured, ""},
		{"an excluded namespace in another case", []change{named("Kube-System", "x")}, sidecar.Captured, ""},
		{"no namespace excluded", []change{named("kube-system", "x"), excludes()}, sidecar.Captured, ""},
		{"an empty excluded namespace excludes no pod", []change{excludes("")}, sidecar.Captured, ""},

		{"the agent in its namespace", []change{named("mesh", "istio-cni-node-x7")}, sidecar.OwnAgent, ""},
		{"a pod of the agent's name elsewhere", []change{named("shop", "istio-cni-node-x7")}, sidecar.Captured, ""},
		{"another pod in the agent's namespace", []change{named("mesh", "istio-cni-nod-x7")}, sidecar.Captured, ""},
		{"a pod whose name holds the agent's", []change{named("mesh", "my-istio-cni-node-x7")}, sidecar.Captured, ""},
		{"the namespace of the agent is unknown", []change{named("mesh", "istio-cni-node-x7"), noAgent}, sidecar.Captured, ""},

		{"a pod of the node's network", []change{hostNetwork}, sidecar.HostNetwork, ""},

		{"an init container istio-init", []change{also(sidecar.Container{Name: "istio-init", Init: true})}, sidecar.IstioInit, ""},
		{"a container istio-init", []change{also(sidecar.Container{Name: "istio-init"})}, sidecar.IstioInit, ""},
		{"an init container istio-validation decides nothing", []change{also(sidecar.Container{Name: "istio-validation", Init: true})}, sidecar.Captured, ""},

		{"DISABLE_ENVOY is any boolean of Go", []change{env("DISABLE_ENVOY", "T")}, sidecar.EnvoyDisabled, ""},
		{"DISABLE_ENVOY false", []change{env("DISABLE_ENVOY", "false")}, sidecar.Captured, ""},
		{"DISABLE_ENVOY that cannot be read", []change{env("DISABLE_ENVOY", "yes")}, sidecar.Captured, ""},
		{"DISABLE_ENVOY by valueFrom", []change{env("DISABLE_ENVOY", "")}, sidecar.Captured, ""},
		{"DISABLE_ENVOY twice: the last one counts", []change{env("DISABLE_ENVOY", "true"), env("DISABLE_ENVOY", "false")}, sidecar.Captured, ""},
		{"DISABLE_ENVOY of another container", []change{also(disabled)}, sidecar.Captured, ""},

		{"no container istio-proxy", []change{proxyCalled("envoy")}, sidecar.NoProxy, ""},
		{"a container that is nearly called so", []change{proxyCalled("istio-proxy-2")}, sidecar.NoProxy, ""},
		{"no container at all", []change{func(f *sidecar.Facts, _ *sidecar.Policy) { f.Containers = nil }}, sidecar.NoProxy, ""},

		{"a gateway", []change{args("proxy", "router")}, sidecar.NotSidecar, "proxy router"},
		{"a waypoint", []change{args("proxy", "waypoint", "--domain")}, sidecar.NotSidecar, "proxy waypoint"},
		{"a sidecar by its arguments", []change{args("proxy", "sidecar")}, sidecar.Captured, ""},
		{"no arguments", []change{args()}, sidecar.Captured, ""},
		{"one argument", []change{args("proxy")}, sidecar.Captured, ""},
		{"an empty role", []change{args("proxy", "")}, sidecar.Captured, ""},
		{"arguments of another command", []change{args("run", "router")}, sidecar.Captured, ""},
		{"the role elsewhere", []change{args("--x", "proxy", "router")}, sidecar.Captured, ""},

		{"label inject is any boolean of Go", []change{injectLabel("F")}, sidecar.InjectDisabled, `label "F"`},
		{"annotation inject false", []change{annotation(sidecar.InjectKey, "false")}, sidecar.InjectDisabled, `annotation "false"`},
		{"label inject true", []change{injectLabel("true")}, sidecar.Captured, ""},
		{"annotation inject true", []change{annotation(sidecar.InjectKey, "true")}, sidecar.Captured, ""},
		{"label inject that cannot be read", []change{injectLabel("no")}, sidecar.Captured, ""},
		{"annotation inject that cannot be read", []change{annotation(sidecar.InjectKey, "disabled")}, sidecar.Captured, ""},
		{"label wins over annotation: true", []change{injectLabel("true"), annotation(sidecar.InjectKey, "false")}, sidecar.Captured, ""},
		{"label wins over annotation: false", []change{injectLabel("false"), annotation(sidecar.InjectKey, "true")}, sidecar.InjectDisabled, `label "false"`},
		{"an empty label wins over the annotation", []change{injectLabel(""), annotation(sidecar.InjectKey, "false")}, sidecar.Captured, ""},
		{"an unreadable label wins over the annotation", []change{injectLabel("off"), annotation(sidecar.InjectKey, "false")}, sidecar.Captured, ""},

		{"no status annotation", []change{notInjected}, sidecar.NotInjected, ""},
		{"no annotation at all", []change{func(f *sidecar.Facts, _ *sidecar.Policy) { f.Annotations = nil }}, sidecar.NotInjected, ""},
		{"an empty status annotation is one", []change{annotation(sidecar.StatusKey, "")}, sidecar.Captured, ""},
		{"a status that is no JSON is one", []change{annotation(sidecar.StatusKey, "{")}, sidecar.Captured, ""},

		{"no status annotation where ambient is enabled", []change{notInjected, ambientOn}, sidecar.NotInjected, ""},
		{"no proxy where ambient is enabled", []change{proxyCalled("x"), notInjected, ambientOn}, sidecar.NoProxy, ""},
		{"a pod in ambient mode", []change{proxyCalled("x"), notInjected, selected}, sidecar.Ambient, ""},
		{"a selected pod without ambient mode", []change{notInjected, selected, ambientOff}, sidecar.NotInjected, ""},
		{"a gateway in ambient mode", []change{args("proxy", "router"), notInjected, selected}, sidecar.Ambient, ""},
		{"mode NONE in ambient mode", []change{annotation(sidecar.ModeKey, "NONE"), notInjected, selected}, sidecar.Ambient, ""},
		{"no proxy but a status annotation in ambient mode", []change{proxyCalled("x"), selected}, sidecar.NoProxy, ""},
		{"an injected pod in ambient mode", []change{selected}, sidecar.Captured, ""},
		{"an injected pod with mode NONE in ambient mode", []change{annotation(sidecar.ModeKey, "NONE"), selected}, sidecar.ModeNone, ""},

		{"mode NONE", []change{annotation(sidecar.ModeKey, "NONE")}, sidecar.ModeNone, ""},
		{"mode none in small letters is invalid", []change{annotation(sidecar.ModeKey, "none")}, sidecar.InvalidSettings, ""},
		{"mode NONE with a blank is invalid", []change{annotation(sidecar.ModeKey, "NONE ")}, sidecar.InvalidSettings, ""},

		{"an annotation that cannot be read", []change{annotation(sidecar.InboundPortsKey, "x")}, sidecar.InvalidSettings, ""},
		{"an unknown annotation", []change{annotation("traffic.sidecar.istio.io/includeInboundPort", "x")}, sidecar.Captured, ""},
		{"the status port's annotation is not read", []change{annotation("status.sidecar.istio.io/port", "x")}, sidecar.Captured, ""},

		{"a native sidecar", []change{proxyCalled("x"), nativeProxy(native)}, sidecar.Captured, ""},
		{"a native proxy that is no sidecar", []change{proxyCalled("x"), nativeProxy(router)}, sidecar.NotSidecar, "proxy router"},
		{"two proxies: the container's role counts", []change{nativeProxy(router)}, sidecar.Captured, ""},
		{"two proxies: the init container's role alone", []change{args(), nativeProxy(router)}, sidecar.NotSidecar, "proxy router"},
		{"two proxies: the init container's environment", []change{nativeProxy(disabled)}, sidecar.EnvoyDisabled, ""},
		{"two proxies: the container's wins", []change{env("DISABLE_ENVOY", "false"), nativeProxy(disabled)}, sidecar.Captured, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			facts, policy := pod(test.changes...)
			d := sidecar.Decide(facts, policy)
			reached[d.Reason] = true
			trimmedAlike(t, facts, policy)
			annotationsAgree(t, facts, policy)
			if early, done := sidecar.Early(facts.Namespace, facts.Name, policy); done != slices.Contains(byName, d.Reason) || done && shown(early) != shown(d) {
				t.Errorf("by its name the pod is %s (%v), by all that is known %s", shown(early), done, shown(d))
			}
			if d.Reason != test.want || d.Detail != test.detail {
				t.Errorf("the pod is %s, want reason %s with detail %q", shown(d), test.want, test.detail)
			}
			wellFormed(t, d)
		})
	}
	for _, r := range sidecar.Reasons() {
		if !reached[r] {
			t.Errorf("no row reaches reason %s", r)
		}
	}
}

// annotationsAgree checks that annotations alone never leave alone a pod that Decide captures or refuses.
func annotationsAgree(t *testing.T, f sidecar.Facts, p sidecar.Policy) {
	t.Helper()
	whole := sidecar.Decide(f, p)
	d, done := sidecar.ByAnnotations(f.Namespace, f.Name, f.Annotations, p)
	if done && (d.Outcome != sidecar.Pass || whole.Outcome != sidecar.Pass) {
		t.Errorf("by annotations the pod is %s, by all that is known %s", shown(d), shown(whole))
	}
	if _, injected := f.Annotations[sidecar.StatusKey]; !done && !injected && !p.AmbientEnabled {
		t.Errorf("annotations without %s do not decide", sidecar.StatusKey)
	}
}

// trimmedAlike checks that an agent keeps everything that decides, and that nothing changes the facts.
func trimmedAlike(t *testing.T, f sidecar.Facts, p sidecar.Policy) {
	t.Helper()
	before := cmp.Diff(sidecar.Facts{}, f)
	whole, trimmed := sidecar.Decide(f, p), sidecar.Decide(f.Trim(), p)
	if shown(whole) != shown(trimmed) || !slices.Equal(whole.Warnings, trimmed.Warnings) || cmp.Diff(whole.Spec, trimmed.Spec, specs) != "" {
		t.Errorf("the pod is %s, %+v; trimmed %s, %+v", shown(whole), whole.Spec, shown(trimmed), trimmed.Spec)
	}
	check.Equal(t, cmp.Diff(sidecar.Facts{}, f), before, "the facts were changed")
}

// shown returns the printed fields of a decision.
func shown(d sidecar.Decision) string {
	return fmt.Sprintf("%s by rule %s, detail %q, outcome %d", d.Reason.Sentence(), d.Reason, d.Detail, d.Outcome)
}

// wellFormed checks what holds for every decision.
func wellFormed(t *testing.T, d sidecar.Decision) {
	t.Helper()
	outcome := map[sidecar.Reason]sidecar.Outcome{
		sidecar.Captured: sidecar.Capture, sidecar.InvalidSettings: sidecar.Refuse, sidecar.Ambient: sidecar.Enrol,
	}[d.Reason]
	check.Equal(t, d.Outcome, outcome, "outcome of", d.Reason)
	if !slices.Contains(sidecar.Reasons(), d.Reason) {
		t.Errorf("reason %q is not one of Reasons", d.Reason)
	}
	_, ofSidecar := d.Wanted().(redirect.Spec)
	if _, ofAmbient := d.Wanted().(ambient.Spec); ofSidecar != (d.Outcome == sidecar.Capture) || ofAmbient != (d.Outcome == sidecar.Enrol) {
		t.Errorf("outcome is %d and the wanted redirection %T", d.Outcome, d.Wanted())
	}
	check.Equal(t, d.Err != nil, d.Outcome == sidecar.Refuse, "the error is", d.Err)
	if diff := cmp.Diff(redirect.Spec{}, d.Spec, specs); (diff != "") != (d.Outcome == sidecar.Capture) {
		t.Errorf("outcome is %d and the Spec\n%s", d.Outcome, diff)
	}
}

// TestDecide_FirstReason makes every possible pair of reasons true at once.
func TestDecide_FirstReason(t *testing.T) {
	causes := []struct {
		reason sidecar.Reason
		cause  change
	}{
		{sidecar.NotKubernetes, func(f *sidecar.Facts, _ *sidecar.Policy) { f.Name = "" }},
		{sidecar.ExcludedNamespace, func(f *sidecar.Facts, p *sidecar.Policy) { p.ExcludeNamespaces = []string{"x", f.Namespace} }},
		{sidecar.OwnAgent, func(f *sidecar.Facts, p *sidecar.Policy) { f.Name, p.AgentNamespace = "istio-cni-node-1", f.Namespace }},
		{sidecar.HostNetwork, hostNetwork},
		{sidecar.Ambient, func(f *sidecar.Facts, p *sidecar.Policy) {
			notInjected(f, p)
			selected(f, p)
		}},
		{sidecar.IstioInit, also(sidecar.Container{Name: "istio-init", Init: true})},
		{sidecar.EnvoyDisabled, env("DISABLE_ENVOY", "true")},
		{sidecar.NoProxy, proxyCalled("x")},
		{sidecar.NotSidecar, args("proxy", "router")},
		{sidecar.InjectDisabled, injectLabel("false")},
		{sidecar.NotInjected, notInjected},
		{sidecar.ModeNone, annotation(sidecar.ModeKey, "NONE")},
		{sidecar.InvalidSettings, annotation(sidecar.InboundPortsKey, "x")},
		{sidecar.Captured, func(*sidecar.Facts, *sidecar.Policy) {}},
	}
	for i, first := range causes {
		if first.reason != sidecar.Reasons()[i] {
			t.Fatalf("cause %d is of %s; Reasons has %s there", i, first.reason, sidecar.Reasons()[i])
		}
		for _, second := range causes[i+1:] {
			if first.reason == sidecar.EnvoyDisabled && second.reason == sidecar.NoProxy {
				continue // without a proxy there is no environment
			}
			t.Run(fmt.Sprintf("%s wins over %s", first.reason, second.reason), func(t *testing.T) {
				check.Equal(t, sidecar.Decide(pod(second.cause, first.cause)).Reason, first.reason)
			})
		}
	}
}

// TestDecide_AmbientSpec: the pod's annotations change the settings of the node, and bad ones warn.
func TestDecide_AmbientSpec(t *testing.T) {
	f, p := pod(notInjected, selected, annotation(ambient.DNSCaptureKey, "false"), annotation(ambient.BypassInboundKey, "perhaps"))
	p.Ambient = ambient.DefaultConfig()
	p.Ambient.DNSCapture, p.Ambient.IPv6 = true, true
	want := p.Ambient
	want.DNSCapture = false
	for _, facts := range []sidecar.Facts{f, f.Trim()} {
		d := sidecar.Decide(facts, p)
		if d.Ambient.Config != want || d.Ambient.Ingress || len(d.Warnings) != 1 || !strings.Contains(d.Warnings[0], ambient.BypassInboundKey) {
			t.Errorf("%+v, warnings %q", d.Ambient, d.Warnings)
		}
	}
}

// TestReasons_Explained: each has its own sentence, and is a valid label of a metric.
func TestReasons_Explained(t *testing.T) {
	sentences := map[string]sidecar.Reason{}
	for _, r := range sidecar.Reasons() {
		s := r.Sentence()
		if other, twice := sentences[s]; s == "" || twice {
			t.Errorf("sentence %q of %s is empty or equals the sentence of %s", s, r, other)
		}
		sentences[s] = r
		if strings.HasSuffix(s, ".") || strings.TrimSpace(s) != s {
			t.Errorf("sentence %q of %s does not fit into a sentence", s, r)
		}
		if string(r) != strings.ToLower(string(r)) || strings.ContainsAny(string(r), " _") {
			t.Errorf("reason %q is not a word for a metric", r)
		}
	}
	if r := sidecar.Reason("x"); r.Sentence() != "" || r.Remedy() != "" {
		t.Error("an unknown reason is explained")
	}
}

// TestDecide_Inputs: an agent delivers the inputs of its version, so a new input needs a later version.
func TestDecide_Inputs(t *testing.T) {
	want := []string{
		"DISABLE_ENVOY", "INVALID_DROP", "ISTIO_DUAL_STACK", "ISTIO_META_DNS_CAPTURE", "istio-init", "istio-proxy", "istio-validation",
		sidecar.RerouteInterfacesKey, sidecar.InjectKey, sidecar.InjectKey, sidecar.ModeKey, sidecar.StatusKey, sidecar.InboundPortsExcludeKey,
		sidecar.ExcludeInterfacesKey, sidecar.OutboundExcludeKey, sidecar.OutboundPortsExcludeKey, sidecar.InboundPortsKey, sidecar.OutboundKey,
		sidecar.OutboundPortsKey, sidecar.KubevirtInterfacesKey,
	}
	check.Diff(t, "inputs of version 1", want, sidecar.InputsOf(1))
}

// keys and variables are all keys of annotations and variables that decisions read.
var keys, variables = sidecar.Keys()

// FuzzDecide writes any text into annotations, label, environment and arguments of a pod. Every decision has a
// Reason of the closed set.
func FuzzDecide(f *testing.F) {
	for i, key := range keys {
		for _, text := range []string{"", "*", "80,443", "10.0.0.0/8,fd00::/8", "TPROXY", "false", "eth1", "x,"} {
			f.Add(byte(i), text, byte(i+3), "22", "true", byte(i), "sidecar", int64(i*1000), byte(0))
		}
		f.Add(byte(0), key, byte(2), "NONE", "false", byte(1), "router", int64(-1), byte(1<<(i%8)))
	}
	f.Fuzz(func(t *testing.T, key1 byte, text1 string, key2 byte, text2, value string, variable byte, role string, user int64, bits byte) {
		changes := []change{
			annotation(keys[int(key1)%len(keys)], text1), annotation(keys[int(key2)%len(keys)], text2), args("proxy", role),
			env(variables[int(variable)%len(variables)], value), runAs(new(user), nil), podRunAs(nil, new(user/2)),
		}
		for i, c := range []change{
			hostNetwork, also(sidecar.Container{Name: "istio-init", Init: true}), proxyCalled("x"),
			nativeProxy(sidecar.Container{Args: []string{text2, role}}), notInjected, selected, injectLabel(text2), args(),
		} {
			if bits>>i&1 == 1 {
				changes = append(changes, c)
			}
		}
		facts, policy := pod(changes...)
		d := sidecar.Decide(facts, policy)
		if !slices.Contains(sidecar.Reasons(), d.Reason) || d.Reason.Sentence() == "" {
			t.Errorf("the decision has reason %q", d.Reason)
		}
		wellFormed(t, d)
		trimmedAlike(t, facts, policy)
		annotationsAgree(t, facts, policy)
		if d.Outcome != sidecar.Capture {
			return
		}
		if len(d.Spec.UIDs) == 0 || len(d.Spec.GIDs) == 0 {
			t.Error("the proxy has no identity: it would capture itself")
		}
		for _, port := range redirect.AlwaysExcluded() {
			if !slices.Contains(d.Spec.InboundExclude, port) {
				t.Errorf("the sidecar's own port %d is not excluded", port)
			}
		}
	})
}
