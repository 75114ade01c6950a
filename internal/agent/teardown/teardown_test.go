package teardown

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func self() Self {
	return Self{Namespace: "istio-system", DaemonSet: "agent", NodeName: "node-1", PodName: "agent-x7"}
}

// Objects of the API server, by kind and name.
const (
	set    = "DaemonSet agent"
	canary = "DaemonSet canary"
	pod    = "Pod agent-x7"
	node   = "Node node-1"
)

const forever = 1 << 30

// fixture is an API server in a test with a fake clock. A healthy fixture has the DaemonSet, its pod and the node.
type fixture struct {
	sets     map[string]*kube.DaemonSet
	pods     map[string]kube.Pod
	nodes    map[string]*kube.Node
	faults   []*fault
	requests []time.Duration
	start    time.Time
}

// fault is the response to the next requests for an object, after earlier faults; without an error the response is healthy.
type fault struct {
	object string
	err    error
	times  int
}

// change prepares a fixture.
type change func(*fixture)

// errHang is a request without an answer.
var errHang = errors.New("hang")

// responds adds a fault.
func responds(object string, err error, times int) change {
	return func(c *fixture) { c.faults = append(c.faults, &fault{object, err, times}) }
}

func fails(object string, class kube.Class, times int) change {
	return responds(object, &kube.Error{Class: class, Err: errors.New("x")}, times)
}

func hangs(object string, times int) change { return responds(object, errHang, times) }

func answers(object string, times int) change { return responds(object, nil, times) }

func deleted(object string) change { return fails(object, kube.NotFound, forever) }

func all(changes ...change) change {
	return func(c *fixture) {
		for _, change := range changes {
			change(c)
		}
	}
}

// has adds or replaces a DaemonSet.
func has(name string, of *kube.DaemonSet) change {
	return func(c *fixture) { c.sets["DaemonSet "+name] = of }
}

// elsewhere restricts the DaemonSet to other nodes.
func elsewhere() change {
	of := &kube.DaemonSet{}
	of.Spec.Template.Spec.NodeSelector = map[string]string{"mesh": "yes"}
	return has("agent", of)
}

func tainted(key string, effect corev1.TaintEffect) change {
	return func(c *fixture) {
		c.nodes[node] = &kube.Node{Spec: corev1.NodeSpec{Taints: []corev1.Taint{{Key: key, Effect: effect}}}}
	}
}

// ofCanary makes another DaemonSet than the configured one, which does not exist, the owner of the agent's pod.
func ofCanary() change {
	return all(deleted(set), func(c *fixture) { c.pods[pod] = kube.Pod{DaemonSet: "canary"} })
}

func request[T any](ctx context.Context, c *fixture, object string, known map[string]T) (T, error) {
	c.requests = append(c.requests, time.Since(c.start))
	var none T
	if ctx.Err() != nil {
		return none, &kube.Error{Class: kube.Canceled, Err: ctx.Err()}
	}
	for _, f := range c.faults {
		if f.object != object || f.times == 0 {
			continue
		}
		f.times--
		if errors.Is(f.err, errHang) {
			<-ctx.Done()
			return none, &kube.Error{Class: kube.Timeout, Err: ctx.Err()}
		}
		if f.err != nil {
			return none, f.err
		}
		break
	}
	if found, ok := known[object]; ok {
		return found, nil
	}
	return none, &kube.Error{Class: kube.NotFound}
}

func (c *fixture) DaemonSet(ctx context.Context, _, name string) (*kube.DaemonSet, error) {
	return request(ctx, c, "DaemonSet "+name, c.sets)
}

func (c *fixture) Node(ctx context.Context, name string) (*kube.Node, error) {
	return request(ctx, c, "Node "+name, c.nodes)
}

func (c *fixture) Pod(ctx context.Context, key kube.PodRef) (kube.Pod, error) {
	return request(ctx, c, "Pod "+key.Name, c.pods)
}

// decide returns the verdict and the times of the requests, by a fake clock. It checks the promised time.
func decide(t *testing.T, of Self, changes ...change) (v Verdict, requests []time.Duration) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		c := &fixture{
			sets: map[string]*kube.DaemonSet{set: {}}, pods: map[string]kube.Pod{pod: {DaemonSet: "agent"}},
			nodes: map[string]*kube.Node{node: {}}, start: time.Now(),
		}
		all(changes...)(c)
		ctx, cancel := context.WithTimeout(t.Context(), Total)
		defer cancel()
		v = query{c, of}.decide(ctx)
		if took := time.Since(c.start); took > Total {
			t.Errorf("took %v, want at most %v; requests at %v", took, Total, c.requests)
		}
		requests = c.requests
	})
	return v, requests
}

