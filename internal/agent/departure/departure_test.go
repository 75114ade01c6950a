package departure

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
)

const (
	setPath  = "/apis/apps/v1/namespaces/istio-system/daemonsets/istio-cni-node"
	podPath  = "/api/v1/namespaces/istio-system/pods/istio-cni-node-x7"
	nodePath = "/api/v1/nodes/node-1"
)

func self() Self {
	return Self{Namespace: "istio-system", DaemonSet: "istio-cni-node", NodeName: "node-1", PodName: "istio-cni-node-x7"}
}

func nameless() Self {
	s := self()
	s.PodName = ""
	return s
}

// brief is for servers that never give a good answer: the whole budget is waited for.
func brief() Budget {
	return Budget{Total: time.Second, Attempt: 300 * time.Millisecond, Pause: 10 * time.Millisecond, Confirm: 20 * time.Millisecond}
}

// patient is for servers that give one in the end, however busy the machine is.
func patient() Budget {
	return Budget{Total: 5 * time.Minute, Attempt: time.Minute, Pause: time.Millisecond, Confirm: 2 * time.Millisecond}
}

// impatientOnce gives up a hanging attempt soon and has all the time otherwise.
func impatientOnce() Budget {
	b := patient()
	b.Attempt = time.Second
	return b
}

