package auditor

import (
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
	"github.com/meshcni/istio-cni/internal/node/sandbox/sandboxtest"
)

func TestProxySince(t *testing.T) {
	t.Parallel()
	at := func(seconds int) time.Time { return agenttest.Start().Add(time.Duration(seconds) * time.Second) }
	running := func(began int) repair.State { return repair.State{Running: true, Began: at(began)} }
	ended := func(began, finished int) repair.State {
		return repair.State{Terminated: true, Began: at(began), Finished: at(finished)}
	}
	waiting := func(reason string) repair.State { return repair.State{Reason: reason} }
	named := func(name string, now, last repair.State) repair.Container {
		return repair.Container{Name: name, State: now, Last: last}
	}
	proxy := func(now, last repair.State) repair.Container { return named("istio-proxy", now, last) }
	var never repair.State
	app := named("app", running(9), never)
	for name, test := range map[string]struct {
		init, containers []repair.Container
		want             time.Time
	}{
		"no status":        {nil, nil, time.Time{}},
		"runs":             {nil, []repair.Container{app, proxy(running(7), never)}, at(7)},
		"runs natively":    {[]repair.Container{proxy(running(7), never)}, nil, at(7)},
		"runs again":       {nil, []repair.Container{proxy(running(7), ended(2, 4))}, at(7)},
		"has ended":        {nil, []repair.Container{app, proxy(ended(7, 11), never)}, at(11)},
		"crashes":          {nil, []repair.Container{app, proxy(waiting("CrashLoopBackOff"), ended(7, 12))}, at(12)},
		"crashes natively": {[]repair.Container{proxy(waiting("CrashLoopBackOff"), ended(7, 12))}, nil, at(12)},
		"has no image":     {nil, []repair.Container{proxy(waiting("ImagePullBackOff"), never)}, at(1)},
		"has no image after init containers": {
			[]repair.Container{named("x", ended(2, 30), never)}, []repair.Container{proxy(waiting("ErrImagePull"), never)}, at(30),
		},
		"has no image natively": {
			[]repair.Container{named("x", ended(2, 20), never), proxy(waiting("ImagePullBackOff"), never), named("y", waiting("PodInitializing"), never)},
			[]repair.Container{named("app", waiting("PodInitializing"), never)},
			at(20),
		},
		"init containers run": {
			[]repair.Container{named("x", running(2), never)}, []repair.Container{proxy(waiting("PodInitializing"), never)}, time.Time{},
		},
		"starts":                       {nil, []repair.Container{proxy(waiting("ContainerCreating"), never)}, time.Time{}},
		"has no state yet":             {nil, []repair.Container{proxy(never, never)}, time.Time{}},
		"starts beside an application": {nil, []repair.Container{app, proxy(waiting("ContainerCreating"), never)}, at(9)},
		"starts again with the pod": {
			[]repair.Container{named("x", running(50), ended(2, 3))}, []repair.Container{proxy(waiting("PodInitializing"), ended(7, 12))}, time.Time{},
		},
	} {
		w := work{Turn: &podwork.Turn{Pod: kube.Pod{Started: at(1), Init: test.init, Containers: test.containers}}}
		if got := w.proxySince(); !got.Equal(test.want) {
			t.Errorf("%s: %s, want %s", name, got, test.want)
		}
	}
}

// TestListeners_ListFromBefore: a list of processes that is incomplete or older than the proxy does not identify a listener.
func TestListeners_ListFromBefore(t *testing.T) {
	t.Parallel()
	path := netnstest.New(t)
	socket, err := netns.In(netnstest.Open(t, path), func() (net.Listener, error) {
		return (&net.ListenConfig{}).Listen(t.Context(), "tcp4", "0.0.0.0:15001")
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = socket.Close() })
	f := newFixture(t)
	began := f.clock.Now()
	pod := kube.Pod{Containers: []repair.Container{{Name: "istio-proxy", State: repair.State{Running: true, Began: began}}}}
	f.clock.Step(startup)
	for listed, want := range map[time.Time]int{{}: 0, began: 0, began.Add(time.Second): 1} {
		w := &work{Auditor: f.Auditor, Turn: &podwork.Turn{Env: f.Env, Pod: pod}, memory: &Memory{}, listed: listed}
		listeners, err := w.listeners(redirection.Namespace{NetNS: netnstest.Open(t, path)}, peers{processes: []sandbox.Process{{UID: 0, GID: 5}}})
		if err != nil {
			t.Fatal(err)
		}
		if got := listeners(netip.MustParseAddrPort("127.0.0.1:15001")); len(got) != 1 || got[0].UID != 0 || len(got[0].GIDs) != want {
			t.Errorf("listed %s: got %+v", listed, got)
		}
	}
}

// TestCollisions_UsersOfThePod: the rules of a pod with hostUsers: false use the IDs of its user namespace.
func TestCollisions_UsersOfThePod(t *testing.T) {
	t.Parallel()
	const podUID = "11111111-2222-3333-4444-555555555555"
	containerID := strings.Repeat("0123456789abcdef", 4)
	n := sandboxtest.New(t)
	unshared, path := netnstest.Unshared(t, 100000, 65536)
	n.Contain(unshared.Process.Pid, podUID, containerID)
	for _, ids := range [][2]uint32{{101337, 100000}, {1337, 1337}} {
		n.StartAs(syscall.SysProcAttr{Credential: &syscall.Credential{Uid: ids[0], Gid: ids[1]}}, podUID, containerID)
	}
	w := &work{Turn: &podwork.Turn{Pod: kube.Pod{Containers: []repair.Container{{Name: "app", ID: containerID}}}}}
	w.Decision.Spec = redirect.Default()
	byPod, err := n.Processes(t.Context())
	n.Do(err)
	w.processes = byPod[podUID]
	in, err := w.peers(redirection.Namespace{NetNS: netnstest.Open(t, path)})
	n.Do(err)
	if got := w.collisions(in); len(got) != 1 || got[0].UID != 1337 || got[0].GID != 0 {
		t.Errorf("got %+v of %+v", got, in)
	}
	w.processes = nil
	if in, err = w.peers(redirection.Namespace{NetNS: netnstest.Open(t, path)}); err != nil || in.processes != nil {
		t.Errorf("without a process of the pod: %+v, %v", in, err)
	}
}
