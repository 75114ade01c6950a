package departure

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
)

const (
	setPath    = "/apis/apps/v1/namespaces/istio-system/daemonsets/istio-cni-node"
	podPath    = "/api/v1/namespaces/istio-system/pods/istio-cni-node-x7"
	nodePath   = "/api/v1/nodes/node-1"
	canaryPath = setPath + "-canary"
)

func self() Self {
	return Self{Namespace: "istio-system", DaemonSet: "istio-cni-node", NodeName: "node-1", PodName: "istio-cni-node-x7"}
}

func nameless() Self {
	s := self()
	s.PodName = ""
	return s
}

func newAPI(t *testing.T, server *kubetest.Server) *kube.Client {
	t.Helper()
	token, authority := server.ServiceAccount(t)
	host, port := server.Address()
	api, err := kube.NewClient(kube.Config{
		Server: kube.Address{Host: host, Port: port}, TokenFile: token, CAFile: authority,
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
	server.Set(ownPod(t, "istio-cni-node"))
	return server
}

// A cluster gives the answers of an API server without a connection, so that waiting is by a test's fake clock. What it
// answers is what the client makes of a real connection to a [kubetest.Server]: each answer and each failure is recorded
// once, before the clock starts.
type cluster struct {
	*kubetest.Server

	planned  []*plan
	healthy  map[string]answer
	failures map[string]map[kubetest.Fault]error
	asked    []string
}

// A plan is what the next requests for a path get.
type plan struct {
	path  string
	fault kubetest.Fault // empty is the answer of a healthy server
	times int
}

type answer struct {
	set  kube.DaemonSet
	node kube.Node
	pod  kube.Pod
	err  error
}

// FailOn plans a failure of the next requests for a path, after those that were planned before.
func (c *cluster) FailOn(path string, fault kubetest.Fault, times int) {
	c.planned = append(c.planned, &plan{path, fault, times})
}

// record asks over a real connection.
func (c *cluster) record(t *testing.T) {
	t.Helper()
	api := newAPI(t, c.Server)
	for _, path := range []string{setPath, canaryPath, podPath, nodePath} {
		c.healthy[path] = fetch(t.Context(), api, path)
	}
	for _, p := range c.planned {
		if p.fault == "" || hangs(p.fault) {
			continue
		}
		c.Server.FailOn(p.path, p.fault, 1)
		failed := fetch(t.Context(), api, p.path)
		if failed.err == nil {
			t.Fatalf("fault %q on %s: no error", p.fault, p.path)
		}
		if c.failures[p.path] == nil {
			c.failures[p.path] = map[kubetest.Fault]error{}
		}
		c.failures[p.path][p.fault] = failed.err
	}
}

func hangs(fault kubetest.Fault) bool { return fault == kubetest.Hang || fault == kubetest.HangMidBody }

func fetch(ctx context.Context, api *kube.Client, path string) (a answer) {
	switch path {
	case setPath:
		a.set, a.err = api.DaemonSet(ctx, "istio-system", "istio-cni-node")
	case canaryPath:
		a.set, a.err = api.DaemonSet(ctx, "istio-system", "istio-cni-node-canary")
	case podPath:
		a.pod, a.err = api.Pod(ctx, kube.PodKey{Namespace: "istio-system", Name: "istio-cni-node-x7"})
	case nodePath:
		a.node, a.err = api.Node(ctx, "node-1")
	}
	return a
}

func (c *cluster) reply(ctx context.Context, path string) answer {
	c.asked = append(c.asked, path)
	if ctx.Err() != nil {
		return answer{err: &kube.Error{Class: kube.Canceled, Err: ctx.Err()}}
	}
	for _, p := range c.planned {
		if p.path != path || p.times <= 0 {
			continue
		}
		p.times--
		switch {
		case p.fault == "":
			return c.healthy[path]
		case hangs(p.fault):
			return answer{err: hang(ctx)}
		}
		return answer{err: c.failures[path][p.fault]}
	}
	return c.healthy[path]
}

func (c *cluster) DaemonSet(ctx context.Context, namespace, name string) (kube.DaemonSet, error) {
	a := c.reply(ctx, "/apis/apps/v1/namespaces/"+namespace+"/daemonsets/"+name)
	return a.set, a.err
}

func (c *cluster) Node(ctx context.Context, name string) (kube.Node, error) {
	a := c.reply(ctx, "/api/v1/nodes/"+name)
	return a.node, a.err
}

func (c *cluster) Pod(ctx context.Context, key kube.PodKey) (kube.Pod, error) {
	a := c.reply(ctx, "/api/v1/namespaces/"+key.Namespace+"/pods/"+key.Name)
	return a.pod, a.err
}

// decided is the verdict within the default budget of a fake clock, which it must keep.
func decided(t *testing.T, who Self, given ...state) (v Verdict) {
	t.Helper()
	c := &cluster{Server: newServer(t), healthy: map[string]answer{}, failures: map[string]map[kubetest.Fault]error{}}
	for _, step := range given {
		if step != nil {
			step(t, c)
		}
	}
	c.record(t)
	synctest.Test(t, func(t *testing.T) {
		budget, start := Budget{}.withDefaults(), time.Now()
		v = (&question{server: c, self: who, budget: budget}).decide(t.Context())
		if took := time.Since(start); took > budget.Total {
			t.Errorf("took %v, want at most %v; asked %q", took, budget.Total, c.asked)
		}
	})
	return v
}

// A state changes what a cluster answers.
type state func(*testing.T, *cluster)

func deleting(t *testing.T, object []byte) []byte {
	t.Helper()
	return changed(t, object, "deletionTimestamp", "2026-01-01T00:00:00Z")
}

// changed is an object with one field of its metadata changed.
func changed(t *testing.T, object []byte, field string, value any) []byte {
	t.Helper()
	var whole map[string]any
	if err := json.Unmarshal(object, &whole); err != nil {
		t.Fatal(err)
	}
	whole["metadata"].(map[string]any)[field] = value
	text, err := json.Marshal(whole)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

type row struct {
	name      string
	self      Self
	given     state
	uninstall bool
	reason    Reason
	detail    string // a part of it
}

// ownPod is the agent's pod, of a DaemonSet.
func ownPod(t *testing.T, set string) []byte {
	t.Helper()
	return changed(t, kubetest.Pod{Namespace: "istio-system", Name: "istio-cni-node-x7"}.JSON(t), "ownerReferences", []any{
		map[string]any{"kind": "DaemonSet", "apiVersion": "apps/v1", "name": set, "controller": true},
	})
}

// byAnother makes our pod one of a DaemonSet that is not the configured one.
func byAnother(t *testing.T, c *cluster) {
	t.Helper()
	c.Delete(setPath)
	c.Set(ownPod(t, "istio-cni-node-canary"))
}

func canary(_ *testing.T, c *cluster) {
	c.Set(kubetest.DaemonSet("istio-system", "istio-cni-node-canary", ""))
}

// elsewhere makes the DaemonSet one for nodes that ours is not.
func elsewhere(_ *testing.T, c *cluster) {
	c.Set(kubetest.DaemonSet("istio-system", "istio-cni-node", `{"nodeSelector": {"mesh": "yes"}}`))
}

func deleted(path string) state {
	return func(_ *testing.T, c *cluster) { c.Delete(path) }
}

// leaving makes the DaemonSet one that is being deleted.
func leaving(t *testing.T, c *cluster) {
	t.Helper()
	c.Set(deleting(t, kubetest.DaemonSet("istio-system", "istio-cni-node", "")))
}

func taints(list string) state {
	return func(_ *testing.T, c *cluster) {
		c.Set(kubetest.Node("node-1", map[string]string{"kubernetes.io/os": "linux"}, list))
	}
}

func fails(path string, fault kubetest.Fault, times int) state {
	return func(_ *testing.T, c *cluster) { c.FailOn(path, fault, times) }
}

func both(steps ...state) state {
	return func(t *testing.T, c *cluster) {
		t.Helper()
		for _, step := range steps {
			step(t, c)
		}
	}
}

const ever = kubetest.Forever

func presentRows() []row {
	return []row{
		{"the DaemonSet is there", self(), nil, false, DaemonSetPresent, ""},
		{
			"the DaemonSet was deleted", self(),
			deleted(setPath), true, DaemonSetGone, "not found (404)",
		},
		{
			"the DaemonSet has another name, which the pod knows", self(),
			both(byAnother, canary),
			false, DaemonSetPresent, "",
		},
		{"the DaemonSet of another name was deleted, too", self(), byAnother, true, DaemonSetGone, "not found (404)"},
		{
			"the DaemonSet has another name, and nobody answers for it", self(),
			both(byAnother, fails(canaryPath, kubetest.Hang, ever)), false, NoAnswer, "",
		},
		{"the DaemonSet is being deleted", self(), leaving, true, DaemonSetLeaving, ""},
		{
			"the DaemonSet is for other nodes", self(),
			elsewhere, true, NodeNotMeant, "mesh=yes",
		},
		{
			"the node was tainted against it", self(), taints(`[{"key": "gone", "effect": "NoExecute"}]`), true, NodeNotMeant, "gone=:NoExecute",
		},
		{
			"the node is cordoned", self(), taints(`[{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]`), false, DaemonSetPresent, "",
		},
		{
			"the node is not ready", self(), taints(`[{"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}]`), false, DaemonSetPresent, "",
		},
		{
			"for other nodes, but the node may not be read", self(),
			both(elsewhere, fails(nodePath, kubetest.Forbidden, ever)),
			false, DaemonSetPresent, "forbidden (403)",
		},
		{
			"for other nodes, but the node is not known", self(),
			both(elsewhere, deleted(nodePath)),
			false, DaemonSetPresent, "not found (404)",
		},
		{
			"for other nodes, but the node is never answered for", self(),
			both(elsewhere, fails(nodePath, kubetest.Hang, ever)),
			false, DaemonSetPresent, "no answer in time",
		},
		{
			"for other nodes, and the node is answered for in the end", self(),
			both(elsewhere, fails(nodePath, kubetest.ServerError, 2)), true, NodeNotMeant, "",
		},
		{
			"for other nodes, but our node is not known to us",
			Self{Namespace: "istio-system", DaemonSet: "istio-cni-node"},
			elsewhere, false, DaemonSetPresent, "",
		},
	}
}

func refusedRows() []row {
	return []row{
		{"401 twice", self(), fails(setPath, kubetest.Unauthorized, 2), true, AccountGone, "unauthorized (401)"},
		{"401, then 200", self(), fails(setPath, kubetest.Unauthorized, 1), false, DaemonSetPresent, ""},
		{
			"401, then 404", self(), both(
				fails(setPath, kubetest.Unauthorized, 1),
				deleted(setPath),
			), true, DaemonSetGone, "",
		},
		{
			"401, 500, then 401", self(), both(fails(setPath, kubetest.Unauthorized, 1),
				fails(setPath, kubetest.ServerError, 1), fails(setPath, kubetest.Unauthorized, 1)), true, AccountGone, "",
		},
		{
			"401, then nothing any more", self(),
			both(fails(setPath, kubetest.Unauthorized, 1), fails(setPath, kubetest.Hang, ever)),
			false, NoAnswer, "not confirmed",
		},
		{
			"401 by a page of something else", self(), fails(setPath, kubetest.UnauthorizedPage, ever),
			false, NoAnswer, "answer not understood (401)",
		},
		{
			"403 for the DaemonSet, pod readable for as long as there is time", self(), fails(setPath, kubetest.Forbidden, ever),
			false, NeverAllowed, "forbidden (403)",
		},
		{
			"403 for the DaemonSet, pod readable at first", self(),
			both(fails(setPath, kubetest.Forbidden, ever), fails(podPath, "", 3), fails(podPath, kubetest.Forbidden, ever)),
			true, PermissionsGone, "forbidden (403)",
		},
		{
			"403 for the DaemonSet, 403 for the pod", self(),
			both(fails(setPath, kubetest.Forbidden, ever), fails(podPath, kubetest.Forbidden, ever)),
			true, PermissionsGone, "forbidden (403)",
		},
		{
			"403 for the DaemonSet, 401 for the pod", self(),
			both(fails(setPath, kubetest.Forbidden, ever), fails(podPath, kubetest.Unauthorized, ever)),
			true, PermissionsGone, "unauthorized (401)",
		},
		{
			"403 for the DaemonSet, 404 for the pod", self(), both(fails(setPath, kubetest.Forbidden, ever),
				deleted(podPath)), true, PermissionsGone, "not found (404)",
		},
		{
			"403 for the DaemonSet, no answer for the pod", self(),
			both(fails(setPath, kubetest.Forbidden, ever), fails(podPath, kubetest.Hang, ever)), false, NoAnswer, "",
		},
		{
			"403 for the DaemonSet, a page for the pod", self(),
			both(fails(setPath, kubetest.Forbidden, ever), fails(podPath, kubetest.ForbiddenPage, ever)), false, NoAnswer, "",
		},
		{"403 twice, pod not known", nameless(), fails(setPath, kubetest.Forbidden, 2), true, PermissionsGone, ""},
		{
			"403, then 200, pod not known", nameless(),
			fails(setPath, kubetest.Forbidden, 1), false, DaemonSetPresent, "",
		},
		{
			"403 by a page of something else, pod not known", nameless(),
			fails(setPath, kubetest.ForbiddenPage, ever), false, NoAnswer, "",
		},
	}
}

func unansweredRows() []row {
	return []row{
		{"404 by a page of something else", self(), fails(setPath, kubetest.NotFoundPage, ever), false, NoAnswer, ""},
		{"404 about the path", self(), fails(setPath, kubetest.UnknownPath, ever), false, NoAnswer, "rejected (404)"},
		{"200 with something else", self(), fails(setPath, kubetest.Garbage, ever), false, NoAnswer, ""},
		{"200 with a Status", self(), fails(setPath, kubetest.WrongKind, ever), false, NoAnswer, ""},
		{"a redirect", self(), fails(setPath, kubetest.Redirect, ever), false, NoAnswer, "rejected (302)"},
		{"500 always", self(), fails(setPath, kubetest.ServerError, ever), false, NoAnswer, "server error (500)"},
		{"500, then 200", self(), fails(setPath, kubetest.ServerError, 3), false, DaemonSetPresent, ""},
		{
			"500, then 404", self(), both(fails(setPath, kubetest.ServerError, 1),
				deleted(setPath)), true, DaemonSetGone, "",
		},
		{"503 always", self(), fails(setPath, kubetest.Unavailable, ever), false, NoAnswer, "server error (503)"},
		{
			"429 for longer than there is time", self(), fails(setPath, kubetest.TooMany, ever),
			false, NoAnswer, "too many requests (429)",
		},
		{"no answer ever", self(), fails(setPath, kubetest.Hang, ever), false, NoAnswer, "no answer in time"},
		{
			"no answer, then 404", self(), both(fails(setPath, kubetest.Hang, 1),
				deleted(setPath)), true, DaemonSetGone, "",
		},
		{"half an answer and then nothing", self(), fails(setPath, kubetest.HangMidBody, ever), false, NoAnswer, ""},
		{"closed in the middle of the answer", self(), fails(setPath, kubetest.Truncated, ever), false, NoAnswer, ""},
		{
			"closed in the middle of the answer, then 200", self(), fails(setPath, kubetest.Truncated, 1),
			false, DaemonSetPresent, "",
		},
		{"reset", self(), fails(setPath, kubetest.Reset, ever), false, NoAnswer, ""},
		{
			"nobody listens", self(), func(_ *testing.T, c *cluster) { c.Stop() },
			false, NoAnswer, "connection refused",
		},
		{
			"another authority", self(),
			func(_ *testing.T, c *cluster) { c.Fail(kubetest.UnknownCA, ever) }, false, NoAnswer, "unknown authority",
		},
	}
}

func TestDecide(t *testing.T) {
	t.Parallel()
	rows := append(presentRows(), refusedRows()...)
	for _, r := range append(rows, unansweredRows()...) {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			got := decided(t, r.self, r.given)
			if got.Uninstall != r.uninstall || got.Reason != r.reason || !strings.Contains(got.Detail, r.detail) {
				t.Errorf("got %+v, want uninstall %v because %q with %q", got, r.uninstall, r.reason, r.detail)
			}
		})
	}
}

// TestDecideUninstallsOnlyByAnswers has each kind of answer to each request in each situation in which it is made. Only
// what the API server itself says about the very object is a reason to uninstall.
func TestDecideUninstallsOnlyByAnswers(t *testing.T) {
	t.Parallel()
	object := map[string]kubetest.Fault{
		"404": kubetest.NotFound, "404 by a page": kubetest.NotFoundPage, "404 of the path": kubetest.UnknownPath,
		"401": kubetest.Unauthorized, "401 by a page": kubetest.UnauthorizedPage, "403": kubetest.Forbidden,
		"403 by a page": kubetest.ForbiddenPage, "429": kubetest.TooMany, "500": kubetest.ServerError, "503": kubetest.Unavailable,
		"hangs": kubetest.Hang, "hangs in the body": kubetest.HangMidBody, "reset": kubetest.Reset,
		"reset in the body": kubetest.ResetMidBody, "redirect": kubetest.Redirect, "garbage": kubetest.Garbage,
		"wrong kind": kubetest.WrongKind, "empty": kubetest.EmptyBody,
	}
	for _, situation := range []struct {
		name  string
		given state
		path  string
		// uninstall are the answers that uninstall; healthy is the verdict by a good one.
		uninstall []string
		healthy   bool
	}{
		{"the DaemonSet", nil, setPath, []string{"404", "401"}, false},
		{"the DaemonSet, no pod known to it", deleted(podPath), setPath, []string{"404", "401", "403"}, false},
		{"the pod, after a 404", deleted(setPath), podPath, []string{"404", "401", "403"}, true},
		{
			"the pod, after a 403", fails(setPath, kubetest.Forbidden, ever), podPath,
			[]string{"404", "401", "403"},
			false,
		},
		{"the pod's own DaemonSet, after a 404", both(byAnother, canary), canaryPath, []string{"404"}, false},
		{"the node, of a DaemonSet for others", elsewhere, nodePath, nil, true},
		{"the node, of a DaemonSet that is being deleted", leaving, nodePath, slices.Collect(maps.Keys(object)), true},
	} {
		for name, fault := range object {
			t.Run(situation.name+"/"+name, func(t *testing.T) {
				t.Parallel()
				got := decided(t, self(), situation.given, fails(situation.path, fault, ever))
				if want := slices.Contains(situation.uninstall, name); got.Uninstall != want {
					t.Errorf("got %+v, want uninstall %v", got, want)
				}
			})
		}
		t.Run(situation.name+"/200", func(t *testing.T) {
			t.Parallel()
			if got := decided(t, self(), situation.given); got.Uninstall != situation.healthy {
				t.Errorf("got %+v, want uninstall %v", got, situation.healthy)
			}
		})
		// An API server that stops to answer after it answered once.
		for _, once := range []kubetest.Fault{kubetest.Unauthorized, kubetest.Forbidden} {
			if situation.path == setPath && once == kubetest.Forbidden || situation.name == "the pod, after a 403" && once == kubetest.Forbidden {
				continue // the pod decides then; or it is the second 403
			}
			t.Run(situation.name+"/"+string(once)+", then nothing", func(t *testing.T) {
				t.Parallel()
				got := decided(t, self(), situation.given, fails(situation.path, once, 1), fails(situation.path, kubetest.Hang, ever))
				if want := strings.Contains(situation.name, "being deleted"); got.Uninstall != want {
					t.Errorf("got %+v, want uninstall %v", got, want)
				}
			})
		}
	}
}

// TestDecideAboutAnObjectOfAnotherUID has a DaemonSet, a pod and a node that were deleted and made again.
func TestDecideAboutAnObjectOfAnotherUID(t *testing.T) {
	t.Parallel()
	again := func(object []byte) state {
		return func(t *testing.T, c *cluster) {
			t.Helper()
			c.Set(changed(t, object, "uid", kubetest.OtherUID))
		}
	}
	set := kubetest.DaemonSet("istio-system", "istio-cni-node", "")
	for name, tc := range map[string]struct {
		given     state
		uninstall bool
	}{
		"DaemonSet":                   {both(deleted(setPath), again(set)), false},
		"DaemonSet, deleted again":    {both(deleted(setPath), again(deleting(t, set))), true},
		"pod":                         {both(deleted(podPath), again(ownPod(t, "istio-cni-node"))), false},
		"pod, no DaemonSet":           {both(deleted(setPath), deleted(podPath), again(ownPod(t, "istio-cni-node"))), true},
		"pod, of another DaemonSet":   {both(deleted(setPath), canary, deleted(podPath), again(ownPod(t, "istio-cni-node-canary"))), false},
		"node":                        {both(deleted(nodePath), again(kubetest.Node("node-1", map[string]string{"kubernetes.io/os": "linux"}, ""))), false},
		"node, not for the DaemonSet": {both(deleted(nodePath), again(kubetest.Node("node-1", nil, ""))), true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := decided(t, self(), tc.given); got.Uninstall != tc.uninstall {
				t.Errorf("got %+v, want uninstall %v", got, tc.uninstall)
			}
		})
	}
}

