package nodepods

import (
	"context"
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
	"github.com/meshcni/istio-cni/internal/node/sandbox/sandboxtest"
)

// proxyStartup is the time that the audit allows the proxy to open its listeners.
const proxyStartup = 15 * time.Second

// TestAudit_ProxyThatDoesNotRun: it is a fault from 15 s after the proxy should run, without a request, until something listens.
func TestAudit_ProxyThatDoesNotRun(t *testing.T) {
	t.Parallel()
	for name, proxy := range map[string]state{"crashes": ended(1, agenttest.Start()), "has no image": waiting("ImagePullBackOff")} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newAuditFixture(t, auditor.Settings{}, cniconf.NetConf{})
			l.want(audit.Captured, "")
			l.pod.proxy = proxy
			l.set(l.pod)
			l.waitForWorker()
			l.want(audit.Captured, "")
			l.step(proxyStartup)
			if s := l.want(audit.NoListener, "127.0.0.1:15001"); len(s.Problems) != 2 {
				t.Errorf("got %+v", s.Problems)
			}
			l.publish(state{"running": object{"startedAt": stamp(l.clock.Now())}}) // the proxy does not listen yet
			l.waitForWorker()
			l.want(audit.NoListener, "127.0.0.1:15001")
			l.wantEvents(l.pod, podwork.ReasonNoListener)
		})
	}
}

// TestAudit_PodThatStarts: a proxy is not missed while init containers run and images are pulled, nor after its pod ends.
func TestAudit_PodThatStarts(t *testing.T) {
	t.Parallel()
	l := newAuditFixture(t, auditor.Settings{}, cniconf.NetConf{})
	l.clock.Step(time.Hour)
	l.pod.proxy = waiting("PodInitializing")
	l.set(l.pod)
	l.want(audit.Captured, "")
	l.pod.proxy, l.pod.deleting = ended(0, agenttest.Start()), true
	l.set(l.pod)
	agenttest.Eventually(t, "a pod that ends is inspected", func() bool { return l.check().State == "" })
	l.wantEvents(l.pod)
}

// TestAudit_ContainersWithTheProxysUser: every container except the proxy and the injector's init containers is a collision.
func TestAudit_ContainersWithTheProxysUser(t *testing.T) {
	t.Parallel()
	ids := map[string]string{ // by the names of the list and the container
		"initContainerStatuses istio-validation":  "1",
		"initContainerStatuses migrate":           "2",
		"containerStatuses istio-proxy":           "3",
		"containerStatuses istio-init":            "4",
		"ephemeralContainerStatuses debugger-x4z": "5",
	}
	l := newAuditFixture(t, auditor.Settings{}, cniconf.NetConf{}, func(o *Options) {
		o.Processes = func(context.Context) (map[string][]sandbox.Process, error) {
			var all []sandbox.Process
			for _, id := range append(slices.Collect(maps.Values(ids)), "pause") {
				all = append(all, sandbox.Process{PID: 7, Container: id, UID: redirect.DefaultID})
			}
			return map[string][]sandbox.Process{"u1": all, "u2": {{PID: 8, Container: "2", UID: redirect.DefaultID}}}, nil
		}
	})
	o := l.pod.object()
	status := o["status"].(object)
	delete(status, "initContainerStatuses")
	for name, id := range ids {
		list, container, _ := strings.Cut(name, " ")
		of, _ := status[list].([]object)
		status[list] = append(of, object{"name": container, "containerID": "containerd://" + id})
	}
	l.put(o)
	agenttest.Eventually(t, "the containers are not known", func() bool { return l.check().State == audit.UIDCollision })
	var got []string
	for _, p := range l.check().Problems {
		got = append(got, p.Detail)
	}
	slices.Sort(got)
	var want []string
	for _, name := range []string{"debugger-x4z", "istio-init", "migrate"} {
		want = append(want, `process 7 of container "`+name+`" runs with uid 1337 and gid 0`)
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	l.waitForEvent(l.pod, "Warning", podwork.ReasonUIDCollision)
}

// podUID is a UID in the format of processes' cgroups, longID a container's ID.
const podUID = "0f5d3a52-4d64-4b2b-9d5a-6d1d2a3b4c5d"

var longID = strings.Repeat("0123456789abcdef", 4)

// TestAudit_WhoListens on the proxy's ports, by the users and groups of real sockets and processes.
func TestAudit_WhoListens(t *testing.T) {
	t.Parallel()
	const id = redirect.DefaultID
	for name, test := range map[string]struct {
		listener  uintptr
		processes [][2]uint32
		want      audit.State
		text      string
	}{
		"the proxy":                      {id, [][2]uint32{{id, id}, {0, 0}}, audit.Captured, ""},
		"a proxy as root with its group": {0, [][2]uint32{{0, 0}, {0, id}}, audit.Captured, ""},
		"a proxy as root":                {0, [][2]uint32{{0, 0}}, audit.ForeignListener, "uid 0 listens on 127.0.0.1:15001"},
		"an application":                 {4711, [][2]uint32{{4711, 0}, {0, id}}, audit.ForeignListener, "uid 4711 listens on 127.0.0.1:15001"},
		"a process that has ended":       {4711, [][2]uint32{{0, 0}}, audit.Captured, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := sandboxtest.New(t)
			for _, ids := range test.processes {
				n.StartAs(syscall.SysProcAttr{Credential: &syscall.Credential{Uid: ids[0], Gid: ids[1]}}, podUID, longID)
			}
			l := newAuditFixture(t, auditor.Settings{}, cniconf.NetConf{}, func(o *Options) {
				o.Processes = func(ctx context.Context) (map[string][]sandbox.Process, error) {
					all, err := n.Processes(ctx)
					return map[string][]sandbox.Process{"u1": all[podUID]}, err
				}
			})
			l.clock.Step(time.Minute)
			l.listen(l.path, test.listener)
			l.publish(running())
			agenttest.Eventually(t, "the proxy is not known", func() bool {
				var containers int
				l.controller.pods.Get(web, func(p kube.Pod, _ *memory) { containers = len(p.Containers) })
				return containers > 0
			})
			l.want(test.want, test.text)
			if test.want != audit.Captured {
				l.waitForEvent(l.pod, "Warning", podwork.ReasonForeignListener, test.text, "Remedy: ")
			}
		})
	}
}
