//go:build measure

// A measurement that a plain run does not include.

package installer_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apitypes "k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// before is a program to compare with, such as the build of another commit.
var before = flag.String("before", "", "a program to measure beside this one") //nolint:gochecknoglobals // a flag of the test binary

// BenchmarkNewPods measures the node agent's CPU time, with audit and repair, for each of newPods pods that start. The agent is a process
// that watches an API server in protobuf and serves the plugins, which write real rules in a real chain. A measurement needs only
//
//	go test -tags measure -run '^$' -bench NewPods -benchtime 4x ./internal/role/installer [-args -before /path/of/another/program]
//
// where the programs take turns.
func BenchmarkNewPods(b *testing.B) {
	programs := map[string]string{"now": chaintest.Program(b)}
	order := []string{"now"}
	if *before != "" {
		programs["before"], order = *before, []string{"before", "now"}
	}
	used, settled := map[string]time.Duration{}, map[string]time.Duration{}
	for b.Loop() {
		for _, name := range order {
			u, s := startPods(b, programs[name])
			b.Logf("%s: %.1f ms of CPU for a pod until it is ready, %.1f ms in all", name, perPod(u), perPod(s))
			used[name] += u
			settled[name] += s
		}
	}
	for _, name := range order {
		b.ReportMetric(perPod(used[name])/float64(b.N), name+"-cpu-ms/pod")
		b.ReportMetric(perPod(settled[name])/float64(b.N), name+"-settled-cpu-ms/pod")
	}
}

const (
	newPods = 100
	// at is the number of pods that start at a time.
	at = 4
	// settling is longer than the time between the start of a proxy and the inspection of its listeners.
	settling = 20 * time.Second
)

func perPod(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 / newPods }

// startPods returns the agent's CPU time for new pods: until the last update, and until the agent has settled.
func startPods(b *testing.B, program string) (used, settled time.Duration) {
	b.Helper()
	n := nodetest.New(b, program)
	n.StartAPI()
	n.API.Protobuf()
	n.GrantAccess()
	n.Put(listFile, nodetest.BridgeList)
	pods := make([]*starting, newPods)
	for i := range pods {
		pods[i] = newStarting(b, n, i)
	}
	a := n.Start("REPAIR_ENABLED=true", "REPAIR_REPAIR_PODS=true", "PROFILING=true")
	defer a.Kill()
	a.AwaitReady()
	time.Sleep(5 * time.Second) //nolint:forbidigo // the start of an agent is not measured
	began := cpuOf(b, a.PID())
	profiled := profile(b, a)
	next := make(chan *starting)
	var work sync.WaitGroup
	for range at {
		work.Go(func() {
			for p := range next {
				p.start(b, n)
			}
		})
	}
	for _, p := range pods {
		next <- p
	}
	close(next)
	work.Wait()
	used = cpuOf(b, a.PID()) - began
	for captured := ""; captured != strconv.Itoa(newPods); { // a busy machine takes long: the audit has one percent of a core
		time.Sleep(settling) //nolint:forbidigo // a measurement of what comes later
		captured = a.Metric(`istio_cni_audit_pods{state="captured"}`)
	}
	settled = cpuOf(b, a.PID()) - began
	if events := len(n.API.Events()); events > 0 {
		b.Errorf("%d events", events)
	}
	profiled()
	return used, settled
}

// profile writes a profile of the agent into the file that the environment names.
func profile(b *testing.B, a *nodetest.Agent) (wait func()) {
	b.Helper()
	file := os.Getenv("NEWPODS_PROFILE")
	if file == "" {
		return func() {}
	}
	var work sync.WaitGroup
	work.Go(func() {
		_, text, err := a.Ask("9876", "/debug/pprof/profile?seconds=45")
		if err == nil {
			err = os.WriteFile(file, []byte(text), 0o600) //nolint:forbidigo // the user's own file
		}
		if err != nil {
			b.Error(err)
		}
	})
	return work.Wait
}

// cpuOf returns the CPU time of a process (clock_getcpuclockid(3)).
func cpuOf(b *testing.B, pid int) time.Duration {
	b.Helper()
	const sched = 2
	var t unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|sched), &t); err != nil { //nolint:gosec // as the C library makes it
		b.Fatal(err)
	}
	return time.Duration(t.Nano())
}

// starting is a pod of the mesh that a kubelet starts.
type starting struct {
	chaintest.Pod

	object corev1.Pod
	// listen is the test's path of the namespace.
	listen string
}

