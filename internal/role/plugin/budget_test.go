package plugin_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/selfcheck"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// The kernel (ptrace) and the API server count the costs of a call, not the program itself.
//
// None of these tests is parallel: the plugin waits a quarter of a second for the agent, which runs in this process, and then
// queries the API server, which exceeds the budget.

// budget counts the processes, requests and transactions of a call of the runtime.
type budget struct {
	// processes are the started processes, requests the requests that reach the API server, questions the requests that reach the
	// agent, reports included.
	processes, requests int
	questions           int64
	// batches are transactions of nf_tables.
	batches int
}

// fixture is a node with an agent or without, and a pod on it.
type fixture struct {
	node  *chaintest.Node
	agent *agent
	pod   chaintest.Pod
	input []byte
}

// addressed gives the sandbox addresses of both families, like the previous plugin.
func addressed(tb testing.TB, p chaintest.Pod) {
	tb.Helper()
	for _, command := range [][]string{
		{"link", "add", "eth0", "type", "veth", "peer", "name", "peer0"},
		{"addr", "add", "10.9.0.2/24", "dev", "eth0"},
		{"addr", "add", "fd09::2/64", "dev", "eth0", "nodad"},
	} {
		netnstest.Run(tb, p.Netns, "ip", command...)
	}
}

// newFixture prepares a fixture. The agent knows the pod; without an agent, the API server does.
func newFixture(tb testing.TB, withAgent bool, namespace string, describe func(*kubetest.Pod), stanza chaintest.Stanza) fixture {
	tb.Helper()
	s := fixture{node: chaintest.New(tb, chaintest.Program(tb))}
	s.pod = s.node.NewPod(namespace, "web", nil)
	addressed(tb, s.pod)
	if withAgent {
		s.agent = serveAgent(tb, s.node, stanza)
	}
	s.describe(describe)
	if withAgent {
		s.agent.wake(tb, s)
	}
	// A long time limit makes the plugin wait longer for the agent: budgets must not depend on the load of the machine.
	more := chaintest.Stanza{"plugin_log_level": "info", "api_timeout": "90s"}
	maps.Copy(more, stanza)
	var err error
	if s.input, err = chaintest.Input(s.node.Chain("1.0.0", more), nil); err != nil {
		tb.Fatal(err)
	}
	return s
}

// describe adds the pod to the API server, and to the agent's. On a busy machine the agent may not answer the plugin in time, which
// then queries the API server.
func (s fixture) describe(describe func(*kubetest.Pod)) {
	pod := kubetest.Pod{Namespace: s.pod.Namespace, Name: s.pod.Name, UID: s.pod.UID}
	describe(&pod)
	namespace := fmt.Appendf(nil, `{"apiVersion":"v1","kind":"Namespace","metadata":{"name":%q}}`, pod.Namespace)
	s.node.API.SetPod(pod)
	s.node.API.Set(namespace)
	if s.agent != nil {
		s.agent.SetPod(pod)
		s.agent.Set(namespace)
	}
}

// wake makes the agent connect to its API server: on a real node it is connected when a pod starts.
func (*agent) wake(tb testing.TB, s fixture) {
	tb.Helper()
	client, err := agentapi.Dial(tb.Context(), filepath.Join(s.node.RunDir, agentapi.SocketName))
	check.OK(tb, err)
	defer client.Close() //nolint:errcheck // the request has ended
	check.OK(tb, check.Err(client.Pod(tb.Context(), agentapi.Key{Namespace: s.pod.Namespace, Name: s.pod.Name, UID: s.pod.UID}, false)))
}

