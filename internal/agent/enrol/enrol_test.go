package enrol_test

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/enrol"
	"github.com/meshcni/istio-cni/internal/agent/eventrecorder"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podcache"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/agent/probes"
	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/agent/ztunnels"
	"github.com/meshcni/istio-cni/internal/agent/ztunnels/ztunneltest"
	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/probeset"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/route"
	"github.com/meshcni/istio-cni/internal/node/sandbox/sandboxtest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

const (
	node1   = "node-1"
	enabled = ambient.RedirectionEnabled
	pending = ambient.RedirectionPending
	label   = "istio.io/dataplane-mode"
)

// selectors are those of the chart.
const selectors = `[{"podSelector":{"matchLabels":{"istio.io/dataplane-mode":"ambient"}}},
{"podSelector":{"matchExpressions":[{"key":"istio.io/dataplane-mode","operator":"NotIn","values":["none"]}]},
"namespaceSelector":{"matchLabels":{"istio.io/dataplane-mode":"ambient"}}}]`

// fixture is an API server and a node, on which agents run one after the other.
type fixture struct {
	*sandboxtest.Node

	server          *kubetest.Server
	socket          string
	conf            atomic.Pointer[cniconf.NetConf]
	log             *agenttest.Buffer
	pods, processes int // number of them so far
	moves           atomic.Int64

	mu     sync.Mutex
	failed map[metrics.AmbientStep]int
}

// newParallel is newFixture for a test that becomes parallel here.
func newParallel(t *testing.T) *fixture {
	t.Helper()
	t.Parallel()
	return newFixture(t)
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{
		Node: sandboxtest.New(t), server: kubetest.NewServer(t), socket: filepath.Join(agenttest.SocketDir(t), "z.sock"), log: &agenttest.Buffer{},
		failed: map[metrics.AmbientStep]int{},
	}
	f.conf.Store(&cniconf.NetConf{AmbientEnabled: true, Ambient: ambient.DefaultConfig()})
	f.namespace("")
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log:\n%s\nrequests:\n%s", f.log, strings.Join(f.server.Requests(), "\n"))
		}
	})
	return f
}

// namespace makes or changes the namespace of the pods with a value of the label, "" for none.
func (f *fixture) namespace(mode string) {
	f.Helper()
	labels := map[string]string{}
	if mode != "" {
		labels[label] = mode
	}
	f.server.Set(kubetest.Namespace("shop", labels))
}

func (f *fixture) set(object any) {
	f.Helper()
	data, err := json.Marshal(object)
	f.Do(err)
	f.server.Set(data)
}

// pod is a pod of namespace shop.
type pod struct {
	f *fixture

	name, uid, address, path  string
	labels, annotations       map[string]string
	phase, account            string
	addressless, host, ending bool
	known                     bool // to the API server
}

// pod makes a running pod with a namespace that is found, and its object.
func (f *fixture) pod(name string, change ...func(*pod)) *pod {
	f.Helper()
	f.pods++
	p := &pod{
		f: f, name: name, uid: fmt.Sprintf("00000000-0000-4000-8000-%012x", f.pods), address: fmt.Sprintf("10.88.%d.%d", f.pods/200, 10+f.pods%200),
		labels: map[string]string{}, annotations: map[string]string{}, account: "web",
	}
	for _, c := range change {
		c(p)
	}
	p.sandbox()
	p.publish()
	return p
}

// labelled puts a pod into ambient mode by its own label.
func labelled(p *pod) { p.labels[label] = "ambient" }

// was makes a pod one that an earlier agent has enrolled.
func was(value string) func(*pod) {
	return func(p *pod) { p.annotations[ambient.RedirectionKey] = value }
}

// sandbox gives the pod a new network namespace, with a process.
func (p *pod) sandbox() {
	p.f.Helper()
	p.path = p.f.Sandbox(p.address + "/24")
	p.f.processes++
	p.f.Process(fmt.Sprint(1000+p.f.processes), p.path, p.uid)
}