func newAPI(t *testing.T, server *kubetest.Server) *kube.API {
	t.Helper()
	token, authority := server.ServiceAccount(t)
	host, port := server.Address()
	api, err := kube.NewAPI(kube.Access{
		Server: kube.Address{Host: host, Port: port}, TokenFile: token, CAFile: authority, Now: time.Now,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(api.Close)
	return api
}

// newServer knows the DaemonSet, the node and the pod.
func newServer(t *testing.T) *kubetest.Server {
	t.Helper()
	server := kubetest.NewServer(t)
	server.Set(kubetest.DaemonSet("istio-system", "istio-cni-node", `{"nodeSelector": {"kubernetes.io/os": "linux"}}`))
	server.Set(kubetest.Node("node-1", map[string]string{"kubernetes.io/os": "linux"}, ""))
	server.Set(kubetest.Pod{Namespace: "istio-system", Name: "istio-cni-node-x7"}.JSON(t))
	return server
}

func deleting(t *testing.T, object []byte) []byte {
	t.Helper()
	var whole map[string]any
	if err := json.Unmarshal(object, &whole); err != nil {
		t.Fatal(err)
	}
	whole["metadata"].(map[string]any)["deletionTimestamp"] = "2026-01-01T00:00:00Z"
	changed, err := json.Marshal(whole)
	if err != nil {
		t.Fatal(err)
	}
	return changed
}

type row struct {
	name      string
	self      Self
	budget    Budget
	given     func(*testing.T, *kubetest.Server)
	uninstall bool
	reason    Reason
	detail    string // a part of it
}

// byAnother makes our pod one of a DaemonSet that nobody told us of.
func byAnother(t *testing.T, s *kubetest.Server) {
	t.Helper()
	s.Delete(setPath)
	var pod map[string]any
	if err := json.Unmarshal(kubetest.Pod{Namespace: "istio-system", Name: "istio-cni-node-x7"}.JSON(t), &pod); err != nil {
		t.Fatal(err)
	}
	pod["metadata"].(map[string]any)["ownerReferences"] = []any{
		map[string]any{"kind": "DaemonSet", "apiVersion": "apps/v1", "name": "istio-cni-node-canary", "controller": true},
	}
	text, err := json.Marshal(pod)
	if err != nil {
		t.Fatal(err)
	}
	s.Set(text)
}

// elsewhere makes the DaemonSet one for nodes that ours is not.
func elsewhere(_ *testing.T, s *kubetest.Server) {
	s.Set(kubetest.DaemonSet("istio-system", "istio-cni-node", `{"nodeSelector": {"mesh": "yes"}}`))
}

func fails(path string, fault kubetest.Fault, times int) func(*testing.T, *kubetest.Server) {
	return func(_ *testing.T, s *kubetest.Server) { s.FailOn(path, fault, times) }
}

func both(steps ...func(*testing.T, *kubetest.Server)) func(*testing.T, *kubetest.Server) {
	return func(t *testing.T, s *kubetest.Server) {
		for _, step := range steps {
			step(t, s)
		}
	}
}

const ever = kubetest.Forever

func presentRows() []row {
	return []row{
		{"the DaemonSet is there", self(), patient(), nil, false, DaemonSetPresent, ""},
		{
			"the DaemonSet was deleted", self(), patient(),
			func(_ *testing.T, s *kubetest.Server) { s.Delete(setPath) }, true, DaemonSetGone, "not found (404)",
		},
		{
			"the DaemonSet has another name, which the pod knows", self(), patient(),
			both(byAnother, func(_ *testing.T, s *kubetest.Server) {
				s.Set(kubetest.DaemonSet("istio-system", "istio-cni-node-canary", ""))
			}),
			false, DaemonSetPresent, "",
		},
		{"the DaemonSet of another name was deleted, too", self(), patient(), byAnother, true, DaemonSetGone, "not found (404)"},
		{
			"the DaemonSet has another name, and nobody answers for it", self(), brief(),
			both(byAnother, fails("/daemonsets/istio-cni-node-canary", kubetest.Hang, ever)), false, NoAnswer, "",
		},
		{"the DaemonSet is being deleted", self(), patient(), func(t *testing.T, s *kubetest.Server) {
			s.Set(deleting(t, kubetest.DaemonSet("istio-system", "istio-cni-node", "")))
		}, true, DaemonSetLeaving, ""},
		{
			"the DaemonSet is for other nodes", self(), patient(),
			elsewhere, true, NodeNotMeant, "mesh=yes",
		},
		{
			"the node was tainted against it", self(), patient(), func(_ *testing.T, s *kubetest.Server) {
				s.Set(kubetest.Node("node-1", map[string]string{"kubernetes.io/os": "linux"}, `[{"key": "gone", "effect": "NoExecute"}]`))
			}, true, NodeNotMeant, "gone=:NoExecute",
		},
		{
			"the node is cordoned", self(), patient(), func(_ *testing.T, s *kubetest.Server) {
				s.Set(kubetest.Node("node-1", map[string]string{"kubernetes.io/os": "linux"},
					`[{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]`))
			}, false, DaemonSetPresent, "",
		},
		{
			"the node is not ready", self(), patient(), func(_ *testing.T, s *kubetest.Server) {
				s.Set(kubetest.Node("node-1", map[string]string{"kubernetes.io/os": "linux"},
					`[{"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}]`))
			}, false, DaemonSetPresent, "",
		},
		{
			"for other nodes, but the node may not be read", self(), patient(),
			both(elsewhere, fails(nodePath, kubetest.Forbidden, ever)),
			false, DaemonSetPresent, "forbidden (403)",
		},
		{
			"for other nodes, but the node is not known", self(), patient(),
			both(elsewhere, func(_ *testing.T, s *kubetest.Server) { s.Delete(nodePath) }),
			false, DaemonSetPresent, "not found (404)",
		},
		{
			"for other nodes, but the node is never answered for", self(), brief(),
			both(elsewhere, fails(nodePath, kubetest.Hang, ever)),
			false, DaemonSetPresent, "no answer in time",
		},
		{
			"for other nodes, and the node is answered for in the end", self(), patient(),
			both(elsewhere, fails(nodePath, kubetest.ServerError, 2)), true, NodeNotMeant, "",
		},
		{
			"for other nodes, but our node is not known to us",
			Self{Namespace: "istio-system", DaemonSet: "istio-cni-node"},
			patient(),
			elsewhere, false, DaemonSetPresent, "",
		},
	}
}

func refusedRows() []row {
	return []row{
		{"401 twice", self(), patient(), fails(setPath, kubetest.Unauthorized, 2), true, AccountGone, "unauthorized (401)"},
		{"401, then 200", self(), patient(), fails(setPath, kubetest.Unauthorized, 1), false, DaemonSetPresent, ""},
		{
			"401, then 404", self(), patient(), both(
				fails(setPath, kubetest.Unauthorized, 1),
				func(_ *testing.T, s *kubetest.Server) { s.Delete(setPath) },
			), true, DaemonSetGone, "",
		},
		{
			"401, 500, then 401", self(), patient(), both(fails(setPath, kubetest.Unauthorized, 1),
				fails(setPath, kubetest.ServerError, 1), fails(setPath, kubetest.Unauthorized, 1)), true, AccountGone, "",
		},
		{
			"401, then nothing any more", self(), brief(),
			both(fails(setPath, kubetest.Unauthorized, 1), fails(setPath, kubetest.Hang, ever)),
			false, NoAnswer, "not confirmed",
		},
		{
			"401 by a page of something else", self(), brief(), fails(setPath, kubetest.UnauthorizedPage, ever),
			false, NoAnswer, "answer not understood (401)",
		},
		{
			"403 for the DaemonSet, pod readable for as long as there is time", self(), brief(), fails(setPath, kubetest.Forbidden, ever),
			false, NeverAllowed, "forbidden (403)",
		},
		{
			"403 for the DaemonSet, pod readable at first", self(), patient(),
			both(fails(setPath, kubetest.Forbidden, ever), func(t *testing.T, s *kubetest.Server) {
				t.Helper()
				go func() {
					for !slices.ContainsFunc(s.Requests(), func(r string) bool { return strings.Contains(r, podPath) }) {
						if t.Context().Err() != nil {
							return
						}
						time.Sleep(time.Millisecond)
					}
					s.FailOn(podPath, kubetest.Forbidden, ever)
				}()
			}),
			true, PermissionsGone, "forbidden (403)",
		},
		{
			"403 for the DaemonSet, 403 for the pod", self(), patient(),
			both(fails(setPath, kubetest.Forbidden, ever), fails(podPath, kubetest.Forbidden, ever)),
			true, PermissionsGone, "forbidden (403)",
		},
		{
			"403 for the DaemonSet, 401 for the pod", self(), patient(),
			both(fails(setPath, kubetest.Forbidden, ever), fails(podPath, kubetest.Unauthorized, ever)),
			true, PermissionsGone, "unauthorized (401)",
		},
		{
			"403 for the DaemonSet, 404 for the pod", self(), patient(), both(fails(setPath, kubetest.Forbidden, ever),
				func(_ *testing.T, s *kubetest.Server) { s.Delete(podPath) }), true, PermissionsGone, "not found (404)",
		},
		{
			"403 for the DaemonSet, no answer for the pod", self(), brief(),
			both(fails(setPath, kubetest.Forbidden, ever), fails(podPath, kubetest.Hang, ever)), false, NoAnswer, "",
		},
		{
			"403 for the DaemonSet, a page for the pod", self(), brief(),
			both(fails(setPath, kubetest.Forbidden, ever), fails(podPath, kubetest.ForbiddenPage, ever)), false, NoAnswer, "",
		},
		{"403 twice, pod not known", nameless(), patient(), fails(setPath, kubetest.Forbidden, 2), true, PermissionsGone, ""},
		{
			"403, then 200, pod not known", nameless(), patient(),
			fails(setPath, kubetest.Forbidden, 1), false, DaemonSetPresent, "",
		},
		{
			"403 by a page of something else, pod not known", nameless(), brief(),
			fails(setPath, kubetest.ForbiddenPage, ever), false, NoAnswer, "",
		},
	}
}

func unansweredRows() []row {
	return []row{
		{"404 by a page of something else", self(), brief(), fails(setPath, kubetest.NotFoundPage, ever), false, NoAnswer, ""},
		{"404 about the path", self(), patient(), fails(setPath, kubetest.UnknownPath, ever), false, NoAnswer, "rejected (404)"},
		{"200 with something else", self(), brief(), fails(setPath, kubetest.Garbage, ever), false, NoAnswer, ""},
		{"200 with a Status", self(), brief(), fails(setPath, kubetest.WrongKind, ever), false, NoAnswer, ""},
		{"a redirect", self(), patient(), fails(setPath, kubetest.Redirect, ever), false, NoAnswer, "rejected (302)"},
		{"500 always", self(), brief(), fails(setPath, kubetest.ServerError, ever), false, NoAnswer, "server error (500)"},
		{"500, then 200", self(), patient(), fails(setPath, kubetest.ServerError, 3), false, DaemonSetPresent, ""},
		{
			"500, then 404", self(), patient(), both(fails(setPath, kubetest.ServerError, 1),
				func(_ *testing.T, s *kubetest.Server) { s.Delete(setPath) }), true, DaemonSetGone, "",
		},
		{"503 always", self(), brief(), fails(setPath, kubetest.Unavailable, ever), false, NoAnswer, "server error (503)"},
		{
			"429 for longer than there is time", self(), brief(), fails(setPath, kubetest.TooMany, ever),
			false, NoAnswer, "too many requests (429)",
		},
		{"no answer ever", self(), brief(), fails(setPath, kubetest.Hang, ever), false, NoAnswer, "no answer in time"},
		{
			"no answer, then 404", self(), impatientOnce(), both(fails(setPath, kubetest.Hang, 1),
				func(_ *testing.T, s *kubetest.Server) { s.Delete(setPath) }), true, DaemonSetGone, "",
		},
		{"half an answer and then nothing", self(), brief(), fails(setPath, kubetest.HangMidBody, ever), false, NoAnswer, ""},
		{"closed in the middle of the answer", self(), brief(), fails(setPath, kubetest.Truncated, ever), false, NoAnswer, ""},
		{
			"closed in the middle of the answer, then 200", self(), patient(), fails(setPath, kubetest.Truncated, 1),
			false, DaemonSetPresent, "",
		},
		{"reset", self(), brief(), fails(setPath, kubetest.Reset, ever), false, NoAnswer, ""},
		{
			"nobody listens", self(), brief(), func(_ *testing.T, s *kubetest.Server) { s.Stop() },
			false, NoAnswer, "connection refused",
		},
		{
			"another authority", self(), brief(),
			func(_ *testing.T, s *kubetest.Server) { s.Fail(kubetest.UnknownCA, ever) }, false, NoAnswer, "unknown authority",
		},
		{"no namespace", Self{DaemonSet: "istio-cni-node"}, patient(), nil, false, NobodyToAsk, ""},
		{"no DaemonSet", Self{Namespace: "istio-system"}, patient(), nil, false, NobodyToAsk, ""},
	}
}

func TestDecide(t *testing.T) {
	rows := append(presentRows(), refusedRows()...)
	for _, r := range append(rows, unansweredRows()...) {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			server := newServer(t)
			api := newAPI(t, server)
			if r.given != nil {
				r.given(t, server)
			}
			got := Decide(t.Context(), api, r.self, Auto, r.budget)
			if got.Uninstall != r.uninstall || got.Reason != r.reason || !strings.Contains(got.Detail, r.detail) {
				t.Errorf("got %+v, want uninstall %v because %q with %q", got, r.uninstall, r.reason, r.detail)
			}
			if r.reason == NobodyToAsk && len(server.Requests()) > 0 {
				t.Errorf("asked %q although there was nothing to ask about", server.Requests())
			}
		})
	}
}