// do runs a command that must succeed within the budget.
func (s fixture) do(t *testing.T, command string, want budget) *chaintest.Record {
	t.Helper()
	requests, questions := len(s.node.API.Requests()), int64(0)
	if s.agent != nil {
		questions = s.agent.calls.Load()
	}
	r, stdout := s.node.Traced(command, s.pod, s.input)
	if r.Code != 0 {
		t.Fatalf("%s: exit code %d: %s", command, r.Code, stdout)
	}
	got := budget{processes: r.Processes(), requests: len(s.node.API.Requests()) - requests, batches: batches(r)}
	if s.agent != nil {
		s.agent.settle(t)
		got.questions = s.agent.calls.Load() - questions
	}
	check.Equal(t, got, want, command, r.Calls)
	if tcp := r.Sockets("AF_INET") + r.Sockets("AF_INET6"); (want.requests > 0) != (tcp > 0) {
		t.Errorf("%s makes %d sockets for IP, and %d requests", command, tcp, want.requests)
	}
	if asked := r.Under("xtables.lock"); len(asked) > 0 {
		t.Errorf("%s asks for the node's iptables lock: %q", command, asked)
	}
	return r
}

// batches counts the nf_tables transactions that a run sent.
func batches(r *chaintest.Record) int { return len(r.Messages(chaintest.Message.BeginsBatch)) }

// removals returns the messages that remove anything.
func removals(r *chaintest.Record) []chaintest.Message { return r.Messages(chaintest.Message.Removes) }

// changes returns the messages that change anything.
func changes(r *chaintest.Record) []chaintest.Message { return r.Messages(chaintest.Message.Writes) }

// The modes and backends that a pod and a node can choose.
func byTPROXY(p *kubetest.Pod) {
	chaintest.Sidecar(p)
	p.Annotations["sidecar.istio.io/interceptionMode"] = "TPROXY"
}

func dualStack(p *kubetest.Pod) {
	chaintest.Sidecar(p)
	p.Containers[1].Env = append(p.Containers[1].Env, kubetest.EnvVar{Name: "ISTIO_DUAL_STACK", Value: "true"})
}

// TestBudget_MeshPod: a new pod costs no process, one question and one transaction that removes nothing; a pod that has its
// rules, and CHECK, cost only the question; DEL costs nothing.
func TestBudget_MeshPod(t *testing.T) {
	for _, backend := range []string{"auto", "netlink", "native"} {
		for mode, describe := range map[string]func(*kubetest.Pod){"REDIRECT": chaintest.Sidecar, "TPROXY": byTPROXY, "dual stack": dualStack} {
			for _, withAgent := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s %s agent %t", backend, mode, withAgent), func(t *testing.T) {
					s := newFixture(t, withAgent, "shop", describe, chaintest.Stanza{"backend": backend})
					asked := budget{requests: 1}
					if withAgent {
						asked = budget{questions: 2}
					}
					written := asked
					written.batches = 1
					r := s.do(t, "ADD", written)
					if gone := removals(r); len(gone) > 0 {
						t.Errorf("ADD of a new pod removes %+v", gone)
					}
					if r = s.do(t, "ADD", asked); len(changes(r)) > 0 {
						t.Errorf("ADD of a pod that has its rules writes %+v", changes(r))
					}
					if withAgent {
						asked.questions = 1 // CHECK is not reported
					}
					if r = s.do(t, "CHECK", asked); len(changes(r)) > 0 {
						t.Errorf("CHECK writes %+v", changes(r))
					}
					untouched(t, s, s.do(t, "DEL", budget{}))
				})
			}
		}
	}
}