// quick has pauses that nobody notices, and time for every answer of a real connection.
func quick() Budget {
	return Budget{Total: 5 * time.Minute, Attempt: time.Minute, Pause: time.Millisecond, Confirm: time.Millisecond}
}

// TestDecideAsksTheAPIServer is over a real connection.
func TestDecideAsksTheAPIServer(t *testing.T) {
	t.Parallel()
	server := newServer(t)
	api := newAPI(t, server)
	if got := Decide(t.Context(), api, self(), Auto, quick()); got != (Verdict{Reason: DaemonSetPresent}) {
		t.Errorf("got %+v, want to keep", got)
	}
	server.Delete(setPath)
	if got := Decide(t.Context(), api, self(), Auto, quick()); !got.Uninstall || got.Reason != DaemonSetGone {
		t.Errorf("got %+v, want to uninstall", got)
	}
	asked := len(server.Requests())
	for _, who := range []Self{{DaemonSet: "istio-cni-node"}, {Namespace: "istio-system"}} {
		if got := Decide(t.Context(), api, who, Auto, quick()); got != (Verdict{Reason: NobodyToAsk}) {
			t.Errorf("%+v: got %+v, want to keep", who, got)
		}
	}
	if more := server.Requests()[asked:]; len(more) > 0 {
		t.Errorf("asked %q although there was nothing to ask about", more)
	}
}

