package repair_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func defaults() repair.Predicate {
	return repair.Predicate{Annotation: sidecar.StatusKey, Container: sidecar.ValidationContainer, ExitCode: repair.NotRedirectedCode}
}

type change func(*repair.Pod)

// pod returns an injected pod whose sandbox exists and whose containers have not run.
func pod(changes ...change) repair.Pod {
	p := repair.Pod{
		Facts: sidecar.Facts{
			Namespace: "shop", Name: "web", UID: "1", Annotations: map[string]string{sidecar.StatusKey: "{}"},
			Containers: []sidecar.Container{{Name: sidecar.ValidationContainer, Init: true}, {Name: "app"}, {Name: "istio-proxy"}},
		},
		Addressed: true,
		Init:      []repair.Container{{Name: sidecar.ValidationContainer}},
	}
	for _, c := range changes {
		c(&p)
	}
	return p
}

func ended(code int) repair.State {
	s := repair.State{Terminated: true, ExitCode: code, Reason: "Error"}
	if code == 0 {
		s.Reason = "Completed"
	}
	return s
}

func now(s repair.State) change  { return func(p *repair.Pod) { p.Init[0].State = s } }
func last(s repair.State) change { return func(p *repair.Pod) { p.Init[0].Last = s } }
func without(key string) change  { return func(p *repair.Pod) { delete(p.Facts.Annotations, key) } }
func with(key, value string) change {
	return func(p *repair.Pod) { p.Facts.Annotations[key] = value }
}

func runtime(class string) change { return func(p *repair.Pod) { p.Facts.RuntimeClass = class } }

func never(p *repair.Pod) { p.NeverRestarts = true }

var waiting = repair.State{}

// TestClassify_ReferencePredicate is the reference's own table (compat: race repair, decision table).
func TestClassify_ReferencePredicate(t *testing.T) {
	message := func(text string, code int) repair.State {
		s := ended(code)
		s.Message = text
		return s
	}
	code := func(n int) func(*repair.Predicate) { return func(p *repair.Predicate) { p.ExitCode = n } }
	withMessage := func(p *repair.Predicate) { p.Message, p.ExitCode = "X", 0 }
	renamed := func(p *repair.Pod) { p.Init[0].Name = "x" }
	alone := func(p *repair.Pod) { p.Facts.Containers = []sidecar.Container{{Name: "app"}} }
	for _, test := range []struct {
		name      string
		changes   []change
		predicate func(*repair.Predicate)
		broken    bool
	}{
		{"it has ended well", []change{now(ended(0))}, nil, false},
		{"it has recovered", []change{now(ended(0)), last(ended(126))}, nil, false},
		{"it waits after a failure", []change{now(waiting), last(ended(126))}, nil, true},
		{"it has failed twice", []change{now(ended(126)), last(ended(126))}, nil, true},
		{"its last run has failed in another way", []change{now(ended(1)), last(ended(126))}, nil, true},
		{"it runs once more, and has not succeeded yet", []change{now(repair.State{Running: true}), last(ended(126))}, nil, true},
		{"another code is configured", []change{last(ended(126))}, code(55), false},
		{"another code", []change{last(ended(121))}, nil, false},
		{"any code is configured", []change{last(ended(121))}, code(0), true},
		{"no annotation", []change{last(ended(126)), without(sidecar.StatusKey)}, nil, false},
		{"the message", []change{last(message(" X ", 1))}, withMessage, true},
		{"another message", []change{last(message("Y", 1))}, withMessage, false},
		{"no status", []change{func(p *repair.Pod) { p.Init = nil }}, nil, false},
		{"another container", []change{last(ended(126)), renamed}, nil, false},
		{"any container is configured", []change{last(ended(126)), renamed}, func(p *repair.Predicate) { p.Container = "" }, true},
		{
			"no annotation is wanted, and the pod looks as if it were not injected",
			[]change{last(ended(126)), without(sidecar.StatusKey)},
			func(p *repair.Predicate) { p.Annotation = "" }, true,
		},
		{"a pod with one container", []change{last(ended(126)), alone}, nil, true},
		{"completed with another code counts as well", []change{now(repair.State{Terminated: true, Reason: "Completed", ExitCode: 126})}, nil, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := defaults()
			if test.predicate != nil {
				test.predicate(&p)
			}
			if f := repair.Classify(pod(test.changes...), p, sidecar.Policy{}); f.Broken != test.broken {
				t.Errorf("broken %v (%s), want %v", f.Broken, f.Reason, test.broken)
			}
		})
	}
}