// TestBudget_NothingReadTwice: the self-test's verdict, the names of the legacy tables and the pod's addresses are each read
// once. The plugin reads no other interface of the namespace, and no time zone of the node.
//
// Requests under the kernel's RTNL mutex, one for all namespaces, wait for every interface of the node that appears or disappears. A list
// of the addresses of all families needs it; a list of IPv4 addresses does not since Linux 6.9. IPv6 addresses are read from procfs, and
// the address that dual stack needs is written.
func TestBudget_NothingReadTwice(t *testing.T) {
	list := fmt.Sprint(unix.RTM_GETADDR, " of family ", unix.AF_INET)
	add := fmt.Sprint(unix.RTM_NEWADDR, " of family ", unix.AF_INET6)
	rules, rules6 := fmt.Sprint(unix.RTM_GETRULE, " of family ", unix.AF_INET), fmt.Sprint(unix.RTM_GETRULE, " of family ", unix.AF_INET6)
	for _, c := range []struct {
		command   string
		describe  func(*kubetest.Pod)
		want      budget
		addresses int
		routing   []string // in numeric order
	}{
		{"ADD", chaintest.Sidecar, budget{questions: 2, batches: 1}, 1, []string{list}},
		{"ADD", dualStack, budget{questions: 2, batches: 1}, 2, []string{add, list}}, // the address may exist already
		{"CHECK", dualStack, budget{questions: 1}, 3, []string{list, rules6, rules}},
	} {
		s := newFixture(t, true, "shop", c.describe, nil)
		verdict := filepath.Join(s.node.RunDir, selfcheck.FileName)
		check.OK(t, os.WriteFile(verdict, []byte("{}"), 0o600))
		if c.command == "CHECK" {
			s.do(t, "ADD", budget{questions: 2, batches: 1})
		}
		r := s.do(t, c.command, c.want)
		for _, file := range []string{verdict, "ip_tables_names", "ip6_tables_names"} {
			check.Equal(t, r.Opened(file), 1, c.command, "opens", file)
		}
		check.Equal(t, r.Opened("/net/if_inet6"), c.addresses, c.command, "reads the IPv6 addresses")
		check.Equal(t, r.Opened("/etc/localtime"), 0, c.command, "reads the node's time zone")
		var got []string
		for _, m := range r.Messages(func(m chaintest.Message) bool { return !m.Netfilter }) {
			got = append(got, fmt.Sprint(m.Type, " of family ", m.Family))
		}
		slices.Sort(got) // another thread can send the second one
		check.Diff(t, c.command+" sends rtnetlink", c.routing, got)
	}
}

// untouched fails the test if a run created a socket or used a path below the agent's directory.
func untouched(t *testing.T, s fixture, r *chaintest.Record) {
	t.Helper()
	if asked := r.Under(s.node.RunDir); len(asked) > 0 {
		t.Errorf("asked the kernel for %q", asked)
	}
	unconnected(t, r)
}

func unconnected(t *testing.T, r *chaintest.Record) {
	t.Helper()
	for _, domain := range []string{"AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"} {
		if n := r.Sockets(domain); n > 0 {
			t.Errorf("made %d sockets of family %s", n, domain)
		}
	}
}

// TestBudget_PodOutsideTheMesh: the runtime's annotations suffice for the decision.
func TestBudget_PodOutsideTheMesh(t *testing.T) {
	for _, withAgent := range []bool{true, false} {
		t.Run(fmt.Sprintf("agent %t", withAgent), func(t *testing.T) {
			s := newFixture(t, withAgent, "shop", chaintest.PlainPod, delivered(`{"kubernetes.io/config.seen":"x"}`))
			untouched(t, s, s.do(t, "ADD", budget{}))
			unconnected(t, s.do(t, "CHECK", budget{}))
			for _, command := range []string{"DEL", "VERSION"} {
				r := s.do(t, command, budget{})
				untouched(t, s, r)
				if opened := r.Under(s.pod.Netns); len(opened) > 0 {
					t.Errorf("%s opened the namespace: %q", command, opened)
				}
			}
		})
	}
}

// TestBudget_ExcludedPod: the pod's name suffices, and only the report is sent.
func TestBudget_ExcludedPod(t *testing.T) {
	s := newFixture(t, true, "kube-system", chaintest.Sidecar, chaintest.Stanza{"exclude_namespaces": []string{"kube-system"}})
	r := s.do(t, "ADD", budget{questions: 1})
	if n := r.Sockets("AF_NETLINK"); n > 0 {
		t.Errorf("made %d netlink sockets", n)
	}
	s = newFixture(t, false, "kube-system", chaintest.Sidecar, chaintest.Stanza{"exclude_namespaces": []string{"kube-system"}})
	s.do(t, "ADD", budget{})
}

