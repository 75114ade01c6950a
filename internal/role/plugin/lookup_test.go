package plugin_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/agent/decisions"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podcache"
	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/selfcheck"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// agent is the real service on the node's socket, with its own API server.
type agent struct {
	*kubetest.Server

	ring decisions.Ring
	// calls counts the received requests.
	calls atomic.Int64

	socket string
	// open counts its connections.
	open atomic.Int64
}

// settle waits until the agent has read everything that ended plugins have sent: they do not wait for it.
func (a *agent) settle(tb testing.TB) {
	tb.Helper()
	// The agent accepts connections in order, so after this connection it has accepted all others.
	mark, err := (&net.Dialer{}).DialContext(tb.Context(), "unix", a.socket)
	check.OK(tb, err)
	_, _ = mark.Write([]byte("nonsense\r\n\r\n"))
	_, _ = io.ReadAll(mark)
	_ = mark.Close()
	for a.open.Load() > 0 {
		time.Sleep(time.Millisecond)
	}
}

func (a *agent) watch(_ net.Conn, state http.ConnState) {
	switch state { //nolint:exhaustive // only the begin and the end
	case http.StateNew:
		a.open.Add(1)
	case http.StateClosed:
		a.open.Add(-1)
	}
}

// serveAgent serves look-ups, in ambient mode if the stanza enables it.
func serveAgent(tb testing.TB, n *chaintest.Node, stanza chaintest.Stanza) *agent {
	tb.Helper()
	var selectors *selector.Ambient
	if text, enabled := stanza["enablement_selectors"].(json.RawMessage); enabled {
		var err error
		selectors, err = selector.ParseAmbient(text)
		check.OK(tb, err)
	}
	a := &agent{Server: kubetest.NewServer(tb), socket: filepath.Join(n.RunDir, agentapi.SocketName)}
	api, err := kube.NewClient(kube.Config{Kubeconfig: a.Kubeconfig(tb)})
	check.OK(tb, err)
	service := podcache.Service{
		Store: podcache.NewStore(podcache.Options{
			API: api, Log: slog.New(slog.DiscardHandler), Ambient: func() *selector.Ambient { return selectors },
		}), Ring: &a.ring, Metrics: metrics.New(""),
	}
	handler := service.Handler()
	serve(tb, n, agentapi.SocketName, &http.Server{ReadHeaderTimeout: time.Minute, ConnState: a.watch, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a.calls.Add(1)
		handler.ServeHTTP(w, r)
	})})
	return a
}

// knows adds a pod to the agent's API server.
func (a *agent) knows(p chaintest.Pod, describe func(*kubetest.Pod)) {
	pod := kubetest.Pod{Namespace: p.Namespace, Name: p.Name, UID: p.UID}
	describe(&pod)
	a.SetPod(pod)
}

func serveSocket(tb testing.TB, n *chaintest.Node, handler http.Handler) {
	tb.Helper()
	serve(tb, n, agentapi.SocketName, &http.Server{Handler: handler, ReadHeaderTimeout: time.Minute})
}

const logSocket = "log.sock"

// serve answers at a socket of the agent's directory until the test ends.
func serve(tb testing.TB, n *chaintest.Node, socket string, server *http.Server) {
	tb.Helper()
	var config net.ListenConfig
	listener, err := config.Listen(tb.Context(), "unix", filepath.Join(n.RunDir, socket))
	check.OK(tb, err)
	go func() { _ = server.Serve(listener) }()
	tb.Cleanup(func() { _ = server.Close() })
}

// delivered is a stanza with the annotations as the runtime passes them.
func delivered(annotations string) chaintest.Stanza {
	return chaintest.Stanza{"runtimeConfig": map[string]any{"io.kubernetes.cri.pod-annotations": json.RawMessage(annotations)}}
}

// longTimeout is a stanza that gives an agent on a busy machine seconds to answer, for tests in which it answers.
func longTimeout() chaintest.Stanza { return chaintest.Stanza{"api_timeout": "1m30s"} }

// chain runs the chain with a stanza that a runtime has completed.
func chain(n *chaintest.Node, p chaintest.Pod, stanza chaintest.Stanza) error {
	_, err := n.Add(n.Chain("1.0.0", stanza), p)
	return err
}