// newStarting creates a sandbox with a name below the runtime's directory.
func newStarting(b *testing.B, n *nodetest.Node, i int) *starting {
	b.Helper()
	p := &starting{Pod: n.NewPod("apps", fmt.Sprintf("web-%d", i), nil)}
	link := fmt.Sprintf("/var/run/netns/cni-%d", i)
	check.OK(b, os.Symlink(p.Netns, n.Path(strings.TrimPrefix(link, "/var"))))
	user := int64(1337)
	env := []corev1.EnvVar{}
	for e := range 30 {
		env = append(env, corev1.EnvVar{Name: fmt.Sprintf("ISTIO_META_VARIABLE_%d", e), Value: strings.Repeat("v", 40)})
	}
	security := &corev1.SecurityContext{RunAsUser: &user, RunAsGroup: &user}
	p.object = corev1.Pod{
		TypeMeta: metav1.TypeMeta{Kind: "Pod", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: p.Namespace, Name: p.Name, UID: apitypes.UID(p.UID), Labels: map[string]string{"app": "web", "pod-template-hash": "abcdef"},
			Annotations: map[string]string{"sidecar.istio.io/status": `{"initContainers":["istio-validation"],"containers":["istio-proxy"]}`},
		},
		Spec: corev1.PodSpec{
			InitContainers: []corev1.Container{{Name: "istio-validation", Image: "proxyv2", Env: env, SecurityContext: security}},
			Containers: []corev1.Container{
				{Name: "app", Image: "app"},
				{Name: "istio-proxy", Image: "proxyv2", Args: []string{"proxy", "sidecar"}, Env: env, SecurityContext: security},
			},
		},
		Status: corev1.PodStatus{Phase: corev1.PodPending},
	}
	p.listen, p.Netns = p.Netns, link
	return p
}

// publish gives the pod's next version to the API server.
func (p *starting) publish(b *testing.B, n *nodetest.Node, change func(*corev1.Pod)) {
	b.Helper()
	change(&p.object)
	data, err := json.Marshal(p.object)
	check.OK(b, err)
	n.API.Set(data)
}

// start publishes the updates of scheduler and kubelet for a pod, and runs the chain at the same point.
func (p *starting) start(b *testing.B, n *nodetest.Node) {
	b.Helper()
	p.publish(b, n, func(*corev1.Pod) {})
	p.publish(b, n, func(o *corev1.Pod) { o.Spec.NodeName = nodetest.NodeName })
	waits := func(name, reason string) corev1.ContainerStatus {
		return corev1.ContainerStatus{Name: name, State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason}}}
	}
	runs := func(name string) corev1.ContainerStatus {
		started := corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.Now()}}
		return corev1.ContainerStatus{Name: name, ContainerID: "containerd://" + name + p.Name, State: started}
	}
	p.publish(b, n, func(o *corev1.Pod) {
		now := metav1.Now()
		o.Status.StartTime = &now
		o.Status.InitContainerStatuses = []corev1.ContainerStatus{waits("istio-validation", "PodInitializing")}
		o.Status.ContainerStatuses = []corev1.ContainerStatus{waits("app", "PodInitializing"), waits("istio-proxy", "PodInitializing")}
	})
	if _, err := n.Add(p.Pod); err != nil {
		b.Error(err)
		return
	}
	ip := strings.Fields(netnstest.Run(b, p.listen, "ip", "-4", "-o", "address", "show", "dev", "eth0"))[3]
	ip, _, _ = strings.Cut(ip, "/")
	p.publish(b, n, func(o *corev1.Pod) {
		o.Status.PodIP, o.Status.PodIPs = ip, []corev1.PodIP{{IP: ip}}
		o.Status.InitContainerStatuses = []corev1.ContainerStatus{runs("istio-validation")}
	})
	p.publish(b, n, func(o *corev1.Pod) {
		done := corev1.ContainerStateTerminated{Reason: "Completed", StartedAt: metav1.Now(), FinishedAt: metav1.Now()}
		o.Status.InitContainerStatuses[0].State = corev1.ContainerState{Terminated: &done}
	})
	p.proxy(b)
	p.publish(b, n, func(o *corev1.Pod) {
		o.Status.Phase = corev1.PodRunning
		o.Status.ContainerStatuses = []corev1.ContainerStatus{runs("app"), runs("istio-proxy")}
	})
	p.publish(b, n, func(o *corev1.Pod) {
		o.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now()}}
	})
}

// proxy listens like the pod's proxy.
func (p *starting) proxy(b *testing.B) {
	b.Helper()
	for _, port := range []string{"15001", "15006"} {
		err := netns.Do(p.listen, func() error {
			socket, err := (&net.ListenConfig{}).Listen(context.WithoutCancel(b.Context()), "tcp4", "0.0.0.0:"+port)
			if err == nil {
				b.Cleanup(func() { _ = socket.Close() })
			}
			return err
		})
		if err != nil {
			b.Error(err)
		}
	}
}