// TestBudget_SeesTools proves the other tests: it sees started processes, files and sockets in use and removed
// rules.
func TestBudget_SeesTools(t *testing.T) {
	s := newFixture(t, true, "shop", dualStack, chaintest.Stanza{"backend": "iptables"})
	r, stdout := s.node.Traced("ADD", s.pod, s.input)
	if r.Code != 0 || r.Processes() == 0 || batches(r) < 2 {
		t.Errorf("exit code %d, %d processes, %d batches: %s", r.Code, r.Processes(), batches(r), stdout)
	}
	if r.Sockets("AF_UNIX") == 0 || r.Sockets("AF_NETLINK") == 0 || len(r.Under(s.agent.socket)) == 0 || len(r.Under(s.pod.Netns)) == 0 {
		t.Errorf("calls %q", r.Calls)
	}
	// Another mode on the same pod: the netlink backend removes rules as well, and policy rule and route of TPROXY.
	s = newFixture(t, true, "shop", chaintest.Sidecar, nil)
	gone := map[bool]bool{}
	for _, mode := range []func(*kubetest.Pod){chaintest.Sidecar, byTPROXY, chaintest.Sidecar} {
		s.agent.knows(s.pod, mode)
		for _, m := range removals(s.do(t, "ADD", budget{questions: 2, batches: 1})) {
			gone[m.Netfilter] = true
		}
	}
	if !gone[true] || !gone[false] {
		t.Error("nothing is removed where the mode changes")
	}
}

// heavy are packages that are initialised only after a call without the API server has ended. More of k8s.io cannot be expected: Go
// initialises packages with few dependencies before package net, which the plugin needs.
var heavy = []string{"k8s.io/client-go/", "k8s.io/api/", "k8s.io/apimachinery/pkg/apis/", "k8s.io/apimachinery/pkg/runtime "}

// initialised returns the packages of heavy that a call initialises.
func (s fixture) initialised(t *testing.T, name, command string) (found []string) {
	t.Helper()
	cmd := s.node.Command(command, s.pod, s.input)
	cmd.Args[0] = name
	check.OK(t, netns.Do(s.node.Netns, func() error {
		all, err := chaintest.Inits(cmd)
		for _, one := range all {
			if slices.ContainsFunc(heavy, func(prefix string) bool { return strings.HasPrefix(one.Package+" ", prefix) }) {
				found = append(found, one.Package)
			}
		}
		return err
	}))
	return found
}

// TestCommand_EndsBeforeClientGo: only a call that needs the API server initialises client-go.
func TestCommand_EndsBeforeClientGo(t *testing.T) {
	for _, test := range []struct {
		command   string
		withAgent bool
		name      string
		needed    bool
	}{
		{"ADD", true, "/opt/cni/bin/istio-cni", false},
		{"CHECK", true, "istio-cni", false},
		{"DEL", false, "istio-cni", false},
		{"GC", false, "istio-cni", false},
		{"VERSION", false, "istio-cni", false},
		{"ADD", false, "istio-cni", true},
		{"ADD", true, "another-name", true},
	} {
		t.Run(fmt.Sprintf("%s of %s with agent=%t", test.command, filepath.Base(test.name), test.withAgent), func(t *testing.T) {
			s := newFixture(t, test.withAgent, "shop", chaintest.Sidecar, nil)
			if test.command == "CHECK" {
				s.initialised(t, test.name, "ADD")
			}
			found := s.initialised(t, test.name, test.command)
			if slices.Contains(found, "k8s.io/client-go/rest") != test.needed || !test.needed && found != nil {
				t.Errorf("initialised are %q, want client-go %t", found, test.needed)
			}
			if test.command == "ADD" && !s.pod.Captured(t) {
				t.Error("the pod is not redirected")
			}
		})
	}
}

// mostMemory is the bound in docs/parity.md for a call about the heaviest possible pod, in kB.
const mostMemory = 100 << 10

// list returns a number of entries, in one order or the reverse.
func list(n int, backwards bool, entry func(int) string) string {
	all := make([]string, n)
	for i := range all {
		at := i
		if backwards {
			at = n - 1 - i
		}
		all[at] = entry(i)
	}
	return strings.Join(all, ",")
}