// publish tells the API server of the pod. It keeps the annotation that the agent has written.
func (p *pod) publish() {
	p.f.Helper()
	annotations := map[string]any{}
	for k, v := range p.annotations {
		annotations[k] = v
	}
	if p.known {
		delete(annotations, ambient.RedirectionKey)
		if value := p.annotation(); value != "" {
			annotations[ambient.RedirectionKey] = value
		}
	}
	p.known = true
	metadata := map[string]any{"name": p.name, "namespace": "shop", "uid": p.uid, "labels": p.labels, "annotations": annotations}
	if p.ending {
		metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
	}
	status := map[string]any{"phase": cmp.Or(p.phase, "Running")}
	if !p.addressless {
		status["podIP"], status["podIPs"] = p.address, []any{map[string]any{"ip": p.address}}
	}
	p.f.set(map[string]any{
		"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "status": status,
		"spec": map[string]any{
			"nodeName": node1, "hostNetwork": p.host, "serviceAccountName": p.account, "containers": []any{map[string]any{"name": "app"}},
		},
	})
}

func (p *pod) object() string { return "/api/v1/namespaces/shop/pods/" + p.name }

// annotation returns the value in the API server.
func (p *pod) annotation() string {
	p.f.Helper()
	var object struct {
		Metadata struct{ Annotations map[string]string }
	}
	p.f.Do(json.Unmarshal(p.f.server.Object(p.object()), &object))
	return object.Metadata.Annotations[ambient.RedirectionKey]
}

// relabel changes the pod's label, "" for none.
func (p *pod) relabel(mode string) {
	p.f.Helper()
	if p.labels[label] = mode; mode == "" {
		delete(p.labels, label)
	}
	p.publish()
}

func (p *pod) space() redirection.Namespace {
	p.f.Helper()
	space, err := netns.Open(p.path)
	p.f.Do(err)
	p.f.Cleanup(space.Close)
	backend := p.f.conf.Load().Backend
	if backend == redirect.Tools {
		backend = redirect.Netlink
	}
	return redirection.Namespace{NetNS: space, Log: slog.New(slog.DiscardHandler), Backend: backend}
}

// spec returns the wanted redirection.
func (p *pod) spec() ambient.Spec {
	spec, _ := ambient.Of(p.f.conf.Load().Ambient, p.annotations)
	return spec
}

// agent is a running agent.
type agent struct {
	f *fixture

	pods *enrol.Controller
	// stop ends it as kill -9 would: nothing is cleaned up.
	stop func()
}