func TestDecideUsesATokenThatWasRotatedBetweenTwoTries(t *testing.T) {
	server := newServer(t)
	token, authority := server.ServiceAccount(t)
	server.SetToken("the-new-one")
	host, port := server.Address()
	api, err := kube.NewAPI(kube.Access{
		Server: kube.Address{Host: host, Port: port}, TokenFile: token, CAFile: authority, Now: time.Now,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(api.Close)
	q := question{self: self(), budget: patient(), server: rotating{api, func() { kubetest.Write(t, token, "the-new-one") }}}
	if got := q.decide(t.Context()); got != (Verdict{Reason: DaemonSetPresent}) {
		t.Errorf("got %+v, want to keep", got)
	}
}

// rotating does something after the first answer about a DaemonSet.
type rotating struct {
	server
	then func()
}

func (r rotating) DaemonSet(ctx context.Context, namespace, name string) (kube.DaemonSet, error) {
	defer r.then()
	return r.server.DaemonSet(ctx, namespace, name)
}

func TestDecideByPolicyAsksNobody(t *testing.T) {
	server := newServer(t)
	api := newAPI(t, server)
	if got, want := Decide(t.Context(), api, self(), Always, patient()), (Verdict{true, PolicyAlways, ""}); got != want {
		t.Errorf("always: got %+v, want %+v", got, want)
	}
	server.Delete(setPath)
	if got, want := Decide(t.Context(), api, self(), Never, patient()), (Verdict{false, PolicyNever, ""}); got != want {
		t.Errorf("never: got %+v, want %+v", got, want)
	}
	if got, want := Decide(t.Context(), nil, self(), Auto, patient()), (Verdict{false, NobodyToAsk, ""}); got != want {
		t.Errorf("auto without an API: got %+v, want %+v", got, want)
	}
	if requests := server.Requests(); len(requests) > 0 {
		t.Errorf("asked %q", requests)
	}
}

func TestDecideKeepsWhenItsContextHasEnded(t *testing.T) {
	server := newServer(t)
	server.Delete(setPath)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if got := Decide(ctx, newAPI(t, server), self(), Auto, patient()); got.Uninstall || got.Reason != NoAnswer {
		t.Errorf("got %+v, want to keep", got)
	}
}

// scripted answers each question as its functions say.
type scripted struct {
	set  func(context.Context) error
	node func(context.Context) error
}

func (s scripted) DaemonSet(ctx context.Context, _, _ string) (kube.DaemonSet, error) {
	return kube.DaemonSet{}, s.set(ctx)
}

func (s scripted) Node(ctx context.Context, _ string) (kube.Node, error) {
	return kube.Node{}, s.node(ctx)
}

func (s scripted) PodOf(ctx context.Context, _, _ string) (kube.PodState, error) {
	return kube.PodState{}, s.set(ctx)
}

func hangs(ctx context.Context) error {
	<-ctx.Done()
	return &kube.CallError{Class: kube.Timeout, Err: ctx.Err()}
}

func TestDecideEndsWithinItsDefaultBudget(t *testing.T) {
	class := func(c kube.Class) func(context.Context) error {
		return func(context.Context) error { return &kube.CallError{Class: c} }
	}
	for name, s := range map[string]scripted{
		"against a server that hangs":                {hangs, hangs},
		"against a server that hangs about the node": {func(context.Context) error { return nil }, hangs},
		"against a server that fails at once":        {class(kube.ServerError), hangs},
		"against a server that wants a minute's rest": {func(context.Context) error {
			return &kube.CallError{Class: kube.TooManyRequests, RetryAfter: time.Minute}
		}, hangs},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				q := question{server: s, self: self(), budget: Budget{}.withDefaults()}
				if got := q.decide(t.Context()); got.Uninstall {
					t.Errorf("got %+v, want to keep", got)
				}
				if took := time.Since(start); took > 5*time.Second {
					t.Errorf("took %v, want at most 5s", took)
				}
			})
		})
	}
}

