package plugin_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/meshcni/istio-cni/internal/agent/cmdadd"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// ambientAgent is an agent in ambient mode, with the events that it received.
type ambientAgent struct {
	*agent

	mu     sync.Mutex
	events []string
}

// serveAmbient serves an agent that knows one pod of ambient mode. If enrol is set, it also serves the event socket, and enrol gives the
// agent's answer there. The pod's UID is not the runtime's, like a static pod's.
func serveAmbient(tb testing.TB, n *chaintest.Node, p chaintest.Pod, enrol http.Handler) *ambientAgent {
	tb.Helper()
	a := &ambientAgent{agent: serveAgent(tb, n, ambientStanza(nil))}
	a.Set(kubetest.Namespace(p.Namespace, nil))
	a.SetPod(kubetest.Pod{
		Namespace: p.Namespace, Name: p.Name, UID: "uid-of-" + p.UID, Annotations: map[string]string{"kubernetes.io/config.hash": p.UID},
		Labels: map[string]string{"istio.io/dataplane-mode": "ambient"}, Containers: []kubetest.Container{{Name: "app"}},
	})
	if enrol == nil {
		return a
	}
	serve(tb, n, agentapi.EventSocketName, &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		a.mu.Lock()
		a.events = append(a.events, string(body))
		a.mu.Unlock()
		r.Body = io.NopCloser(strings.NewReader(string(body)))
		enrol.ServeHTTP(w, r)
	})})
	return a
}

// reported returns the last report of a call.
func (a *ambientAgent) reported(tb testing.TB) agentapi.Report {
	tb.Helper()
	a.settle(tb)
	return a.ring.All()[0]
}

func (a *ambientAgent) received() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.events)
}

// enrolling is the handler of this program's agent.
func enrolling(add func(context.Context, agentapi.Event) error) http.Handler {
	return cmdadd.Handler(cmdadd.Options{Add: add, Count: func(int) {}})
}

func enrolled(context.Context, agentapi.Event) error { return nil }

// ambientStanza enables ambient mode, with the chart's default selectors.
func ambientStanza(more chaintest.Stanza) chaintest.Stanza {
	stanza := chaintest.Stanza{
		"ambient_enabled": true, "api_timeout": "1m30s", "exclude_namespaces": []string{"kube-system"}, "pod_namespace": "istio-system",
		"enablement_selectors": json.RawMessage(`[
			{"podSelector":{"matchLabels":{"istio.io/dataplane-mode":"ambient"}},"namespaceSelector":{}},
			{"podSelector":{"matchExpressions":[{"key":"istio.io/dataplane-mode","operator":"NotIn","values":["none"]}]},
			 "namespaceSelector":{"matchLabels":{"istio.io/dataplane-mode":"ambient"}}}]`),
	}
	maps.Copy(stanza, more)
	return stanza
}

func TestAmbient_EveryVersion(t *testing.T) {
	t.Parallel()
	for at, version := range cniconf.Versions() {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			n := chaintest.New(t, chaintest.Program(t))
			pod := n.NewPod("shop", "web", nil)
			agent := serveAmbient(t, n, pod, enrolling(enrolled))
			list := n.Chain(version, ambientStanza(nil))
			bridge, before := passesOn(t, n, list, pod)
			events := agent.received()
			check.Equal(t, len(events), 1, "events")
			event, err := agentapi.ParseEvent([]byte(events[0]))
			check.OK(t, err)
			if event.Netns != pod.Netns || event.PodName != "web" || event.PodNamespace != "shop" || event.PodUID != "uid-of-"+pod.UID ||
				len(event.Addresses()) != 1 || !strings.HasPrefix(event.Addresses()[0].String(), "10.77.") || event.IPs[0].Gateway.String() != "10.77.0.1" {
				t.Errorf("event %s", events[0])
			}
			if at >= slices.Index(cniconf.Versions(), "0.4.0") {
				check.OK(t, n.Check(bridge, pod))
				_, err = n.Exec("CHECK", pod, input(t, list, before))
				check.OK(t, err)
			}
			check.OK(t, n.Del(list, pod))
			check.Equal(t, len(agent.received()), 1, "events of CHECK and DEL")
			check.Equal(t, len(n.API.Requests()), 0, "requests")
			if text := rules(t, pod); strings.Contains(text, "ISTIO") {
				t.Errorf("the plugin wrote rules:\n%s", text)
			}
			if r := agent.reported(t); r.Reason != "ambient" || r.Captured || r.Changed || r.Error != "" || r.Seconds[agentapi.PhaseProgram] <= 0 {
				t.Errorf("reported %+v", r)
			}
		})
	}
}