// agent starts an agent, which ends with the test.
func (f *fixture) agent(change ...func(*enrol.Options)) *agent {
	f.Helper()
	log := slog.New(slog.NewTextHandler(f.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	api, err := kube.NewClient(kube.Config{
		Kubeconfig: f.server.Kubeconfig(f.T), Timeout: time.Minute, IdleTimeout: time.Hour,
		Backoff: &wait.Backoff{Duration: time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 4, Cap: 4 * time.Millisecond},
	})
	f.Do(err)
	f.Cleanup(api.Close)
	compiled, err := selector.ParseAmbient([]byte(selectors))
	f.Do(err)
	store := podcache.NewStore(podcache.Options{
		API: api, Node: node1, Log: log, Count: func(metrics.PodEvent) {}, Ambient: func() *selector.Ambient { return compiled },
	})
	host, err := netns.Open(f.Host)
	f.Do(err)
	f.Cleanup(host.Close)
	a := &agent{f: f}
	notify := func(uid string) { a.pods.Notify(uid) }
	server, err := ztunnels.Open(f.Context(), ztunnels.Options{Path: f.socket, Log: log, Changed: notify, Connected: func(int) {}, AcceptInterval: time.Millisecond})
	f.Do(err)
	config := ambient.DefaultConfig()
	o := enrol.Options{
		Env: podwork.Env{
			Log: log, Node: node1, Host: node1, Find: f.Find, Plugin: func() (cniconf.NetConf, error) { return *f.conf.Load(), nil },
			Events: eventrecorder.New(api, eventrecorder.Options{Log: log, Count: func(eventrecorder.Result) {}}),
		},
		API: api, Follow: store.Follow, Pod: store.Pod, Places: f.Places, Host: host.Inode(), Ztunnels: server, SystemNamespace: "istio-system",
		Probes: probes.New(probes.Options{Host: host, V4: config.ProbeV4, V6: config.ProbeV6, IPv6: true, Log: log, Changed: notify}),
		Moved:  func(types.NamespacedName) { f.moves.Add(1) },
		Failed: func(s metrics.AmbientStep) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.failed[s]++
		},
	}
	for _, c := range change {
		c(&o)
	}
	a.pods = enrol.New(o)
	watch := agenttest.Go(f.T, store.Run)
	run := agenttest.Go(f.T, a.pods.Run)
	a.stop = func() {
		run()
		watch()
		o.Events.Shutdown()
	}
	f.Cleanup(o.Events.Shutdown)
	return a
}

// mesh starts an agent and a ztunnel, and waits for its snapshot.
func (f *fixture) mesh() (a *agent, z *ztunneltest.Ztunnel) {
	f.Helper()
	a, z = f.agent(), f.ztunnel(ztunneltest.Options{})
	agenttest.Eventually(f.T, "no snapshot", z.Ready)
	return a, z
}

// ztunnel starts a ztunnel.
func (f *fixture) ztunnel(o ztunneltest.Options) *ztunneltest.Ztunnel {
	f.Helper()
	return ztunneltest.Start(f.T, f.socket, o)
}

// entry returns the UID in the node's probe set for the pod's address.
func (p *pod) entry() string {
	p.f.Helper()
	host, err := netns.Open(p.f.Host)
	p.f.Do(err)
	defer host.Close()
	all, err := probeset.Read(host)
	p.f.Do(err)
	return all[netip.MustParseAddr(p.address)]
}

// problem says what is missing of an enrolled pod, "" if nothing is.
func (p *pod) problem(z *ztunneltest.Ztunnel) string {
	p.f.Helper()
	space := p.space()
	defer space.NetNS.Close()
	report, err := space.Verify(p.f.Context(), p.spec())
	p.f.Do(err)
	switch inode := z.Pods()[p.uid]; {
	case !report.Clean() || !report.Mesh:
		return fmt.Sprintf("rules of %s: %v %v", p.name, report.Diffs, report.Routing)
	case inode != space.NetNS.Inode():
		return fmt.Sprintf("ztunnel has %s in %v, not %v", p.name, inode, space.NetNS.Inode())
	case p.entry() != p.uid:
		return fmt.Sprintf("the probe set has %q for %s", p.entry(), p.name)
	case p.annotation() != enabled:
		return fmt.Sprintf("annotation of %s: %q", p.name, p.annotation())
	}
	return ""
}

// enrolled waits until the pod is enrolled.
func (p *pod) enrolled(z *ztunneltest.Ztunnel) {
	p.f.Helper()
	agenttest.Until(p.f.T, func() string { return p.problem(z) }, func() bool { return p.problem(z) == "" })
}

// trace says what is left of a pod that is not in the mesh, "" if nothing is.
func (p *pod) trace(z *ztunneltest.Ztunnel) string {
	p.f.Helper()
	space := p.space()
	defer space.NetNS.Close()
	report, err := space.Verify(p.f.Context(), p.spec())
	p.f.Do(err)
	left, err := netns.In(space.NetNS, func() (route.Want, error) { return route.Leftovers(ambient.MarkMask) })
	p.f.Do(err)
	switch _, served := z.Pods()[p.uid]; {
	case p.annotation() != "":
		return "annotation " + p.annotation()
	case served:
		return "ztunnel serves it"
	case report.Mesh || len(left.Policy) > 0:
		return fmt.Sprintf("rules or routing: %v %v", report.Diffs, left)
	case p.entry() != "":
		return "the probe set has " + p.entry()
	}
	return ""
}

// released waits until nothing of the mesh is left.
func (p *pod) released(z *ztunneltest.Ztunnel) {
	p.f.Helper()
	agenttest.Until(p.f.T, func() string { return p.trace(z) }, func() bool { return p.trace(z) == "" })
}

// event is what the plugin sends for the pod.
func (p *pod) event() agentapi.Event {
	path := p.path
	if strings.HasPrefix(path, "/proc/") {
		path = p.f.Mount(path, fmt.Sprint("cni-", p.name, p.f.processes))
	}
	return agentapi.Event{
		Netns: path, PodName: p.name, PodNamespace: "shop", PodUID: p.uid,
		IPs: []agentapi.EventIP{{Address: net.IPNet{IP: net.ParseIP(p.address), Mask: net.CIDRMask(24, 32)}}},
	}
}

// patches returns the number of requests that wrote an annotation.
func (f *fixture) patches() (n int) {
	for _, r := range f.server.Requests() {
		if strings.HasPrefix(r, "PATCH ") {
			n++
		}
	}
	return n
}

func TestEnrol_ByLabel(t *testing.T) {
	t.Parallel()
	for name, choose := range map[string]func(*fixture, *pod){
		"pod":       func(_ *fixture, p *pod) { p.relabel("ambient") },
		"namespace": func(f *fixture, _ *pod) { f.namespace("ambient") },
		"native":    func(_ *fixture, p *pod) { p.relabel("ambient") },
		"programs":  func(_ *fixture, p *pod) { p.relabel("ambient") },
	} {
		t.Run(name, func(t *testing.T) {
			f := newParallel(t)
			conf := *f.conf.Load()
			switch name {
			case "native":
				conf.Backend = redirect.Native
			case "programs": // there are none: they are not used
				conf.Backend, conf.ForceIptables = redirect.Tools, "legacy"
			}
			f.conf.Store(&conf)
			p, out := f.pod("web"), f.pod("out", func(p *pod) { p.labels[label] = "none" })
			_, z := f.mesh()
			if left := p.trace(z); left != "" {
				t.Fatalf("before: %s", left)
			}
			choose(f, p)
			p.enrolled(z)
			check.Equal(t, out.trace(z), "", "a pod that opts out")
			check.Equal(t, f.patches(), 2, "patches")
			f.namespace("")
			p.relabel("")
			p.released(z)
		})
	}
}

// TestEnrol_Order: each step waits for the one before, and release takes the annotation first.
func TestEnrol_Order(t *testing.T) {
	f := newParallel(t)
	p := f.pod("web", labelled)
	f.agent()
	answer := make(chan struct{})
	z := f.ztunnel(ztunneltest.Options{})
	z.Behave(func(z *ztunneltest.Ztunnel, r ztunneltest.Request) {
		if r.UID == p.uid {
			if p.entry() != "" || p.annotation() == enabled {
				t.Errorf("at %s: the probe set has %q, the annotation is %q", r, p.entry(), p.annotation())
			}
			space := p.space()
			if report, err := space.Verify(t.Context(), p.spec()); err != nil || !report.Mesh != (r.Kind.String() == "Del") && !report.Clean() {
				t.Errorf("at %s: rules %v, %v", r, report.Diffs, err)
			}
			<-answer
		}
		z.Serve(r)
	})
	agenttest.Eventually(t, "ztunnel is not told of the pod", func() bool {
		return slices.ContainsFunc(z.Requests(), func(r ztunneltest.Request) bool { return r.UID == p.uid })
	})
	close(answer)
	p.enrolled(z)
	z.Behave(func(z *ztunneltest.Ztunnel, r ztunneltest.Request) {
		if r.UID == p.uid && p.annotation() == enabled {
			t.Errorf("at %s: the annotation is still %q", r, enabled)
		}
		z.Serve(r)
	})
	p.relabel("")
	p.released(z)
}

// TestEnrol_WithoutZtunnel: a running pod keeps its traffic until there is a ztunnel. After the end of ztunnel the annotation stays, and
// the status says what is missing until the next one serves the pod.
func TestEnrol_WithoutZtunnel(t *testing.T) {
	f := newParallel(t)
	p := f.pod("web", labelled)
	a := f.agent()
	p.misses(a, "no ztunnel")
	if p.annotation() != pending || p.rules() {
		t.Errorf("annotation %q, rules: %t; want pending, and none", p.annotation(), p.rules())
	}
	z := f.ztunnel(ztunneltest.Options{})
	p.enrolled(z)
	p.misses(a, "")
	z.Close()
	p.misses(a, "ztunnel")
	check.Equal(t, p.annotation(), enabled, "the annotation")
	p.enrolled(f.ztunnel(ztunneltest.Options{}))
	p.misses(a, "")
	check.Equal(t, f.moves.Load(), 4, "changes that were told, to missing and to enrolled, twice,")
}

// missing returns the missing step.
func (p *pod) missing(a *agent) string {
	s, _ := a.pods.Status(p.uid)
	return s.Missing
}

// misses waits until a step with a text is missing, "" for none.
func (p *pod) misses(a *agent, step string) {
	p.f.Helper()
	agenttest.Until(p.f.T, func() string { return p.missing(a) }, func() bool {
		s, _ := a.pods.Status(p.uid)
		return s.Wanted && (s.Missing == "") == (step == "") && strings.Contains(s.Missing, step)
	})
}

// TestStatus_AddressTaken: an enrolled pod that leaves the probe set has a missing step.
func TestStatus_AddressTaken(t *testing.T) {
	f := newParallel(t)
	p := f.pod("web", labelled)
	var set *probes.Keeper
	a := f.agent(func(o *enrol.Options) { set = o.Probes })
	f.ztunnel(ztunneltest.Options{})
	p.misses(a, "")
	set.Put("another", []netip.Addr{netip.MustParseAddr(p.address)})
	p.misses(a, "the probe set of the node: address "+p.address+" is pod another's")
	set.Remove("another")
	p.misses(a, "")
}

// TestEnrol_Refused: ztunnel tries again by itself, and does not say when it succeeds.
func TestEnrol_Refused(t *testing.T) {
	f := newParallel(t)
	p, other := f.pod("web", labelled), f.pod("other", labelled)
	a, z := f.mesh()
	var tries atomic.Int64
	z.Behave(func(z *ztunneltest.Ztunnel, r ztunneltest.Request) {
		if r.UID == p.uid && tries.Add(1) < 3 {
			z.Ack("failure to start proxy : address in use")
			return
		}
		z.Serve(r)
	})
	other.enrolled(z)
	p.enrolled(z)
	agenttest.Eventually(t, "they are not counted", func() bool {
		enrolled, waiting := a.pods.Counts()
		return enrolled == 2 && waiting == 0
	})
	f.mu.Lock()
	defer f.mu.Unlock()
	check.Equal(t, f.failed[metrics.StepZtunnel], 2, "failures counted")
}

func TestAdd(t *testing.T) {
	f := newParallel(t)
	a, z := f.mesh()
	p := f.pod("new", labelled, func(p *pod) { p.addressless, p.phase = true, "Pending" })
	agenttest.Eventually(t, "the watch does not deliver the pod", func() bool {
		_, known := a.pods.Status(p.uid)
		return known
	})
	before := len(f.server.Requests())
	check.OK(t, a.pods.Add(t.Context(), p.event()))
	check.Equal(t, p.problem(z), "", "after ADD")
	if sent := f.server.Requests()[before:]; len(sent) != 1 {
		t.Errorf("requests: %q, want the patch alone", sent)
	}
	p.addressless = false // the kubelet publishes the address later
	p.publish()
	p.sandbox() // the runtime repeats the sandbox
	check.OK(t, a.pods.Add(t.Context(), p.event()))
	p.enrolled(z)
}

// TestAdd_NoAddress: an address that is known later is put into the probe set then.
func TestAdd_NoAddress(t *testing.T) {
	f := newParallel(t)
	a, z := f.mesh()
	p := f.pod("new", labelled, func(p *pod) { p.addressless = true })
	event := p.event()
	event.IPs = nil
	check.OK(t, a.pods.Add(t.Context(), event))
	check.Equal(t, p.annotation(), enabled)
	p.addressless = false
	p.publish()
	p.enrolled(z)
}

func TestAdd_Refused(t *testing.T) {
	f := newParallel(t)
	a, z := f.mesh()
	starting := func(name string, change ...func(*pod)) *pod {
		return f.pod(name, append(change, func(p *pod) { p.addressless = true })...)
	}
	outside, nacked, wrong := starting("outside"), starting("nacked", labelled), starting("wrong", labelled)
	host := starting("host", labelled)
	host.path = f.Host
	wrong.path = "/var/run/netns/there-is-none"
	unknown := *nacked
	unknown.name = "unknown"
	z.Behave(func(z *ztunneltest.Ztunnel, _ ztunneltest.Request) { z.Ack("failure to start proxy : no more files") })
	for p, want := range map[*pod]string{
		outside: "not eligible", nacked: "no more files", wrong: "there-is-none", &unknown: "not found", host: "node's own",
	} {
		event := p.event()
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
			defer cancel()
			check.Fails(t, a.pods.Add(ctx, event), want)
		})
	}
}