// TestClassify has the pods that the reference misses, and pods that are left alone.
func TestClassify(t *testing.T) {
	broken := func(c ...change) []change { return append(c, last(ended(126))) }
	failed := repair.Finding{Reason: repair.ValidationFailed, Broken: true}
	repairable := repair.Finding{Reason: repair.ValidationFailed, Broken: true, Repairable: true}
	forGood := repair.Finding{Reason: repair.FailedForGood, Broken: true}
	unproven, passed := repair.Finding{Reason: repair.Unproven, NeedsInspection: true}, repair.Finding{Reason: repair.Passed}
	for _, test := range []struct {
		name string
		pod  []change
		want repair.Finding
	}{
		// W-10
		{"a first failure that was not restarted yet", []change{now(ended(126))}, repairable},
		{"a failure that is never restarted", []change{now(ended(126)), never}, forGood},
		{"a pod that has failed as a whole", []change{now(ended(126)), func(p *repair.Pod) { p.Ended = true }}, forGood},
		// Before the validation's verdict
		{"validation has not run", nil, unproven},
		{"validation runs", []change{now(repair.State{Running: true})}, unproven},
		{"never restarted, not yet validated", []change{never}, unproven},
		{"no validation, and the proxy runs", []change{func(p *repair.Pod) {
			p.Init, p.Containers = nil, []repair.Container{{Name: "istio-proxy", State: repair.State{Running: true}}}
			p.Facts.Containers = p.Facts.Containers[1:]
		}}, repair.Finding{Reason: repair.Unproven, NeedsInspection: true, Started: true}},
		{"no sandbox yet", []change{func(p *repair.Pod) { p.Addressed = false }}, repair.Finding{Reason: repair.NoSandbox}},
		{"ended without a status", []change{func(p *repair.Pod) { p.Ended = true }}, repair.Finding{Reason: repair.NoSandbox}},
		{"validated", []change{now(ended(0))}, repair.Finding{Reason: repair.Proven}},
		// Left alone
		{"terminating", broken(func(p *repair.Pod) { p.Deleting = true }), repair.Finding{Reason: repair.NotLookedAt}},
		{"excluded namespace", broken(func(p *repair.Pod) { p.Facts.Namespace = "kube-system" }), passed},
		{"host network", broken(func(p *repair.Pod) { p.Facts.HostNetwork = true }), passed},
		{"injection switched off", broken(with(sidecar.InjectKey, "false")), passed},
		{"ambient mode", broken(func(p *repair.Pod) { p.Facts.Selected, p.Facts.Annotations = true, map[string]string{} }), passed},
		// Pods that cannot be redirected in place
		{"bad settings", broken(with(sidecar.InboundPortsKey, "x")), failed},
		{"gVisor", broken(runtime("gvisor")), failed},
		{"in a sandbox, not validated", []change{runtime("kata")}, repair.Finding{Reason: repair.NotLookedAt}},
		{"in a sandbox, validated", []change{runtime("gvisor"), now(ended(0))}, repair.Finding{Reason: repair.Proven}},
		{"no proxy to be seen", broken(func(p *repair.Pod) { p.Facts.Containers = nil }), failed},
	} {
		t.Run(test.name, func(t *testing.T) {
			p, predicate := pod(test.pod...), defaults()
			if _, injected := p.Facts.Annotations[sidecar.StatusKey]; !injected {
				predicate.Annotation = ""
			}
			got := repair.Classify(p, predicate, sidecar.Policy{
				ExcludeNamespaces: []string{"kube-system"}, SandboxedRuntimes: []string{"gvisor", "kata"}, AmbientEnabled: true,
			})
			check.Equal(t, got.Broken, (got.Failed != repair.State{}), "broken", "by", got.Failed)
			check.Equal(t, summary(got), summary(test.want))
			if got.Broken && got.Reason.Sentence() == "" {
				t.Errorf("reason %q has no sentence", got.Reason)
			}
		})
	}
}

func summary(f repair.Finding) string {
	return fmt.Sprintf("%s broken=%v inspect=%v repairable=%v started=%v", f.Reason, f.Broken, f.NeedsInspection, f.Repairable, f.Started)
}