func TestDecideUsesATokenThatWasRotatedBetweenTwoTries(t *testing.T) {
	server := newServer(t)
	token, authority := server.ServiceAccount(t)
	server.SetToken("the-new-one")
	host, port := server.Address()
	api, err := kube.NewClient(kube.Config{
		Server: kube.Address{Host: host, Port: port}, TokenFile: token, CAFile: authority,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(api.Close)
	q := question{self: self(), budget: quick(), server: rotating{api, func() { kubetest.Write(t, token, "the-new-one") }}}
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
	if got, want := Decide(t.Context(), api, self(), Always, quick()), (Verdict{true, PolicyAlways, ""}); got != want {
		t.Errorf("always: got %+v, want %+v", got, want)
	}
	server.Delete(setPath)
	if got, want := Decide(t.Context(), api, self(), Never, quick()), (Verdict{false, PolicyNever, ""}); got != want {
		t.Errorf("never: got %+v, want %+v", got, want)
	}
	if got, want := Decide(t.Context(), nil, self(), Auto, quick()), (Verdict{false, NobodyToAsk, ""}); got != want {
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
	if got := Decide(ctx, newAPI(t, server), self(), Auto, quick()); got.Uninstall || got.Reason != NoAnswer {
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

func (s scripted) Pod(ctx context.Context, _ kube.PodKey) (kube.Pod, error) {
	return kube.Pod{}, s.set(ctx)
}

// hang is what the client says of a server that does not answer.
func hang(ctx context.Context) error {
	<-ctx.Done()
	return &kube.Error{Class: kube.Timeout, Err: ctx.Err()}
}

func TestDecideEndsWithinItsDefaultBudget(t *testing.T) {
	class := func(c kube.Class) func(context.Context) error {
		return func(context.Context) error { return &kube.Error{Class: c} }
	}
	for name, s := range map[string]scripted{
		"against a server that hangs":                {hang, hang},
		"against a server that hangs about the node": {func(context.Context) error { return nil }, hang},
		"against a server that fails at once":        {class(kube.ServerError), hang},
		"against a server that wants a minute's rest": {func(context.Context) error {
			return &kube.Error{Class: kube.TooManyRequests, RetryAfter: time.Minute}
		}, hang},
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
			return &kube.Error{Class: kube.Unauthorized}
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
				return &kube.Error{Class: kube.Unauthorized}
			}
			return hang(ctx)
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
	q := question{self: self(), budget: quick(), server: scripted{set: func(context.Context) error { return errors.New("odd") }}}
	if got, want := q.decide(t.Context()), (Verdict{false, NoAnswer, "odd"}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}
