package installer_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/eventrecorder"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// unredirected is a pod of the node whose sandbox was created before the plugin was installed, and whose validation has failed.
type unredirected struct{ chaintest.Pod }

const unredirectedAddress = "10.77.0.5"

func newUnredirected(t *testing.T, n *nodetest.Node) unredirected {
	t.Helper()
	p := unredirected{chaintest.Pod{Namespace: "apps", Name: "early", UID: "00000000-0000-4000-8000-0000000000ea", Netns: netnstest.New(t)}}
	for _, command := range []string{
		"link set lo up", "link add veth0 type veth peer name eth0", "address add " + unredirectedAddress + "/16 dev eth0",
		"link set eth0 up", "link set veth0 up",
	} {
		netnstest.Run(t, p.Netns, "ip", strings.Fields(command)...)
	}
	// As libcni leaves it, with a namespace that is accessible only through a process.
	entry, err := json.Marshal(map[string]any{
		"kind": "cniCacheV1", "containerId": "c1", "config": []byte(nodetest.BridgeList), "ifName": "eth0", "networkName": "pods",
		"netns": p.Netns, "cniArgs": [][2]string{
			{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", p.Namespace}, {"K8S_POD_NAME", p.Name}, {"K8S_POD_UID", p.UID},
		},
	})
	check.OK(t, err)
	n.Put(nodetest.CacheDir+"/pods-c1-eth0", string(entry))
	return p
}

// register gives the pod to the API server.
func (p unredirected) register(n *nodetest.Node) {
	n.API.Set(fmt.Appendf(nil, `{
		"kind": "Pod", "apiVersion": "v1",
		"metadata": {"namespace": %q, "name": %q, "uid": %q, "annotations": {"sidecar.istio.io/status": "{}"}},
		"spec": {"nodeName": %q, "initContainers": [{"name": "istio-validation"}],
			"containers": [{"name": "app"}, {"name": "istio-proxy", "args": ["proxy", "sidecar"]}]},
		"status": {"phase": "Pending", "podIP": %[5]q, "podIPs": [{"ip": %[5]q}], "initContainerStatuses": [{"name": "istio-validation",
			"state": {"waiting": {"reason": "CrashLoopBackOff"}},
			"lastState": {"terminated": {"exitCode": 126, "reason": "Error", "finishedAt": "2026-01-01T00:00:00Z"}}}]}
	}`, p.Namespace, p.Name, p.UID, nodetest.NodeName, unredirectedAddress))
}

// events returns the events about the pod.
func (p unredirected) events(t *testing.T, n *nodetest.Node) []corev1.Event {
	t.Helper()
	return slices.DeleteFunc(events(t, n), func(e corev1.Event) bool { return string(e.InvolvedObject.UID) != p.UID })
}

const repairedInPlace = `istio_cni_repair_pods_repaired_total{type="repair",result="success"}`

func awaitMetric(t *testing.T, a *nodetest.Agent, series, want string) {
	t.Helper()
	a.Await(series+" "+want, func() bool { return a.Metric(series) == want })
}

// TestAgent_NoAPIServer installs without an API server, and with one that never answers; the first agent repairs
// when the API server is back.
func TestAgent_NoAPIServer(t *testing.T) {
	t.Parallel()
	for name, fail := range map[string]func(*nodetest.Node){
		"away":        func(n *nodetest.Node) { n.API.Stop() },
		"never there": func(n *nodetest.Node) { n.API.Fail(kubetest.Hang, kubetest.Forever) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			p := newUnredirected(t, n)
			fail(n)
			a := n.Start("REPAIR_ENABLED=true", "REPAIR_REPAIR_PODS=true", "CNI_CONF_MODE=auto")
			a.AwaitReady()
			check.Diff(t, "the runtime loads", withUs(), types(t, n))
			if name != "away" {
				return
			}
			awaitMetric(t, a, "istio_cni_repair_watch_troubles_total", "1")
			n.StartAPI()
			n.GrantAccess()
			p.register(n)
			awaitMetric(t, a, repairedInPlace, "1")
			if rules := netnstest.Run(t, n.Netns, "iptables-save"); !p.Captured(t) || strings.Contains(rules, "ISTIO") {
				t.Errorf("the pod is redirected: %t; rules in the node's namespace:\n%s", p.Captured(t), rules)
			}
			a.Await("the event on the pod", func() bool { return len(p.events(t, n)) > 0 })
			got := p.events(t, n)
			if len(got) > 1 || got[0].Reason != "RepairBrokenPod" || got[0].Source.Component != "cni-repair" || got[0].Source.Host != "node-1" {
				t.Errorf("events %+v", got)
			}
		})
	}
}