// heaviest is a pod whose annotations have the maximal number of entries, and whose proxy has every switch on.
func heaviest(mode string, ipv6, backwards bool) func(*kubetest.Pod) {
	port := func(i int) string { return strconv.Itoa(10000 + i) }
	network := func(first int) func(int) string {
		return func(i int) string {
			if ipv6 {
				return fmt.Sprintf("fd%02x:1234:5678:9abc:def0:1234:%x:0/112", first, i)
			}
			return fmt.Sprintf("110.%d.%d.%d/32", first, i/256, i%256)
		}
	}
	link := func(kind string) func(int) string {
		return func(i int) string { return fmt.Sprintf("interface-%s%03d", kind, i) }
	}
	return func(p *kubetest.Pod) {
		chaintest.Sidecar(p)
		maps.Copy(p.Annotations, map[string]string{
			sidecar.ModeKey:                 mode,
			sidecar.OutboundKey:             list(1000, backwards, network(1)),
			sidecar.OutboundExcludeKey:      list(1000, backwards, network(2)),
			sidecar.InboundPortsKey:         map[string]string{"REDIRECT": "*", "TPROXY": list(1000, backwards, port)}[mode],
			sidecar.InboundPortsExcludeKey:  list(1000, backwards, port),
			sidecar.OutboundPortsKey:        list(1000, backwards, port),
			sidecar.OutboundPortsExcludeKey: list(1000, backwards, port),
			sidecar.ExcludeInterfacesKey:    list(100, backwards, link("x")),
			sidecar.RerouteInterfacesKey:    list(8, backwards, link("v")),
		})
		for _, name := range []string{"ISTIO_META_DNS_CAPTURE", "ISTIO_DUAL_STACK", "INVALID_DROP"} {
			p.Containers[1].Env = append(p.Containers[1].Env, kubetest.EnvVar{Name: name, Value: "true"})
		}
	}
}

// TestAdd_HeaviestPod checks the promised memory of each call about a pod whose annotations are all at their bounds:
// for a new pod, for a pod that has its rules, and for a pod whose rules all differ.
func TestAdd_HeaviestPod(t *testing.T) {
	for name, stanza := range backends() {
		for _, mode := range []string{"REDIRECT", "TPROXY"} {
			for _, ipv6 := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s %s IPv6 %t", name, mode, ipv6), func(t *testing.T) {
					t.Parallel() // either agent or API server may answer: only memory is measured
					s := newFixture(t, true, "shop", heaviest(mode, ipv6, true), stanza)
					for _, step := range []struct {
						command   string
						backwards bool
					}{{"ADD", true}, {"ADD", true}, {"CHECK", true}, {"ADD", false}, {"CHECK", false}} {
						s.describe(heaviest(mode, ipv6, step.backwards))
						memory, code, stdout := s.node.Measured(step.command, s.pod, s.input)
						t.Logf("%s, backwards %t: %d MB", step.command, step.backwards, memory>>10)
						if code != 0 || memory > mostMemory {
							t.Errorf("%s, backwards %t: exit code %d, %d kB: %s", step.command, step.backwards, code, memory, stdout)
						}
					}
				})
			}
		}
	}
}

// TestAdd_TooLongList: the plugin changes nothing, and its answer is short and names all errors.
func TestAdd_TooLongList(t *testing.T) {
	s := newFixture(t, true, "shop", func(p *kubetest.Pod) {
		chaintest.Sidecar(p)
		p.Annotations[sidecar.InboundPortsExcludeKey] = list(12000, false, func(i int) string { return strconv.Itoa(10000 + i) })
		p.Annotations[sidecar.OutboundKey] = "10.0.0.999"
	}, nil)
	for _, command := range []string{"ADD", "CHECK"} {
		memory, code, stdout := s.node.Measured(command, s.pod, s.input)
		var answer struct {
			Code         int
			Msg, Details string
		}
		if err := json.Unmarshal(stdout, &answer); err != nil || answer.Code != 100 || code != 1 || len(stdout) > 1<<10 {
			t.Errorf("%s: %v, exit code %d, %d bytes: %.1000s", command, err, code, len(stdout), stdout)
		}
		check.Contains(t, answer.Msg+answer.Details,
			"refuses pod shop/web", sidecar.InboundPortsExcludeKey, "lists 12000 entries, more than 1000", sidecar.OutboundKey, "10.0.0.999")
		if rules := everyRule(t, s.pod.Netns); memory > mostMemory/2 || rules != "" {
			t.Errorf("%s: %d kB, rules %s", command, memory, rules)
		}
	}
}