// TestStart_Snapshot: a new agent tells ztunnel of all pods, changes nothing, and finds what a killed one has begun.
func TestStart_Snapshot(t *testing.T) {
	f := newParallel(t)
	var pods []*pod
	for i := range 20 {
		pods = append(pods, f.pod(fmt.Sprintf("web-%d", i), labelled))
	}
	held := open(t, pods[0])
	first := f.agent()
	z := f.ztunnel(ztunneltest.Options{Reconnect: true})
	for _, p := range pods {
		p.enrolled(z)
	}
	first.stop()
	check.Equal(t, open(t, pods[0]), held, "descriptors of a namespace after the end")
	before, generation := f.patches(), pods[0].version()
	late := f.pod("late", labelled, was(pending))
	left := f.pod("left", was(pending))
	check.OK(t, check.Err(left.space().Apply(t.Context(), left.spec(), redirection.Reconcile)))
	f.agent()
	agenttest.Eventually(t, "no snapshot", z.Ready)
	for _, p := range append(pods, late) {
		p.enrolled(z)
	}
	left.released(z)
	check.Equal(t, f.patches()-before, 2, "patches, one for each pod that was not enrolled,")
	check.Equal(t, pods[0].version(), generation, "the version of rules that were not written")
}

func (p *pod) version() redirection.Version {
	p.f.Helper()
	v, err := p.space().Version()
	p.f.Do(err)
	return v
}