// TestAgent_UnknownNode: an agent without a node name would look for pods of other nodes. Neither it nor an agent
// without repair repairs.
func TestAgent_UnknownNode(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := newUnredirected(t, n)
	p.register(n)
	for env, says := range map[string]string{
		"NODE_NAME=":                  "the name of this node is not set",
		"REPAIR_NODE_NAME=other-node": "race repair is for another node than this one",
		"REPAIR_ENABLED=false":        "agent is ready",
	} {
		a := n.Start("AUDIT_INTERVAL=0", "REPAIR_ENABLED=true", "REPAIR_REPAIR_PODS=true", env)
		a.AwaitReady()
		a.AwaitLog(says)
		a.Await("the watch of the ConfigMap", func() bool { return n.API.Watches() > 0 })
		ends(t, a)
		if p.Captured(t) || len(p.events(t, n)) > 0 {
			t.Errorf("%s: the pod was redirected, events %+v", env, p.events(t, n))
		}
	}
}

// TestAgent_CannotAudit: the reason is once in the log, and in each client's answer.
func TestAgent_CannotAudit(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	for env, want := range map[string]string{
		"AUDIT_INTERVAL=0":        "it is switched off (--audit-interval=0)",
		"HOST_PROC=/nowhere":      "the node agent lacks /proc of the node, at /host/proc",
		"NODE_NAME=":              "the node agent lacks the address of the API server or the name of the node",
		"KUBERNETES_NODE_NAME=n2": "",
	} {
		a := n.Start(env)
		a.AwaitReady()
		a.Await("an answer: "+want, func() bool {
			code, body, _ := a.Ask("9876", "/api/pods")
			return want == "" && code == http.StatusOK || want != "" && code == http.StatusServiceUnavailable && body == "the audit is off: "+want+"\n"
		})
		logged := strings.Count(a.Log(), "the audit is off: no pod of this node is verified")
		if wanted := want != "" && !strings.HasPrefix(env, "AUDIT"); logged > 1 || (logged == 1) != wanted {
			t.Errorf("%s: logged %d times:\n%s", env, logged, a.Log())
		}
		ends(t, a)
	}
}

// TestAgent_Rights uses all features of an agent and compares the requests to the API server with
// e2e/rights/agent.yaml, which another test compares with the chart: no request needs another right, and no right is unused.
func TestAgent_Rights(t *testing.T) {
	t.Parallel()
	features := map[string]bool{"Live": true, "Repair": true, "Delete": true, "Evict": true, "Label": true, "Audit": true, "Condition": true}
	want, used := kubetest.AgentRights(t, features), map[string]bool{}
	for name, ways := range map[string][]string{
		"audit":    {"REPAIR_ENABLED=false", "AUDIT_POD_CONDITION=true"},
		"in place": {"REPAIR_REPAIR_PODS=true"},
		"delete":   {"REPAIR_REPAIR_PODS=false", "REPAIR_DELETE_PODS=true"},
		"evict":    {"REPAIR_REPAIR_PODS=false", "REPAIR_DELETE_PODS=true", "REPAIR_EVICT=true"},
		"label":    {"REPAIR_REPAIR_PODS=false", "REPAIR_LABEL_PODS=true"},
	} {
		n := newNode(t)
		p := newUnredirected(t, n)
		p.register(n)
		n.API.Set(configMap(map[string]string{"EXCLUDE_NAMESPACES": "kube-system"}))
		a := n.Start(append([]string{"REPAIR_ENABLED=true"}, ways...)...)
		a.AwaitReady()
		check.OK(t, check.Err(n.Add(n.NewPod("apps", "mesh", chaintest.Sidecar))))
		a.Await("the events, and the watches", func() bool {
			now := asked(t, n.API)
			return len(p.events(t, n)) > 0 && now["watch /configmaps:istio-cni-config"] && (name != "audit" || now["patch /pods/status"])
		})
		ends(t, a)
		now := asked(t, n.API)
		if name == "audit" {
			enough := kubetest.AgentRights(t, map[string]bool{"Live": true, "Audit": true, "Condition": true})
			for right := range now {
				if !slices.Contains(enough, right) {
					t.Errorf("the audit alone asks for %q", right)
				}
			}
		}
		maps.Copy(used, now)
	}
	maps.Copy(used, asked(t, patchedEvent(t)))
	check.Diff(t, "granted, and asked for", want, slices.Sorted(maps.Keys(used)))
}