// TestLookup_Annotations: a pod outside of the mesh costs no request, no socket and no file; for other pods the cluster decides.
func TestLookup_Annotations(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name     string
		stanza   chaintest.Stanza
		describe func(*kubetest.Pod)
		requests int
		captured bool
	}{
		{"none of ours", delivered(`{"kubernetes.io/config.seen":"x"}`), chaintest.PlainPod, 0, false},
		{"delivered empty", delivered(`{}`), chaintest.PlainPod, 0, false},
		{"delivered like containerd without annotations", delivered(`null`), chaintest.PlainPod, 0, false},
		{"not to be intercepted", delivered(`{"sidecar.istio.io/status":"{}","sidecar.istio.io/interceptionMode":"NONE"}`), chaintest.PlainPod, 0, false},
		{"not delivered", nil, chaintest.PlainPod, 1, false},
		{"nothing delivered at all", chaintest.Stanza{"runtimeConfig": map[string]any{}}, chaintest.PlainPod, 1, false},
		{"something else delivered", chaintest.Stanza{"runtimeConfig": map[string]any{"portMappings": []any{}}}, chaintest.PlainPod, 1, false},
		{"delivered as nonsense", delivered(`["sidecar.istio.io/status"]`), chaintest.Sidecar, 1, true},
		{"values of another type", delivered(`{"a":1}`), chaintest.Sidecar, 1, true},
		{"injected", delivered(`{"sidecar.istio.io/status":"{}"}`), chaintest.Sidecar, 1, true},
		{"injected, with a label that forbids it", delivered(`{"sidecar.istio.io/status":"{}"}`), func(p *kubetest.Pod) {
			chaintest.Sidecar(p)
			p.Labels = map[string]string{"sidecar.istio.io/inject": "false"}
		}, 1, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			n := chaintest.New(t, chaintest.Program(t))
			pod := n.NewPod("shop", "web", test.describe)
			stanza := chaintest.Stanza{"plugin_log_level": "info"}
			maps.Copy(stanza, test.stanza)
			check.OK(t, chain(n, pod, stanza))
			check.Equal(t, len(n.API.Requests()), test.requests)
			check.Equal(t, strings.Contains(rules(t, pod), "ISTIO_OUTPUT"), test.captured, "captured")
			files, err := os.ReadDir(n.RunDir)
			check.OK(t, err)
			if test.requests == 0 && len(files) != 1 {
				t.Errorf("files were made: %v", files)
			}
		})
	}
}

// TestLookup_Agent: with the agent the plugin needs neither its kubeconfig nor its own request.
func TestLookup_Agent(t *testing.T) {
	t.Parallel()
	n := chaintest.New(t, chaintest.Program(t))
	a := serveAgent(t, n, nil)
	pod, plain := n.NewPod("shop", "web", nil), n.NewPod("shop", "plain", nil)
	a.knows(pod, chaintest.Sidecar)
	a.knows(plain, chaintest.PlainPod)
	check.OK(t, os.Remove(filepath.Join(n.RunDir, "istio-cni-kubeconfig")))
	for _, p := range []chaintest.Pod{pod, plain} {
		check.OK(t, chain(n, p, longTimeout()))
	}
	if !strings.Contains(rules(t, pod), "ISTIO_OUTPUT") || strings.Contains(rules(t, plain), "ISTIO") {
		t.Errorf("the wrong pod is captured:\n%s\n%s", rules(t, pod), rules(t, plain))
	}
	a.settle(t)
	check.Equal(t, a.calls.Load(), 4, "the agent was called")
	latest := a.ring.All()
	if len(latest) != 2 {
		t.Fatalf("%d reports", len(latest))
	}
	r := latest[1]
	if r.Namespace != "shop" || r.Pod != "web" || r.UID != pod.UID || r.Source != agentapi.SourceAgent || r.Reason != "captured" || !r.Captured ||
		!r.Changed || r.Requests != 0 || r.Error != "" || r.Seconds[agentapi.PhaseTotal] <= 0 || r.Seconds[agentapi.PhaseProgram] <= 0 ||
		r.Backend == "" {
		t.Errorf("reported %+v", r)
	}
	if r := latest[0]; r.Captured || r.Reason != "no-proxy" || r.Processes != 0 || r.Backend != "" {
		t.Errorf("reported %+v", r)
	}
}