func TestShouldUninstall(t *testing.T) {
	t.Parallel()
	nameless, homeless := self(), self()
	nameless.PodName, homeless.NodeName = "", ""
	leaving := has("agent", &kube.DaemonSet{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &metav1.Time{}}})
	for name, row := range map[string]struct {
		self      Self
		given     change
		uninstall bool
		reason    Reason
		detail    string
	}{
		"W-6 rollout, reboot":               {self(), all(), false, DaemonSetPresent, ""},
		"W-6 drain":                         {self(), tainted("node.kubernetes.io/unschedulable", "NoSchedule"), false, DaemonSetPresent, ""},
		"W-6 the node is not ready":         {self(), tainted("node.kubernetes.io/not-ready", "NoExecute"), false, DaemonSetPresent, ""},
		"W-6 removal":                       {self(), deleted(set), true, DaemonSetGone, "not found"},
		"W-6 no API server":                 {self(), fails(set, kube.Unreachable, forever), false, NoAnswer, "server unreachable"},
		"recreated":                         {self(), has("agent", &kube.DaemonSet{ObjectMeta: metav1.ObjectMeta{UID: "another"}}), false, DaemonSetPresent, ""},
		"another name, which the pod knows": {self(), all(ofCanary(), has("canary", &kube.DaemonSet{})), false, DaemonSetPresent, ""},
		"another name, deleted, too":        {self(), ofCanary(), true, DaemonSetGone, "not found"},
		"another name, no answer":           {self(), all(ofCanary(), hangs(canary, forever)), false, NoAnswer, ""},
		"being deleted":                     {self(), leaving, true, DaemonSetDeleting, ""},
		"W-33 for other nodes":              {self(), elsewhere(), true, NodeExcluded, "mesh=yes"},
		"W-33 tainted against it":           {self(), tainted("gone", "NoExecute"), true, NodeExcluded, "gone=:NoExecute"},
		"for other nodes, node forbidden":   {self(), all(elsewhere(), fails(node, kube.Forbidden, forever)), false, DaemonSetPresent, "forbidden"},
		"for other nodes, node in the end":  {self(), all(elsewhere(), fails(node, kube.ServerError, 2)), true, NodeExcluded, ""},
		"for other nodes, own node unknown": {homeless, elsewhere(), false, DaemonSetPresent, ""},
		"W-23 401 twice":                    {self(), fails(set, kube.Unauthorized, 2), true, AccountGone, "unauthorized"},
		"W-23 401, then 200":                {self(), fails(set, kube.Unauthorized, 1), false, DaemonSetPresent, ""},
		"401, then 404":                     {self(), all(fails(set, kube.Unauthorized, 1), deleted(set)), true, DaemonSetGone, ""},
		"401, 500, then 401":                {self(), all(fails(set, kube.Unauthorized, 1), fails(set, kube.ServerError, 1), fails(set, kube.Unauthorized, 1)), true, AccountGone, ""},
		"401, then nothing":                 {self(), all(fails(set, kube.Unauthorized, 1), hangs(set, forever)), false, NoAnswer, "not confirmed"},
		"W-23 403, pod readable":            {self(), fails(set, kube.Forbidden, forever), false, ReadForbidden, "forbidden"},
		"403, pod readable at first":        {self(), all(fails(set, kube.Forbidden, forever), answers(pod, 3), fails(pod, kube.Forbidden, forever)), true, PermissionsGone, "forbidden"},
		"W-23 403, and 403 for the pod":     {self(), all(fails(set, kube.Forbidden, forever), fails(pod, kube.Forbidden, forever)), true, PermissionsGone, "forbidden"},
		"403 twice, pod unknown":            {nameless, fails(set, kube.Forbidden, 2), true, PermissionsGone, ""},
		"403, then 200, pod unknown":        {nameless, fails(set, kube.Forbidden, 1), false, DaemonSetPresent, ""},
		"404, pod unknown":                  {nameless, deleted(set), true, DaemonSetGone, ""},
		"500 always":                        {self(), fails(set, kube.ServerError, forever), false, NoAnswer, "server error"},
		"500, then 200":                     {self(), fails(set, kube.ServerError, 3), false, DaemonSetPresent, ""},
		"an error of another type":          {self(), responds(set, errors.New("odd"), 1), false, NoAnswer, "odd"},
		"429 with a rest of a minute":       {self(), responds(set, &kube.Error{Class: kube.TooManyRequests, RetryAfter: time.Minute}, forever), false, NoAnswer, "too many requests"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, _ := decide(t, row.self, row.given)
			if got.Uninstall != row.uninstall || got.Reason != row.reason || !strings.Contains(got.Detail, row.detail) {
				t.Errorf("got %+v, want uninstall %v because %q with %q", got, row.uninstall, row.reason, row.detail)
			}
		})
	}
}