// TestAgent_Observer: it finds a pod that bypasses the mesh, changes no file of the node and no rule, and needs fewer rights.
func TestAgent_Observer(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := newUnredirected(t, n)
	p.register(n)
	node := func() map[string]map[string]string {
		all := map[string]map[string]string{"rules": {"of the pod": netnstest.Run(t, p.Netns, "nft", "list", "ruleset")}}
		for _, dir := range []string{nodetest.NetDir, nodetest.BinDir, nodetest.RunDir, nodetest.CacheDir} {
			all[dir] = n.Tree(dir)
		}
		return all
	}
	before := node()
	a := n.Start("REPAIR_ENABLED=", "CNI_OBSERVE=true", "CNI_AGENT_RUN_DIR=/tmp/own", "CONFIG_MAP=istio-cni-observer-config", "AMBIENT_ENABLED=true",
		"ZTUNNEL_UDS_ADDRESS="+nodetest.RunDir+"/ztunnel.sock")
	a.AwaitReady()
	a.Await("the pod's state, its event and the watches", func() bool {
		_, body, _ := a.Ask("9876", "/api/pods")
		now := asked(t, n.API)
		return strings.Contains(body, `"bypassed"`) && strings.Contains(body, `"remedy": "restart the pod"`) && len(p.events(t, n)) > 0 &&
			now["watch /configmaps:istio-cni-observer-config"] && now["watch /namespaces"]
	})
	check.Equal(t, a.Metric("istio_cni_install_ready"), "1", "ready")
	check.Diff(t, "the node changes", before, node()) // no socket for ztunnel or for plugins
	ends(t, a)
	check.Diff(t, "the node has changed", before, node())
	enough := kubetest.AgentRights(t, map[string]bool{"Observe": true, "Live": true, "Audit": true, "Ambient": true})
	for right := range asked(t, n.API) {
		if !slices.Contains(enough, right) {
			t.Errorf("it asks for %q", right)
		}
	}
	if strings.Contains(a.Log(), "self-test") {
		t.Errorf("a self-test was made:\n%s", a.Log())
	}
}

// patchedEvent makes the agent's recorder report the same event again after five minutes.
func patchedEvent(t *testing.T) *kubetest.Server {
	t.Helper()
	server := kubetest.NewServer(t)
	token, authority := server.ServiceAccount(t)
	host, port := server.Address()
	api, err := kube.NewClient(kube.Config{Server: kube.Address{Host: host, Port: port}, TokenFile: token, CAFile: authority})
	check.OK(t, err)
	defer api.Close()
	clock := clocktesting.NewFakeClock(time.Now())
	events := eventrecorder.New(api, eventrecorder.Options{
		Log: slog.New(slog.DiscardHandler), Clock: clock, Count: func(eventrecorder.Result) {},
	})
	defer events.Shutdown()
	for _, want := range []string{"create /events", "patch /events"} {
		events.Record(kube.Event{Object: kube.NodeRef(nodetest.NodeName), Reason: "Test", Message: "same", Type: kube.EventWarning})
		agenttest.Eventually(t, want, func() bool { return asked(t, server)[want] })
		clock.Step(5 * time.Minute)
	}
	return server
}

// asked returns the requests so far in the form of rights. Only objects whose right has a name have a name.
func asked(t *testing.T, server *kubetest.Server) map[string]bool {
	t.Helper()
	all := map[string]bool{}
	for _, request := range server.Requests() {
		method, rest, _ := strings.Cut(request, " ")
		at, err := url.Parse(rest)
		check.OK(t, err)
		for _, right := range needs(method, at) {
			all[right] = true
		}
	}
	return all
}

// object returns the group, resource, name and subresource of a path.
var object = regexp.MustCompile(`^/(?:api|apis/([^/]+))/[^/]+(?:/namespaces/[^/]+)?/([^/]+)(?:/([^/]+)(/[^/]+)?)?$`)

func needs(method string, at *url.URL) []string {
	parts := object.FindStringSubmatch(at.Path)
	resource, name := parts[1]+"/"+parts[2]+parts[4], parts[3]
	verbs := map[string][]string{
		http.MethodPost: {"create"}, http.MethodPatch: {"patch"}, http.MethodPut: {"update"}, http.MethodDelete: {"delete"},
	}[method]
	query := at.Query()
	switch {
	case method != http.MethodGet:
	case query.Get("sendInitialEvents") == "true":
		verbs = []string{"list", "watch"} // the fallback for a server that cannot stream a list
	case query.Has("watch"):
		verbs = []string{"watch"}
	case name == "":
		verbs = []string{"list"}
	default:
		verbs = []string{"get"}
	}
	only, _ := strings.CutPrefix(query.Get("fieldSelector"), "metadata.name=")
	named := map[string]string{"apps/daemonsets": name, "/configmaps": only}
	if by := named[resource]; by != "" {
		resource += ":" + by
	}
	var out []string
	for _, verb := range verbs {
		out = append(out, fmt.Sprintf("%s %s", verb, resource))
	}
	return out
}