func TestDecideConfirmsARefusalAfterAMoment(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var asked []time.Duration
		q := question{self: self(), budget: Budget{}.withDefaults(), server: scripted{set: func(context.Context) error {
			asked = append(asked, time.Since(start))
			return &kube.CallError{Class: kube.Unauthorized}
		}}}
		if got := q.decide(t.Context()); !got.Uninstall || got.Reason != AccountGone {
			t.Errorf("got %+v, want to uninstall", got)
		}
		if len(asked) != 2 || asked[1] != time.Second {
			t.Errorf("asked at %v, want at 0s and 1s", asked)
		}
	})
}

func TestDecideTakesNoSingleRefusalForAnAnswerWhenTimeIsUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		q := question{self: self(), budget: Budget{Attempt: time.Hour}.withDefaults(), server: scripted{set: func(ctx context.Context) error {
			if asked++; asked == 1 {
				return &kube.CallError{Class: kube.Unauthorized}
			}
			return hangs(ctx)
		}}}
		if got := q.decide(t.Context()); got.Uninstall || got.Reason != NoAnswer {
			t.Errorf("got %+v, want to keep", got)
		}
		if asked != 2 {
			t.Errorf("asked %d times, want 2", asked)
		}
	})
}

func TestDecideTakesNoStrangeErrorForAnAnswer(t *testing.T) {
	q := question{self: self(), budget: patient(), server: scripted{set: func(context.Context) error { return errors.New("odd") }}}
	if got, want := q.decide(t.Context()), (Verdict{false, NoAnswer, "odd"}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}
