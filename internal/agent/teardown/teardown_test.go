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

	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
)

func self() Self {
	return Self{Namespace: "istio-system", DaemonSet: "agent", NodeName: "node-1", PodName: "agent-x7"}
}

// Objects of the API server, by the names that a cluster has them under.
const (
	set    = "DaemonSet agent"
	canary = "DaemonSet canary"
	pod    = "Pod agent-x7"
	node   = "Node node-1"
)

const forever = 1 << 30

// A cluster is an API server in a test with a fake clock: a healthy one knows the DaemonSet, its pod and the node.
type cluster struct {
	sets   map[string]kube.DaemonSet
	pods   map[string]kube.Pod
	nodes  map[string]kube.Node
	faults []*fault
	asked  []time.Duration
	start  time.Time
}

// A fault is the answer to the next requests for an object, after the faults before it; no error is a healthy answer.
type fault struct {
	object string
	err    error
	times  int
}

// change is what a test does to a cluster.
type change func(*cluster)

// errHang is a request without an answer.
var errHang = errors.New("hang")

func fails(object string, class kube.Class, times int) change {
	return func(c *cluster) {
		c.faults = append(c.faults, &fault{object, &kube.Error{Class: class, Err: errors.New("x")}, times})
	}
}

func hangs(object string, times int) change {
	return func(c *cluster) { c.faults = append(c.faults, &fault{object, errHang, times}) }
}

func answers(object string, times int) change {
	return func(c *cluster) { c.faults = append(c.faults, &fault{object, nil, times}) }
}

func deleted(object string) change { return fails(object, kube.NotFound, forever) }

func all(changes ...change) change {
	return func(c *cluster) {
		for _, change := range changes {
			change(c)
		}
	}
}

// has puts the DaemonSet of the name there, or another in its place.
func has(name string, of kube.DaemonSet) change {
	return func(c *cluster) { c.sets["DaemonSet "+name] = of }
}

// elsewhere makes the DaemonSet one for other nodes.
func elsewhere() change {
	return has("agent", kube.DaemonSet{Template: corev1.PodSpec{NodeSelector: map[string]string{"mesh": "yes"}}})
}

func tainted(key string, effect corev1.TaintEffect) change {
	return func(c *cluster) {
		c.nodes[node] = kube.Node{Name: "node-1", Taints: []corev1.Taint{{Key: key, Effect: effect}}}
	}
}

// ofCanary makes the agent's pod one of a DaemonSet that is not the configured one, which does not exist.
func ofCanary() change {
	return all(deleted(set), func(c *cluster) { c.pods[pod] = kube.Pod{DaemonSet: "canary"} })
}

func request[T any](ctx context.Context, c *cluster, object string, known map[string]T) (T, error) {
	c.asked = append(c.asked, time.Since(c.start))
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

func (c *cluster) DaemonSet(ctx context.Context, _, name string) (kube.DaemonSet, error) {
	return request(ctx, c, "DaemonSet "+name, c.sets)
}

func (c *cluster) Node(ctx context.Context, name string) (kube.Node, error) {
	return request(ctx, c, "Node "+name, c.nodes)
}

func (c *cluster) Pod(ctx context.Context, key kube.PodKey) (kube.Pod, error) {
	return request(ctx, c, "Pod "+key.Name, c.pods)
}

// decide is the verdict about a cluster, by a fake clock, within the time that is promised.
func decide(t *testing.T, who Self, changes ...change) (v Verdict, asked []time.Duration) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		c := &cluster{
			sets: map[string]kube.DaemonSet{set: {}}, pods: map[string]kube.Pod{pod: {DaemonSet: "agent"}},
			nodes: map[string]kube.Node{node: {Name: "node-1"}}, start: time.Now(),
		}
		all(changes...)(c)
		ctx, cancel := context.WithTimeout(t.Context(), Total)
		defer cancel()
		v = query{c, who}.decide(ctx)
		if took := time.Since(c.start); took > Total {
			t.Errorf("took %v, want at most %v; requests at %v", took, Total, c.asked)
		}
		asked = c.asked
	})
	return v, asked
}