// TestLookup_AgentCannotTell: after any unusable response of the agent the API server decides. Unknown fields
// do not make a response unusable.
func TestLookup_AgentCannotTell(t *testing.T) {
	t.Parallel()
	const newer = "is newer"
	hang := func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }
	answer := func(status int, text string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			_, _ = w.Write([]byte(text))
		}
	}
	wrong := func(change func(map[string]any)) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			text := map[string]any{
				"factsVersion": sidecar.FactsVersion(), "uid": r.URL.Query().Get("uid"), "facts": map[string]any{"Namespace": "shop", "Name": "web"},
			}
			change(text)
			_ = json.NewEncoder(w).Encode(text)
		}
	}
	for name, handler := range map[string]http.HandlerFunc{
		"hangs":             hang,
		"fails":             answer(http.StatusServiceUnavailable, "no"),
		"knows no path":     answer(http.StatusNotFound, "404 page not found"),
		"answers nonsense":  answer(http.StatusOK, "<html>"),
		"answers half":      answer(http.StatusOK, `{"factsVersion":1,"facts":{"Namespace":"shop"`),
		"answers too much":  answer(http.StatusOK, `{"factsVersion":1,"x":"`+strings.Repeat("x", 5<<20)+`"}`),
		"is older":          wrong(func(m map[string]any) { m["factsVersion"] = sidecar.FactsVersion() - 1 }),
		"says no version":   wrong(func(m map[string]any) { delete(m, "factsVersion") }),
		"means another UID": wrong(func(m map[string]any) { m["uid"] = "x" }),
		"means another pod": wrong(func(m map[string]any) { m["facts"] = map[string]any{"Namespace": "shop", "Name": "other"} }),
		newer: wrong(func(m map[string]any) {
			m["factsVersion"], m["more"] = sidecar.FactsVersion()+7, []int{1}
			m["facts"] = json.RawMessage(`{"Namespace":"shop","Name":"web","Color":"blue","Annotations":{"sidecar.istio.io/status":""},
				"Containers":[{"Name":"istio-proxy","Shape":"round","Args":["proxy","sidecar"]}]}`)
		}),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := chaintest.New(t, chaintest.Program(t))
			serveSocket(t, n, handler)
			pod := n.NewPod("shop", "web", chaintest.Sidecar)
			check.OK(t, chain(n, pod, longTimeout()))
			if (len(n.API.Requests()) == 0) != (name == newer) || !strings.Contains(rules(t, pod), "ISTIO_OUTPUT") {
				t.Errorf("%d requests; rules:\n%s", len(n.API.Requests()), rules(t, pod))
			}
		})
	}
	t.Run("and so does the server", func(t *testing.T) {
		t.Parallel()
		n := chaintest.New(t, chaintest.Program(t))
		serveSocket(t, n, answer(http.StatusServiceUnavailable, "out of sorts"))
		n.API.Fail(kubetest.Forbidden, 100) // a final error: there is nothing to wait for
		err := chain(n, n.NewPod("shop", "web", nil), longTimeout())
		check.Fails(t, err, "out of sorts", "API server")
	})
}

// recordFailure writes the verdict of a self-test without a working backend on this kernel.
func recordFailure(t *testing.T, n *chaintest.Node, problem string) {
	t.Helper()
	recordChoice(t, n, "", problem)
}

// recordChoice writes the verdict of a self-test that chooses a backend for auto because netlink has a problem.
func recordChoice(t *testing.T, n *chaintest.Node, choice redirect.Backend, problem string) {
	t.Helper()
	var name unix.Utsname
	check.OK(t, unix.Uname(&name))
	text := fmt.Appendf(nil, `{"version":1,"kernel":%q,"choice":%q,"results":[{"backend":"netlink","problems":[
		{"family":"IPv4","mode":"REDIRECT","text":%q}]}]}`, unix.ByteSliceToString(name.Release[:]), choice, problem)
	check.OK(t, os.WriteFile(filepath.Join(n.RunDir, selfcheck.FileName), text, 0o600))
}

