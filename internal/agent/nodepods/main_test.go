package nodepods

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/agent/eventrecorder"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/agent/racerepair"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
	"github.com/meshcni/istio-cni/internal/node/sandbox/sandboxtest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

const node1 = "node-1"

// fixture is an API server, a node with pods that can be found, and a controller.
type fixture struct {
	*sandboxtest.Node

	server  *kubetest.Server
	clock   *clocktesting.FakeClock
	options Options
	// conf is the plugin's configuration, nil if it cannot be read.
	conf atomic.Pointer[cniconf.NetConf]
	// searches counts the searches for namespaces.
	searches atomic.Int64
	log      *agenttest.Buffer
	stops    []func()
}

func newFixture(t *testing.T, switches repair.Switches, more ...func(*Options)) *fixture {
	t.Helper()
	l := &fixture{Node: sandboxtest.New(t), server: kubetest.NewServer(t), clock: agenttest.NewClock(), log: &agenttest.Buffer{}}
	l.conf.Store(&cniconf.NetConf{})
	api, err := kube.NewClient(kube.Config{
		Kubeconfig: l.server.Kubeconfig(t), Timeout: time.Minute, IdleTimeout: time.Hour,
		Backoff: &wait.Backoff{Duration: time.Millisecond, Factor: 2, Jitter: 0.5, Steps: 4, Cap: 4 * time.Millisecond},
	})
	l.Do(err)
	t.Cleanup(api.Close)
	settings := defaults(t)
	settings.Switches, settings.Node = switches, node1
	l.options = Options{
		Env: podwork.Env{
			Clock: l.clock, Log: slog.New(slog.NewTextHandler(l.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
			Host: node1, Node: node1, Plugin: l.plugin,
			Find: func(ctx context.Context, pod sandbox.Pod) (*sandbox.Namespace, error) {
				l.searches.Add(1)
				return l.Find(ctx, pod)
			},
		},
		API: api, Workers: 1, Metrics: metrics.NewRepair("test"), Repair: &settings,
	}
	for _, change := range more {
		change(&l.options)
	}
	l.options.Events = eventrecorder.New(l.options.API, eventrecorder.Options{
		Log: l.options.Log, Count: l.options.Metrics.EventReported, Clock: l.clock,
	})
	t.Cleanup(l.options.Events.Shutdown)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log:\n%s\nrequests:\n%s", l.log, strings.Join(l.server.Requests(), "\n"))
		}
	})
	return l
}

// Check inspects a pod now, whatever is left of the budget.
func (c *Controller) Check(ctx context.Context, k types.NamespacedName) (audit.Status, error) {
	return c.auditor.Inspect(ctx, auditor.Socket, k)
}

// statusOf is Check for a pod that the watch is about to deliver.
func (c *Controller) statusOf(t *testing.T, k types.NamespacedName) (s audit.Status) {
	t.Helper()
	agenttest.Eventually(t, "the controller does not know the pod", func() bool {
		var err error
		s, err = c.Check(t.Context(), k)
		return err == nil
	})
	return s
}

func (l *fixture) plugin() (cniconf.NetConf, error) {
	if conf := l.conf.Load(); conf != nil {
		return *conf, nil
	}
	return cniconf.NetConf{}, errors.New("it is no JSON")
}

// defaults are the settings without any flag.
func defaults(t *testing.T) racerepair.Settings {
	t.Helper()
	var s racerepair.Settings
	for _, row := range racerepair.Rows(&s) {
		check.OK(t, row.Value.Set(row.Default), "default of", row.Name)
	}
	return s
}

// cache writes an entry of libcni's cache for a namespace that only this entry leads to.
func (l *fixture) cache(p podSpec, path string) {
	l.Helper()
	l.Cached(p.name+"-"+p.uid, sandbox.Pod{Namespace: p.namespace(), Name: p.name, UID: p.uid}, l.Kept(path, p.uid))
}

// place puts a pod on the node, with its namespace in the cache.
func (l *fixture) place(p podSpec) (path string) {
	l.Helper()
	path = l.Sandbox(p.ips...)
	l.cache(p, path)
	l.set(p)
	return path
}

// space is a network namespace with the configured backend.
func (l *fixture) space(path string) redirection.Namespace {
	l.Helper()
	conf := l.conf.Load()
	return redirection.Namespace{
		NetNS: netnstest.Open(l.T, path), Backend: conf.Backend, Log: slog.New(slog.DiscardHandler),
		Tools: iptables.Host{Force: iptables.Variant(conf.ForceIptables)},
	}
}

// program writes the wanted rules like the plugin.
func (l *fixture) program(path string) {
	l.Helper()
	_, err := l.space(path).Apply(l.Context(), redirect.Default(), redirection.Reconcile)
	l.Do(err)
}