func TestApplyObservation(t *testing.T) {
	running := func(p *repair.Pod) {
		p.Containers = []repair.Container{{Name: "app", State: repair.State{Running: true}}}
	}
	unvalidated := func(p *repair.Pod) { p.Init, p.Facts.Containers = nil, p.Facts.Containers[1:] }
	for _, test := range []struct {
		name               string
		pod                []change
		rules              repair.Rules
		reason             repair.Reason
		broken, repairable bool
	}{
		{"in place", nil, repair.InPlaceRules, repair.Redirected, false, false},
		{"none", nil, repair.NoRules, repair.RulesMissing, true, true},
		{"none, and it runs", []change{unvalidated, running}, repair.NoRules, repair.RulesMissing, true, true},
		{"others, validation to come", nil, repair.OtherRules, repair.RulesDiffer, true, true},
		{"others, and it runs", []change{running}, repair.OtherRules, repair.RulesDiffer, false, false},
		{"others, no validation", []change{unvalidated}, repair.OtherRules, repair.RulesDiffer, false, false},
		{"none, and bad settings", []change{with(sidecar.InboundPortsKey, "x")}, repair.NoRules, repair.RulesMissing, true, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := pod(test.pod...)
			f := repair.Classify(p, defaults(), sidecar.Policy{})
			if !f.NeedsInspection {
				t.Fatalf("it needs no inspection: %s", f.Reason)
			}
			f = repair.ApplyObservation(f, p, test.rules)
			if f.NeedsInspection || f.Broken && f.Reason.Sentence() == "" || f.Reason != test.reason || f.Broken != test.broken || f.Repairable != test.repairable {
				t.Errorf("got %+v", f)
			}
		})
	}
}

func TestDecide_Modes(t *testing.T) {
	helpless, repairable := repair.Finding{Broken: true}, repair.Finding{Broken: true, Repairable: true}
	for _, test := range []struct {
		s              repair.Switches
		help, helpless repair.Mode
	}{
		{repair.Switches{}, repair.Report, repair.Report},
		{repair.Switches{Label: true}, repair.Label, repair.Label},
		{repair.Switches{Delete: true, Label: true}, repair.Delete, repair.Delete},
		{repair.Switches{InPlace: true}, repair.InPlace, repair.Report},
		{repair.Switches{InPlace: true, Label: true}, repair.InPlace, repair.Label},
		{repair.Switches{InPlace: true, Delete: true, Label: true}, repair.InPlace, repair.Delete},
	} {
		got, want := []repair.Mode{test.s.Mode(repairable), test.s.Mode(helpless)}, []repair.Mode{test.help, test.helpless}
		if !slices.Equal(got, want) {
			t.Errorf("%+v: modes %s where rules help and where they do not, want %s", test.s, got, want)
		}
	}
}

// TestMode_Sandbox: a pod of Kata Containers is not deleted, because the next one would have the same problem.
func TestMode_Sandbox(t *testing.T) {
	all := repair.Switches{InPlace: true, Delete: true, Label: true}
	for sandbox, want := range map[sidecar.Sandbox]repair.Mode{sidecar.GVisor: repair.Delete, sidecar.Kata: repair.Label} {
		check.Equal(t, all.Mode(repair.Finding{Broken: true, Decision: sidecar.Decision{Sandbox: sandbox}}), want, sandbox)
	}
}

func TestApplyObservation_RulesThatChanged(t *testing.T) {
	rules := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	at := func(seconds int) time.Time { return rules.Add(time.Duration(seconds) * time.Second) }
	for _, test := range []struct {
		name  string
		run   repair.State
		about bool
	}{
		{"it was over before", repair.State{Began: at(-9), Finished: at(-4)}, false},
		{"it was under way", repair.State{Began: at(-3), Finished: at(2)}, false},
		{"it began in the same second", repair.State{Began: at(0), Finished: at(5)}, false},
		{"it came afterwards", repair.State{Began: at(1), Finished: at(6)}, true},
		{"its beginning is not known, and it ended afterwards", repair.State{Finished: at(6)}, true},
		{"its beginning is not known, and it ended before", repair.State{Finished: at(-1)}, false},
		{"nothing is known", repair.State{}, false},
	} {
		check.Equal(t, (repair.Finding{Failed: test.run}).SawRules(rules), test.about, test.name)
	}
}

// TestDecide_LaterStates: of two failures the later one counts.
func TestDecide_LaterStates(t *testing.T) {
	f := repair.Classify(pod(now(repair.State{Terminated: true, ExitCode: 126, Finished: time.Unix(20, 0)}), last(repair.State{
		Terminated: true, ExitCode: 126, Finished: time.Unix(10, 0),
	})), defaults(), sidecar.Policy{})
	if !f.Broken || f.Failed.Finished != time.Unix(20, 0) {
		t.Errorf("the failure that counts is of %s", f.Failed.Finished)
	}
}