// TestSandbox_Dialect: if auto means native, a gVisor pod has iptables rules, and CHECK expects them until the sandbox takes the
// addresses; other pods have native rules.
func TestSandbox_Dialect(t *testing.T) {
	t.Parallel()
	n := chaintest.New(t, chaintest.Program(t))
	recordChoice(t, n, redirect.Native, "x")
	sandboxed := n.NewPod("shop", "agent", func(p *kubetest.Pod) {
		chaintest.Sidecar(p)
		p.RuntimeClass = "gvisor"
	})
	usual := n.NewPod("shop", "web", chaintest.Sidecar)
	list := n.Chain("1.0.0", chaintest.Stanza{})
	for pod, want := range map[string]bool{sandboxed.Netns: true, usual.Netns: false} {
		p := map[string]chaintest.Pod{sandboxed.Netns: sandboxed, usual.Netns: usual}[pod]
		check.OK(t, check.Err(n.Add(list, p)))
		check.OK(t, n.Check(list, p))
		native := strings.Contains(netnstest.Run(t, p.Netns, "nft", "list", "tables"), "istio-proxy")
		if got := strings.Contains(rules(t, p), "ISTIO_OUTPUT"); got != want || native == want {
			t.Errorf("%s: rules of iptables %v, native ones %v", p.Name, got, native)
		}
	}
	netnstest.Run(t, sandboxed.Netns, "iptables", "-t", "nat", "-F", "OUTPUT")
	if err := n.Check(list, sandboxed); err == nil {
		t.Error("CHECK misses the lost rules")
	}
	for _, p := range []chaintest.Pod{sandboxed, usual} {
		netnstest.Run(t, p.Netns, "ip", "address", "flush", "dev", "eth0")
		result, err := n.Cached(list, p)
		check.OK(t, err)
		input, err := chaintest.Input(list, result)
		check.OK(t, err)
		if _, err := n.Exec("CHECK", p, input); (err == nil) != (p.Name == sandboxed.Name) {
			t.Errorf("%s without addresses: %v", p.Name, err)
		}
	}
}

// TestLookup_NothingWorks: if the self-test failed, no pod of the mesh starts, unless a
// backend is set.
func TestLookup_NothingWorks(t *testing.T) {
	t.Parallel()
	n := chaintest.New(t, chaintest.Program(t))
	recordFailure(t, n, "a connection of the app does not come out")
	err := chain(n, n.NewPod("shop", "web", chaintest.Sidecar), chaintest.Stanza{})
	check.Fails(t, err, "no backend can redirect pods on this node", "does not come out")
	check.OK(t, chain(n, n.NewPod("shop", "plain", chaintest.PlainPod), chaintest.Stanza{}), "a pod outside of the mesh")
	forced := n.NewPod("shop", "forced", chaintest.Sidecar)
	if err := chain(n, forced, chaintest.Stanza{"backend": "netlink"}); err != nil || !strings.Contains(rules(t, forced), "ISTIO_OUTPUT") {
		t.Errorf("a backend that is set: %v", err)
	}
}

// TestReport_BusyAgent: an agent without CPU time during a pod's creation still gets the report, and the
// pod does not wait for it.
func TestReport_BusyAgent(t *testing.T) {
	t.Parallel()
	n := chaintest.New(t, chaintest.Program(t))
	busy, reports := make(chan struct{}), make(chan agentapi.Report, 8)
	serveSocket(t, n, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		<-busy
		var report agentapi.Report
		if r.Method == http.MethodPost && json.NewDecoder(r.Body).Decode(&report) == nil {
			reports <- report
		}
	}))
	pod := n.NewPod("shop", "web", chaintest.Sidecar)
	check.OK(t, chain(n, pod, chaintest.Stanza{}))
	close(busy)
	report := <-reports
	if report.Pod != "web" || report.Source != agentapi.SourceAPI || !report.Captured || report.Requests != 1 {
		t.Errorf("it is report %+v", report)
	}
}