// redirect makes a pod's sandbox with its rules.
func (l *fixture) redirect(p podSpec) (path string) {
	l.Helper()
	path = l.Sandbox(p.ips...)
	l.cache(p, path)
	l.program(path)
	return path
}

// listen opens ports in a namespace, by default the proxy's, with a UID of this machine.
func (l *fixture) listen(path string, uid uintptr, ports ...string) {
	l.Helper()
	l.Do(netns.Do(path, func() error {
		_, _, _ = unix.RawSyscall(unix.SYS_SETFSUID, uid, 0, 0) // of this thread
		defer func() { _, _, _ = unix.RawSyscall(unix.SYS_SETFSUID, 0, 0, 0) }()
		if len(ports) == 0 {
			ports = []string{"15001", "15006"}
		}
		for _, port := range ports {
			socket, err := (&net.ListenConfig{}).Listen(l.Context(), "tcp4", "0.0.0.0:"+port)
			if err != nil {
				return err
			}
			l.Cleanup(func() { _ = socket.Close() })
		}
		return nil
	}))
}

// crashing places the pod "web" whose validation fails again and again.
func (l *fixture) crashing() (p podSpec, path string) {
	l.Helper()
	p = crashing("web").at("10.88.0.2/24")
	return p, l.place(p)
}

// state is a container's state in the kubelet's format.
type state = object

func waiting(reason string) state { return state{"waiting": object{"reason": reason}} }
func running() state              { return state{"running": object{"startedAt": stamp(agenttest.Start())}} }