// TestEnrol_Killed: an agent that ends at any step leaves nothing that the next one does not finish.
func TestEnrol_Killed(t *testing.T) {
	t.Parallel()
	for _, step := range []string{"ack", "patch"} {
		t.Run(step, func(t *testing.T) {
			f := newParallel(t)
			in, out := f.pod("in", labelled), f.pod("out", labelled)
			first, z := f.mesh()
			out.enrolled(z)
			in.enrolled(z)
			third, brief := f.pod("third"), f.pod("brief")
			if step == "patch" {
				f.server.FailOn("pods", kubetest.ServerError, 1000)
			} else {
				z.Behave(func(*ztunneltest.Ztunnel, ztunneltest.Request) {})
			}
			out.relabel("")
			third.relabel("ambient")
			brief.relabel("ambient")
			before := f.patches()
			agenttest.Eventually(t, "nothing is under way", func() bool {
				return third.rules() && brief.rules() || step == "patch" && f.patches() > before+2
			})
			first.stop()
			brief.relabel("") // before the next agent starts
			f.server.Heal()
			z.Close()
			_, z = f.mesh()
			third.enrolled(z)
			in.enrolled(z)
			out.released(z)
			brief.released(z)
		})
	}
}

// rules reports whether the pod has rules of the mesh.
func (p *pod) rules() bool {
	p.f.Helper()
	report, err := p.space().Verify(p.f.Context(), p.spec())
	p.f.Do(err)
	return report.Mesh
}