// TestDecide_OnlyAnswersUninstall tries each class of error for each request in each situation that sends it: forever, and
// once with silence after it. Only a response of the API server about this very object is a reason to uninstall.
func TestDecide_OnlyAnswersUninstall(t *testing.T) {
	t.Parallel()
	classes := []kube.Class{
		kube.NotFound, kube.Unauthorized, kube.Forbidden, kube.WrongPod, kube.TooManyRequests, kube.ServerError, kube.Timeout,
		kube.Unreachable, kube.ConnectionLost, kube.DNS, kube.Undecodable, kube.TLS, kube.Rejected, kube.TooLarge,
		kube.NoCredentials, kube.InvalidConfig,
	}
	refusals := []kube.Class{kube.NotFound, kube.Unauthorized, kube.Forbidden}
	for name, situation := range map[string]struct {
		given  change
		object string
		ever   []kube.Class // classes that uninstall if they persist
		once   []kube.Class // classes that uninstall if nothing follows
	}{
		"the DaemonSet":                          {all(), set, refusals[:2], refusals[:1]},
		"the DaemonSet, its pod is gone":         {deleted(pod), set, refusals, []kube.Class{kube.NotFound, kube.Forbidden}},
		"the pod, after a 404":                   {deleted(set), pod, refusals, refusals[:1]},
		"the pod, after a 403":                   {fails(set, kube.Forbidden, forever), pod, refusals, []kube.Class{kube.NotFound, kube.Forbidden}},
		"the pod's own DaemonSet, after a 404":   {all(ofCanary(), has("canary", &kube.DaemonSet{})), canary, refusals[:1], refusals[:1]},
		"the node, of a DaemonSet for others":    {elsewhere(), node, nil, nil},
		"the node, of a DaemonSet being deleted": {has("agent", &kube.DaemonSet{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &metav1.Time{}}}), node, classes, classes},
	} {
		for _, class := range classes {
			t.Run(name+"/"+string(class), func(t *testing.T) {
				t.Parallel()
				if got, _ := decide(t, self(), situation.given, fails(situation.object, class, forever)); got.Uninstall != slices.Contains(situation.ever, class) {
					t.Errorf("forever: got %+v", got)
				}
				got, _ := decide(t, self(), situation.given, fails(situation.object, class, 1), hangs(situation.object, forever))
				if got.Uninstall != slices.Contains(situation.once, class) {
					t.Errorf("once: got %+v", got)
				}
			})
		}
	}
}

func TestDecide_RefusalIsConfirmed(t *testing.T) {
	t.Parallel()
	_, requests := decide(t, self(), fails(set, kube.Unauthorized, forever))
	check.Diff(t, "times of requests", []time.Duration{0, time.Second}, requests)
}

const setPath = "/apis/apps/v1/namespaces/istio-system/daemonsets/agent"

// TestDecide_RealConnection sends requests to a server with the DaemonSet, the node and the pod.
func TestDecide_RealConnection(t *testing.T) {
	t.Parallel()
	server := kubetest.NewServer(t)
	server.Set(kubetest.DaemonSet("istio-system", "agent", `{"nodeSelector": {"kubernetes.io/os": "linux"}}`))
	server.Set(kubetest.Node("node-1", map[string]string{"kubernetes.io/os": "linux"}, ""))
	server.Set(kubetest.Pod{Namespace: "istio-system", Name: "agent-x7"}.JSON(t))
	api, err := kube.NewClient(kube.Config{Kubeconfig: server.Kubeconfig(t)})
	check.OK(t, err)
	t.Cleanup(api.Close)
	check.Equal(t, ShouldUninstall(t.Context(), api, self(), Auto), (Verdict{Reason: DaemonSetPresent}))
	server.Delete(setPath)
	if got := ShouldUninstall(t.Context(), api, self(), Auto); !got.Uninstall || got.Reason != DaemonSetGone {
		t.Errorf("got %+v, want to uninstall", got)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if got := ShouldUninstall(ended, api, self(), Auto); got.Uninstall || got.Reason != NoAnswer {
		t.Errorf("the context has ended: got %+v, want to keep", got)
	}
	before := len(server.Requests())
	for _, tc := range []struct {
		api    *kube.Client
		self   Self
		policy Policy
		want   Verdict
	}{
		{api, self(), Always, Verdict{Uninstall: true, Reason: PolicyAlways}},
		{api, self(), Never, Verdict{Reason: PolicyNever}},
		{nil, self(), Auto, Verdict{Reason: NotConfigured}},
		{api, Self{DaemonSet: "agent"}, Auto, Verdict{Reason: NotConfigured}},
		{api, Self{Namespace: "istio-system"}, Auto, Verdict{Reason: NotConfigured}},
	} {
		check.Equal(t, ShouldUninstall(t.Context(), tc.api, tc.self, tc.policy), tc.want, tc.policy, "of", tc.self)
	}
	check.Equal(t, len(server.Requests()), before, "requests although none was needed", server.Requests())
}