// ended returns the state of a container that ended at a time, after five seconds.
func ended(code int, at time.Time) state {
	reason := "Error"
	if code == 0 {
		reason = "Completed"
	}
	return state{"terminated": object{
		"exitCode": code, "reason": reason, "startedAt": stamp(at.Add(-5 * time.Second)), "finishedAt": stamp(at),
	}}
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

type object = map[string]any

// podSpec has the fields of a pod that a test sets; the other fields describe a starting pod of the mesh.
type podSpec struct {
	ns, name, uid, node   string
	ips                   []string
	now, last             state // of the validation
	proxy                 state
	phase, restart        string
	labels, annotations   object
	plain, host, deleting bool
	// unvalidated pods have no validation.
	unvalidated bool
	scheduler   string
	runtime     string
}

func (p podSpec) namespace() string { return cmp.Or(p.ns, "shop") }

func (p podSpec) path() string { return "/api/v1/namespaces/" + p.namespace() + "/pods/" + p.name }

func (p podSpec) object() object {
	spec := object{
		"schedulerName": p.scheduler, "runtimeClassName": p.runtime,
		"nodeName": cmp.Or(p.node, node1), "restartPolicy": cmp.Or(p.restart, "Always"), "hostNetwork": p.host,
		"containers": []object{{"name": "app"}, {"name": "istio-proxy", "args": []string{"proxy", "sidecar"}}},
	}
	metadata := object{"name": p.name, "namespace": p.namespace(), "uid": p.uid, "labels": p.labels}
	annotations := object{}
	if !p.plain {
		annotations[sidecar.StatusKey] = `{"initContainers":["istio-validation"],"containers":["istio-proxy"]}`
	}
	maps.Copy(annotations, p.annotations)
	metadata["annotations"] = annotations
	if p.deleting {
		metadata["deletionTimestamp"] = stamp(agenttest.Start())
	}
	status := object{"phase": cmp.Or(p.phase, "Pending")}
	if len(p.ips) > 0 {
		ips := []object{}
		for _, ip := range p.ips {
			ips = append(ips, object{"ip": strings.Split(ip, "/")[0]})
		}
		status["podIP"], status["podIPs"] = ips[0]["ip"], ips
	}
	if !p.plain && !p.unvalidated {
		spec["initContainers"] = []object{{"name": sidecar.ValidationContainer}}
		one := object{"name": sidecar.ValidationContainer}
		if p.now != nil {
			one["state"] = p.now
		}
		if p.last != nil {
			one["lastState"] = p.last
		}
		status["initContainerStatuses"] = []object{one}
	}
	if p.proxy != nil {
		status["containerStatuses"] = []object{{"name": "istio-proxy", "state": p.proxy}}
	}
	return object{"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": spec, "status": status}
}

// set makes a pod known, or changes it.
func (l *fixture) set(p podSpec) {
	l.Helper()
	l.put(p.object())
}

// put is set for an object.
func (l *fixture) put(o object) {
	l.Helper()
	data, err := json.Marshal(o)
	l.Do(err)
	l.server.Set(data)
}

// broken is a pod whose validation has just failed for the first time.
func broken(name string) podSpec {
	return podSpec{name: name, uid: "uid-of-" + name, now: ended(126, agenttest.Start().Add(-time.Second))}
}

// crashing is a pod whose validation is restarted again and again.
func crashing(name string) podSpec {
	p := broken(name)
	p.last, p.now = p.now, waiting("CrashLoopBackOff")
	return p
}

// at gives the pod addresses.
func (p podSpec) at(ips ...string) podSpec {
	p.ips = ips
	return p
}

// run starts a controller; it ends with the test.
func (l *fixture) run() (stop func()) {
	l.Helper()
	l.start()
	return l.stops[len(l.stops)-1]
}

// start is run for the controller.
func (l *fixture) start() *Controller {
	l.Helper()
	c, err := New(l.options)
	l.Do(err)
	l.stops = append(l.stops, agenttest.Go(l.T, c.Run))
	return c
}

// stop ends the controllers.
func (l *fixture) stop() {
	for _, stop := range l.stops {
		stop()
	}
}

// feed delivers pods instead of a watch.
type feed struct {
	listener kube.Listener[kube.Pod]
	began    chan struct{}
}

func (l *fixture) feed() *feed {
	f := &feed{began: make(chan struct{})}
	l.options.Follow = func(ctx context.Context, listener kube.Listener[kube.Pod]) {
		f.listener = listener
		close(f.began)
		<-ctx.Done()
	}
	return f
}

// crowd delivers n pods of the mesh, none with a namespace.
func (f *feed) crowd(n int) {
	<-f.began
	for i := range n {
		p := podSpec{name: fmt.Sprintf("web-%d", i), uid: fmt.Sprint(i), now: ended(0, agenttest.Start()), phase: "Running"}
		f.listener.OnUpdate(p.at(fmt.Sprintf("10.9.%d.%d/16", i/250, i%250)).nodePod())
	}
	f.listener.OnSync()
}

// events returns the events about a pod.
func (l *fixture) events(p podSpec) []corev1.Event {
	l.Helper()
	var all []corev1.Event
	for _, data := range l.server.Events() {
		var one corev1.Event
		l.Do(json.Unmarshal(data, &one))
		if of := one.InvolvedObject; string(of.UID) == p.uid {
			if of.Kind != "Pod" || of.Namespace != p.namespace() || of.Name != p.name || one.Source != (corev1.EventSource{Component: "cni-repair", Host: node1}) {
				l.Errorf("the event has another object or source: %+v", one)
			}
			all = append(all, one)
		}
	}
	return all
}

// waitForEvent waits for an event on a pod with some texts.
func (l *fixture) waitForEvent(p podSpec, kind string, reason kube.EventReason, texts ...string) corev1.Event {
	l.Helper()
	var found corev1.Event
	agenttest.Until(l.T, func() string {
		return fmt.Sprintf("no %s %s of %s with %q: %v", kind, reason, p.name, texts, l.events(p))
	}, func() bool {
		for _, e := range l.events(p) {
			if e.Type == kind && e.Reason == string(reason) && !slices.ContainsFunc(texts, func(s string) bool { return !strings.Contains(e.Message, s) }) {
				found = e
				return true
			}
		}
		return false
	})
	return found
}

// end ends the controllers, and sends the queued events.
func (l *fixture) end() {
	l.Helper()
	l.stop()
	l.options.Events.Shutdown()
}

func (l *fixture) metric(name string) int {
	l.Helper()
	return agenttest.Metric(l.T, l.options.Metrics.Text(), name)
}

// repaired returns the count of an action.
func (l *fixture) repaired(t metrics.RepairType, result metrics.RepairResult) int {
	l.Helper()
	return l.metric(fmt.Sprintf(`istio_cni_repair_pods_repaired_total{type=%q,result=%q}`, t, result))
}

// pods returns the gauge of a state.
func (l *fixture) pods(s metrics.PodState) int {
	l.Helper()
	return l.metric(fmt.Sprintf(`istio_cni_mesh_pods{state=%q}`, s))
}

// waitForStates waits for the numbers of redirected, broken, drifted and unknown pods.
func (l *fixture) waitForStates(want ...int) {
	l.Helper()
	var got []int
	agenttest.Until(l.T, func() string { return fmt.Sprintf("pods redirected, broken, drifted, unknown: %v, want %v", got, want) }, func() bool {
		got = nil
		for _, s := range []metrics.PodState{metrics.PodRedirected, metrics.PodBroken, metrics.PodDrifted, metrics.PodUnknown} {
			got = append(got, l.pods(s))
		}
		return slices.Equal(got, want)
	})
}

// waitForCount waits for a number of actions.
func (l *fixture) waitForCount(t metrics.RepairType, result metrics.RepairResult, want int) {
	l.Helper()
	agenttest.Until(l.T, func() string { return fmt.Sprintf("%s %s: %d, want %d", t, result, l.repaired(t, result), want) }, func() bool {
		return l.repaired(t, result) >= want
	})
	check.Equal(l, l.repaired(t, result), want, t, result)
}

// requests counts the requests with a text.
func (l *fixture) requests(text string) int {
	return strings.Count(strings.Join(l.server.Requests(), "\n"), text)
}

// writes returns the requests that change pods.
func (l *fixture) writes() []string {
	return slices.DeleteFunc(l.server.Requests(), func(r string) bool {
		return strings.HasPrefix(r, "GET ") || !strings.Contains(r, "/pods/")
	})
}

// waitForWorker waits until all pods that were set before are classified: one worker processes them in order.
func (l *fixture) waitForWorker() {
	l.Helper()
	last := podSpec{name: fmt.Sprintf("zz-last-%d", len(l.server.Requests())), ns: "zz", uid: "last", ips: []string{"192.0.2.1"}}
	before := l.pods(metrics.PodUnknown)
	l.set(last)
	agenttest.Eventually(l.T, "the last pod is not checked", func() bool { return l.pods(metrics.PodUnknown) > before })
	l.server.Delete(last.path())
	agenttest.Eventually(l.T, "the last pod does not go", func() bool { return l.pods(metrics.PodUnknown) == before })
}

// captured reports whether rules of the mesh are in a namespace.
func captured(t *testing.T, path string) bool {
	t.Helper()
	return strings.Contains(netnstest.Run(t, path, "iptables-save"), "-A OUTPUT -j ISTIO_OUTPUT")
}

// rulesOf returns all rules of a namespace, of both variants and families.
func rulesOf(t *testing.T, path string) string {
	t.Helper()
	var all strings.Builder
	for _, tool := range []string{"iptables-nft-save", "ip6tables-nft-save", "iptables-legacy-save", "ip6tables-legacy-save"} {
		for line := range strings.Lines(netnstest.Run(t, path, tool)) {
			if strings.HasPrefix(line, "-") {
				all.WriteString(tool + " " + line)
			}
		}
	}
	return all.String()
}

// redirected checks that namespaces have rules of the mesh.
func (l *fixture) redirected(paths ...string) {
	l.Helper()
	for _, path := range paths {
		if !captured(l.T, path) {
			l.Errorf("%s is not redirected", path)
		}
	}
}

// untouched checks that a namespace has no rule.
func (l *fixture) untouched(path string) {
	l.Helper()
	check.Equal(l, rulesOf(l.T, path), "", "rules were written")
}

// noWrites checks that no pod was changed.
func (l *fixture) noWrites() {
	l.Helper()
	if got := l.writes(); len(got) > 0 {
		l.Fatalf("pods were changed: %q", got)
	}
}

// oneEvent checks that a pod has one event, counted once.
func (l *fixture) oneEvent(p podSpec) {
	l.Helper()
	if got := l.events(p); len(got) != 1 || got[0].Count != 1 {
		l.Errorf("events on %s: %v", p.name, got)
	}
}

// stepUntilSuccess steps the clock until an action has succeeded once.
func (l *fixture) stepUntilSuccess(t metrics.RepairType) {
	l.Helper()
	agenttest.Eventually(l.T, "it is not tried again", func() bool {
		l.clock.Step(time.Second)
		return l.repaired(t, metrics.RepairSuccess) == 1
	})
}

var (
	nothing  = repair.Switches{}
	inPlace  = repair.Switches{InPlace: true}
	deleting = repair.Switches{Delete: true}
	labelled = repair.Switches{Label: true}
)

// counted has the metric's type of each mode's actions, reasons the reason of their events.
var (
	counted = map[repair.Switches]metrics.RepairType{
		inPlace: metrics.RepairPod, deleting: metrics.RepairDelete, labelled: metrics.RepairLabel,
	}
	reasons = map[repair.Switches]kube.EventReason{inPlace: podwork.ReasonRepaired, deleting: podwork.ReasonDeleted, labelled: podwork.ReasonLabelled}
)

// waitForRepair waits for the event and the count of a repair in place after a failed validation.
func (l *fixture) waitForRepair(p podSpec) {
	l.Helper()
	l.waitForEvent(p, "Normal", podwork.ReasonRepaired, "exit code 126", "within its back-off")
	l.waitForCount(metrics.RepairPod, metrics.RepairSuccess, 1)
	l.waitForStates(1, 0, 0, 0)
}