// TestEnrol_RulesOfOthers: rules that another program or the pod itself removes come back.
func TestEnrol_RulesOfOthers(t *testing.T) {
	f := newParallel(t)
	p := f.pod("web", labelled)
	_, z := f.mesh()
	p.enrolled(z)
	check.OK(t, check.Err(p.space().Clean(t.Context(), p.spec())))
	p.enrolled(z)
}

// TestEnrol_Ends: a pod that ends or is deleted leaves ztunnel and the probe set, and its namespace is closed.
func TestEnrol_Ends(t *testing.T) {
	f := newParallel(t)
	job, web := f.pod("job", labelled), f.pod("web", labelled)
	_, z := f.mesh()
	job.enrolled(z)
	web.enrolled(z)
	job.phase, job.addressless = "Succeeded", true // the status of an ended pod may lack addresses
	job.publish()
	f.server.Delete(web.object())
	agenttest.Eventually(t, "pods are left", func() bool {
		return len(z.Pods()) == 0 && job.entry() == "" && web.entry() == "" && job.annotation() == ""
	})
}

// TestEnrol_APIServerFails: a pod whose annotation cannot be written holds no other one's rules. A conflict need not be another UID.
func TestEnrol_APIServerFails(t *testing.T) {
	f := newParallel(t)
	_, z := f.mesh()
	f.server.FailOn("status", kubetest.ServerError, 3)
	f.server.FailOn("status", kubetest.Conflict, 3)
	p, other := f.pod("web", labelled), f.pod("other", labelled)
	p.enrolled(z)
	other.enrolled(z)
}

// TestEnrol_Ztunnel: its own pods stay out, whatever their labels are.
func TestEnrol_Ztunnel(t *testing.T) {
	f := newParallel(t)
	own := f.pod("ztunnel-x", labelled, func(p *pod) { p.labels[ambient.ZtunnelLabel] = ambient.ZtunnelApp })
	f.agent(func(o *enrol.Options) { o.SystemNamespace = "shop" })
	z := f.ztunnel(ztunneltest.Options{})
	f.pod("web", labelled).enrolled(z)
	check.Equal(t, own.trace(z), "", "ztunnel's own pod")
}

// TestEnrol_Excluded: the setting wins over a label, also for pods that are enrolled.
func TestEnrol_Excluded(t *testing.T) {
	f := newParallel(t)
	p := f.pod("web", labelled)
	first := f.agent()
	z := f.ztunnel(ztunneltest.Options{Reconnect: true})
	p.enrolled(z)
	first.stop()
	conf := *f.conf.Load()
	conf.ExcludeNamespaces = []string{"shop"}
	f.conf.Store(&conf)
	f.agent()
	p.released(z)
}