func TestShouldUninstall(t *testing.T) {
	t.Parallel()
	nameless, homeless := self(), self()
	nameless.PodName, homeless.NodeName = "", ""
	leaving := has("agent", kube.DaemonSet{Deleting: true})
	for name, row := range map[string]struct {
		self      Self
		given     change
		uninstall bool
		reason    Reason
		detail    string
	}{
		"W-6 rollout, reboot":                   {self(), all(), false, DaemonSetPresent, ""},
		"W-6 drain":                             {self(), tainted("node.kubernetes.io/unschedulable", "NoSchedule"), false, DaemonSetPresent, ""},
		"W-6 the node is not ready":             {self(), tainted("node.kubernetes.io/not-ready", "NoExecute"), false, DaemonSetPresent, ""},
		"W-6 removal":                           {self(), deleted(set), true, DaemonSetGone, "not found"},
		"W-6 no API server":                     {self(), fails(set, kube.Unreachable, forever), false, NoAnswer, "server unreachable"},
		"made again":                            {self(), has("agent", kube.DaemonSet{UID: "another"}), false, DaemonSetPresent, ""},
		"another name, which the pod knows":     {self(), all(ofCanary(), has("canary", kube.DaemonSet{})), false, DaemonSetPresent, ""},
		"another name, deleted, too":            {self(), ofCanary(), true, DaemonSetGone, "not found"},
		"another name, no answer":               {self(), all(ofCanary(), hangs(canary, forever)), false, NoAnswer, ""},
		"being deleted":                         {self(), leaving, true, DaemonSetDeleting, ""},
		"W-33 for other nodes":                  {self(), elsewhere(), true, NodeExcluded, "mesh=yes"},
		"W-33 tainted against it":               {self(), tainted("gone", "NoExecute"), true, NodeExcluded, "gone=:NoExecute"},
		"for other nodes, node forbidden":       {self(), all(elsewhere(), fails(node, kube.Forbidden, forever)), false, DaemonSetPresent, "forbidden"},
		"for other nodes, node hangs":           {self(), all(elsewhere(), hangs(node, forever)), false, DaemonSetPresent, "no answer in time"},
		"for other nodes, node in the end":      {self(), all(elsewhere(), fails(node, kube.ServerError, 2)), true, NodeExcluded, ""},
		"for other nodes, own node unknown":     {homeless, elsewhere(), false, DaemonSetPresent, ""},
		"W-23 401 twice":                        {self(), fails(set, kube.Unauthorized, 2), true, AccountGone, "unauthorized"},
		"W-23 401, then 200":                    {self(), fails(set, kube.Unauthorized, 1), false, DaemonSetPresent, ""},
		"401, then 404":                         {self(), all(fails(set, kube.Unauthorized, 1), deleted(set)), true, DaemonSetGone, ""},
		"401, 500, then 401":                    {self(), all(fails(set, kube.Unauthorized, 1), fails(set, kube.ServerError, 1), fails(set, kube.Unauthorized, 1)), true, AccountGone, ""},
		"401, then nothing":                     {self(), all(fails(set, kube.Unauthorized, 1), hangs(set, forever)), false, NoAnswer, "not confirmed"},
		"W-23 403, pod readable":                {self(), fails(set, kube.Forbidden, forever), false, ReadForbidden, "forbidden"},
		"403, pod readable at first":            {self(), all(fails(set, kube.Forbidden, forever), answers(pod, 3), fails(pod, kube.Forbidden, forever)), true, PermissionsGone, "forbidden"},
		"W-23 403, and 403 for the pod":         {self(), all(fails(set, kube.Forbidden, forever), fails(pod, kube.Forbidden, forever)), true, PermissionsGone, "forbidden"},
		"403, and 401 for the pod":              {self(), all(fails(set, kube.Forbidden, forever), fails(pod, kube.Unauthorized, forever)), true, PermissionsGone, "unauthorized"},
		"403, and 404 for the pod":              {self(), all(fails(set, kube.Forbidden, forever), deleted(pod)), true, PermissionsGone, "not found"},
		"403, and no answer for the pod":        {self(), all(fails(set, kube.Forbidden, forever), hangs(pod, forever)), false, NoAnswer, ""},
		"403 twice, pod unknown":                {nameless, fails(set, kube.Forbidden, 2), true, PermissionsGone, ""},
		"403, then 200, pod unknown":            {nameless, fails(set, kube.Forbidden, 1), false, DaemonSetPresent, ""},
		"404, pod unknown":                      {nameless, deleted(set), true, DaemonSetGone, ""},
		"500 always":                            {self(), fails(set, kube.ServerError, forever), false, NoAnswer, "server error"},
		"500, then 200":                         {self(), fails(set, kube.ServerError, 3), false, DaemonSetPresent, ""},
		"500, then 404":                         {self(), all(fails(set, kube.ServerError, 1), deleted(set)), true, DaemonSetGone, ""},
		"no answer, then 404":                   {self(), all(hangs(set, 1), deleted(set)), true, DaemonSetGone, ""},
		"an error that is not one of the API's": {self(), func(c *cluster) { c.faults = append(c.faults, &fault{set, errors.New("odd"), 1}) }, false, NoAnswer, "odd"},
		"429 with a rest of a minute": {self(), func(c *cluster) {
			c.faults = append(c.faults, &fault{set, &kube.Error{Class: kube.TooManyRequests, RetryAfter: time.Minute}, forever})
		}, false, NoAnswer, "too many requests"},
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

// TestOnlyAnswersUninstall has each class of error for each request in each situation in which it is made, for ever, and
// once with silence after it. Only an answer of the API server about the very object is a reason to uninstall.
func TestOnlyAnswersUninstall(t *testing.T) {
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
		ever   []kube.Class // that uninstall if they last
		once   []kube.Class // that uninstall though nothing follows
	}{
		"the DaemonSet":                          {all(), set, refusals[:2], refusals[:1]},
		"the DaemonSet, its pod is gone":         {deleted(pod), set, refusals, []kube.Class{kube.NotFound, kube.Forbidden}},
		"the pod, after a 404":                   {deleted(set), pod, refusals, refusals[:1]},
		"the pod, after a 403":                   {fails(set, kube.Forbidden, forever), pod, refusals, []kube.Class{kube.NotFound, kube.Forbidden}},
		"the pod's own DaemonSet, after a 404":   {all(ofCanary(), has("canary", kube.DaemonSet{})), canary, refusals[:1], refusals[:1]},
		"the node, of a DaemonSet for others":    {elsewhere(), node, nil, nil},
		"the node, of a DaemonSet being deleted": {has("agent", kube.DaemonSet{Deleting: true}), node, classes, classes},
	} {
		for _, class := range classes {
			t.Run(name+"/"+string(class), func(t *testing.T) {
				t.Parallel()
				if got, _ := decide(t, self(), situation.given, fails(situation.object, class, forever)); got.Uninstall != slices.Contains(situation.ever, class) {
					t.Errorf("for ever: got %+v", got)
				}
				got, _ := decide(t, self(), situation.given, fails(situation.object, class, 1), hangs(situation.object, forever))
				if got.Uninstall != slices.Contains(situation.once, class) {
					t.Errorf("once: got %+v", got)
				}
			})
		}
	}
}

func TestARefusalIsConfirmedAfterASecond(t *testing.T) {
	t.Parallel()
	if _, asked := decide(t, self(), fails(set, kube.Unauthorized, forever)); !slices.Equal(asked, []time.Duration{0, time.Second}) {
		t.Errorf("requests at %v, want at 0s and 1s", asked)
	}
}

// client is one of a server that knows the DaemonSet and the pod, and the file that has its token.
func client(t *testing.T) (*kubetest.Server, *kube.Client, string) {
	t.Helper()
	server := kubetest.NewServer(t)
	server.Set(kubetest.DaemonSet("istio-system", "agent", `{"nodeSelector": {"kubernetes.io/os": "linux"}}`))
	server.Set(kubetest.Node("node-1", map[string]string{"kubernetes.io/os": "linux"}, ""))
	server.Set(kubetest.Pod{Namespace: "istio-system", Name: "agent-x7"}.JSON(t))
	token, authority := server.ServiceAccount(t)
	host, port := server.Address()
	api, err := kube.NewClient(kube.Config{Server: kube.Address{Host: host, Port: port}, TokenFile: token, CAFile: authority})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(api.Close)
	return server, api, token
}

const setPath = "/apis/apps/v1/namespaces/istio-system/daemonsets/agent"

// TestARealConnection asks a server, whose answers the client classifies.
func TestARealConnection(t *testing.T) {
	t.Parallel()
	server, api, _ := client(t)
	if got := ShouldUninstall(t.Context(), api, self(), Auto); got != (Verdict{Reason: DaemonSetPresent}) {
		t.Errorf("got %+v, want to keep", got)
	}
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
		if got := ShouldUninstall(t.Context(), tc.api, tc.self, tc.policy); got != tc.want {
			t.Errorf("%s of %+v: got %+v, want %+v", tc.policy, tc.self, got, tc.want)
		}
	}
	if more := server.Requests()[before:]; len(more) > 0 {
		t.Errorf("requests %q although there was nothing to ask about", more)
	}
}

// TestATokenIsRotated between two requests: the kubelet writes the new one at any time.
func TestATokenIsRotated(t *testing.T) {
	t.Parallel()
	server, api, token := client(t)
	server.SetToken("the-new-one")
	rotate := rotating{api, func() { kubetest.Write(t, token, "the-new-one") }}
	ctx, cancel := context.WithTimeout(t.Context(), Total)
	defer cancel()
	if got := (query{rotate, self()}).decide(ctx); got != (Verdict{Reason: DaemonSetPresent}) {
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