// TestAmbient_Addresses: the event has the addresses of the previous result in its order, and null without a result.
func TestAmbient_Addresses(t *testing.T) {
	t.Parallel()
	for prev, want := range map[string]string{
		"": `"IPs":null`,
		`{"cniVersion":"1.0.0","interfaces":[{"name":"eth0"}],"ips":[null,{"address":"fd00::7/64","interface":0},{"address":"10.42.0.7/24","gateway":"10.42.0.1"}]}`: `"IPs":[` +
			`{"Interface":0,"Address":{"IP":"fd00::7","Mask":"//////////8AAAAAAAAAAA=="},"Gateway":""},` +
			`{"Interface":null,"Address":{"IP":"10.42.0.7","Mask":"////AA=="},"Gateway":"10.42.0.1"}]`,
	} {
		n := chaintest.New(t, chaintest.Program(t))
		pod := n.NewPod("shop", "web", nil)
		agent := serveAmbient(t, n, pod, enrolling(enrolled))
		var before []byte
		if prev != "" {
			before = []byte(prev)
		}
		check.OK(t, check.Err(n.Ours(n.Chain("1.0.0", ambientStanza(nil)), pod, before)))
		want = fmt.Sprintf(`{"Netns":%q,"PodName":"web","PodNamespace":"shop",%s,"PodUID":"uid-of-%s"}`, pod.Netns, want, pod.UID)
		if got := agent.received(); len(got) != 1 || got[0] != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

// TestAmbient_NotEnrolled: a pod of the mesh does not start outside of it. TestPostEvent_Answers of node/agentapi has every answer.
func TestAmbient_NotEnrolled(t *testing.T) {
	t.Parallel()
	const prefix = "istio-cni cmdAdd failed to contact node Istio CNI agent: "
	for name, tc := range map[string]struct {
		agent  http.Handler
		stanza chaintest.Stanza
		netns  func(*chaintest.Node) string
		code   uint
		texts  []string
		events int
	}{
		"ztunnel is missing": {
			enrolling(func(context.Context, agentapi.Event) error { return errors.New("no ztunnel is connected") }), nil, nil, types.ErrTryAgainLater,
			[]string{prefix + "unable to push CNI event (status code 500): no ztunnel is connected"},
			1,
		},
		"no ambient mode in the agent": {
			nil, nil, nil, types.ErrTryAgainLater,
			[]string{prefix + "failed to send event request: ", agentapi.EventSocketName, "is the node agent running on this node, with ambient mode enabled?"},
			0,
		},
		"a hung agent": {
			http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }), nil, nil, types.ErrTryAgainLater,
			[]string{prefix + "failed to send event request: no answer in time", "the node agent's log"},
			1,
		},
		"the node's namespace": {
			enrolling(enrolled), nil, func(n *chaintest.Node) string { return n.Netns }, types.ErrInvalidNetNS, []string{"never touched"}, 0,
		},
		"no namespace": {
			enrolling(enrolled), nil, func(*chaintest.Node) string { return "/run/netns/gone" }, types.ErrInvalidNetNS, []string{"/run/netns/gone"}, 0,
		},
		"an unusable stanza": {
			enrolling(enrolled), chaintest.Stanza{"second_ip_family": "maybe"}, nil, types.ErrInvalidNetworkConfig, []string{"second_ip_family"}, 0,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := chaintest.New(t, chaintest.Program(t))
			pod := n.NewPod("shop", "web", nil)
			agent := serveAmbient(t, n, pod, tc.agent)
			call := pod
			if tc.netns != nil {
				call.Netns = tc.netns(n)
			}
			out, err := n.Ours(n.Chain("1.0.0", ambientStanza(tc.stanza)), call, nil)
			var failed types.Error
			if err == nil || json.Unmarshal(out, &failed) != nil || failed.Code != tc.code || !strings.Contains(failed.Msg, "pod shop/web") {
				t.Fatalf("ADD: %v, %s", err, out)
			}
			check.Contains(t, failed.Details, tc.texts...)
			check.Equal(t, len(agent.received()), tc.events, "events")
			if r := agent.reported(t); r.Reason != "ambient" || r.Captured || !strings.Contains(r.Error, "shop/web") {
				t.Errorf("reported %+v", r)
			}
		})
	}
}

// TestBudget_AmbientNode: with ambient mode a pod with a sidecar costs what it costs without. The runtime's annotations do not suffice
// for other pods, so they cost a question or, without an agent, the requests for pod and namespace. No ADD but a sidecar's writes rules.
func TestBudget_AmbientNode(t *testing.T) {
	labelled := func(p *kubetest.Pod) {
		chaintest.PlainPod(p)
		p.Labels = map[string]string{"istio.io/dataplane-mode": "ambient"}
	}
	for name, tc := range map[string]struct {
		describe          func(*kubetest.Pod)
		annotations       string
		requests, batches int
		events            []string
	}{
		"sidecar": {chaintest.Sidecar, `{"sidecar.istio.io/status":"{}"}`, 1, 1, nil},
		"outside": {chaintest.PlainPod, `{}`, 2, 0, nil},
		"ambient": {labelled, `{}`, 2, 0, []string{"web"}},
	} {
		for _, withAgent := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s agent %t", name, withAgent), func(t *testing.T) {
				stanza := ambientStanza(chaintest.Stanza{"plugin_log_level": "warn"})
				maps.Copy(stanza, delivered(tc.annotations))
				s := newFixture(t, withAgent, "shop", tc.describe, stanza)
				var events []string
				serve(t, s.node, agentapi.EventSocketName, &http.Server{ReadHeaderTimeout: time.Minute, Handler: enrolling(
					func(_ context.Context, e agentapi.Event) error { events = append(events, e.PodName); return nil })})
				asked := budget{requests: tc.requests}
				if withAgent {
					asked = budget{questions: 2}
				}
				asked.batches = tc.batches
				r := s.do(t, "ADD", asked)
				if n := r.Sockets("AF_NETLINK"); (n > 0) != (tc.batches > 0) {
					t.Errorf("made %d netlink sockets", n)
				}
				if asked.batches = 0; withAgent {
					asked.questions = 1
				}
				s.do(t, "CHECK", asked)
				untouched(t, s, s.do(t, "DEL", budget{}))
				check.Equal(t, fmt.Sprint(events), fmt.Sprint(tc.events), "events")
			})
		}
	}
}

// input is a runtime's stdin for the last plugin of a list.
func input(t *testing.T, list *libcni.NetworkConfigList, prevResult []byte) []byte {
	t.Helper()
	text, err := chaintest.Input(list, prevResult)
	check.OK(t, err)
	return text
}