// TestLog_OnePost: the node agent gets the whole invocation in one request, including the decision, and so does
// the file; neither has a secret of the pod or the API server.
func TestLog_OnePost(t *testing.T) {
	t.Parallel()
	node := chaintest.New(t, chaintest.Program(t))
	posts := make(chan []string, 16)
	serve(t, node, logSocket, &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		var batch []string
		if err := json.NewDecoder(r.Body).Decode(&batch); err != nil || r.Method != http.MethodPost || r.URL.Path != "/log" {
			t.Errorf("%s %s: %v", r.Method, r.URL, err)
		}
		posts <- batch
	})})
	pod := node.NewPod("apps", "mesh", func(p *kubetest.Pod) {
		chaintest.Sidecar(p)
		p.Containers[1].Env = []kubetest.EnvVar{{Name: "INVALID_DROP", Value: "hunter2-in-the-environment"}}
	})
	check.OK(t, check.Err(node.Add(node.Chain("1.0.0", nil), pod)))
	posted := strings.Join(<-posts, "")
	if len(posts) > 0 {
		t.Errorf("%d more requests for one ADD", len(posts))
	}
	file, err := os.ReadFile(filepath.Join(node.RunDir, "istio-cni.log"))
	check.OK(t, err)
	for _, log := range []string{posted, string(file)} {
		check.Contains(t, log, `"reason":"captured"`, `"capture":true`, `"pod":"apps/mesh"`, "redirected the pod", "INVALID_DROP")
		if strings.Contains(log, "hunter2") || strings.Contains(log, node.API.Token()) {
			t.Errorf("the log has a secret:\n%s", log)
		}
	}
	check.Contains(t, posted, `"scope":"cni-plugin"`)
}

// TestReport_EveryCall: whatever a pod's author or a runtime writes into a text that the plugin quotes, the agent gets the report, and
// report, log and the runtime's error are bounded and printable.
func TestReport_EveryCall(t *testing.T) {
	t.Parallel()
	const terminal = "\x1b[2J\u009b2J\x7f\u202e\u200b\n"
	annotated := func(value string) func(*kubetest.Pod) {
		return func(p *kubetest.Pod) {
			chaintest.Sidecar(p)
			p.Annotations["traffic.sidecar.istio.io/excludeInboundPorts"] = value
		}
	}
	for _, test := range []struct {
		name     string
		describe func(*kubetest.Pod)
		extra    []string
		reason   string
		fails    bool
	}{
		{"an annotation that is refused", annotated(strings.Repeat("<"+terminal, 10_000)), nil, "invalid-settings", true},
		{"an argument of a container", func(p *kubetest.Pod) {
			chaintest.Sidecar(p)
			for i := range p.Containers {
				if p.Containers[i].Name == "istio-proxy" {
					p.Containers[i].Args = []string{"proxy", strings.Repeat("r", 1_400_000) + terminal}
				}
			}
		}, nil, "not-sidecar", false},
		// The sandbox has no address: the call fails after the decision.
		{"a sandbox's name", chaintest.Sidecar, []string{"CNI_CONTAINERID=" + strings.Repeat("c", 120_000)}, "captured", true},
		{"arguments of the runtime", chaintest.Sidecar, []string{"CNI_ARGS=" + strings.Repeat("a"+terminal, 5000)}, "", true},
		{"a name", chaintest.Sidecar, []string{"CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_UID=u;K8S_POD_NAME=" + strings.Repeat(terminal, 5000)}, "", true},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			n := chaintest.New(t, chaintest.Program(t))
			var log bytes.Buffer
			n.Log = &log
			a := serveAgent(t, n, nil)
			// On a busy machine the agent may not answer in time; the plugin then queries the API server.
			pod := n.NewPod("shop", "web", test.describe)
			a.knows(pod, test.describe)
			out, err := n.Ours(n.Chain("1.0.0", longTimeout()), pod, nil, test.extra...)
			check.Equal(t, err != nil, test.fails, err, string(out))
			var answer struct{ Msg, Details string }
			check.OK(t, json.Unmarshal(out, &answer), string(out))
			a.settle(t)
			latest := a.ring.All()
			if len(latest) != 1 {
				t.Fatalf("%d reports", len(latest))
			}
			r := latest[0]
			if r.Reason != test.reason || (r.Error != "") != test.fails || len(r.Container) > 253 || len(r.Detail) > 1<<10 || len(r.Error) > 4<<10 {
				t.Errorf("reported %+v", r)
			}
			if len(answer.Msg) > 4<<10 || len(answer.Details) > 4<<10 {
				t.Errorf("an error of %d and %d bytes", len(answer.Msg), len(answer.Details))
			}
			all := r.Namespace + r.Pod + r.UID + r.Container + r.Detail + r.Error + answer.Msg + answer.Details + strings.ReplaceAll(log.String(), "\n", "")
			if strings.ContainsFunc(all, func(c rune) bool { return !printable.Is(c) }) {
				t.Errorf("not printable: %q", all)
			}
			if log.Len() > 64<<10 {
				t.Errorf("a log of %d bytes", log.Len())
			}
		})
	}
}
