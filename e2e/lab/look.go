package lab

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Get gives nil for a pod that is not there.
func (l *Lab) Get(namespace, name string) *core.Pod {
	l.Helper()
	pod, err := l.client.CoreV1().Pods(namespace).Get(l.Context(), name, meta.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	l.Must(err)
	return pod
}

// Ready reports whether a pod is there and ready.
func Ready(pod *core.Pod) bool {
	return pod != nil && slices.ContainsFunc(pod.Status.Conditions, func(c core.PodCondition) bool {
		return c.Type == core.PodReady && c.Status == core.ConditionTrue
	})
}

// IsReady reports whether a pod of an application is there and ready.
func (l *Lab) IsReady(name string) bool { l.Helper(); return Ready(l.Get(App, name)) }

// UntilReady waits for pods of applications.
func (l *Lab) UntilReady(names ...string) {
	l.Helper()
	for _, name := range names {
		l.Until("pod "+name, func() bool { return l.IsReady(name) })
	}
}

// ValidationFailed reports whether the validation of a pod has ended because traffic is not redirected, now or before.
func ValidationFailed(pod *core.Pod) bool {
	return pod != nil && slices.ContainsFunc(pod.Status.InitContainerStatuses, func(s core.ContainerStatus) bool {
		is := func(s core.ContainerState) bool { return s.Terminated != nil && s.Terminated.ExitCode == 126 }
		return s.Name == Validation && (is(s.State) || is(s.LastTerminationState))
	})
}

// Failed is ValidationFailed of a pod by its name.
func (l *Lab) Failed(name string) bool { l.Helper(); return ValidationFailed(l.Get(App, name)) }

// Restarts counts the containers of a pod that were started again.
func Restarts(pod *core.Pod) (n int32) {
	for _, s := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		n += s.RestartCount
	}
	return n
}

// Event reports whether there is one on a pod with this reason and these words.
func (l *Lab) Event(name, reason, words string) bool {
	l.Helper()
	events, err := l.client.CoreV1().Events(App).List(l.Context(), meta.ListOptions{})
	l.Must(err)
	return slices.ContainsFunc(events.Items, func(e core.Event) bool {
		return e.InvolvedObject.Name == name && e.Reason == reason && strings.Contains(e.Message, words)
	})
}

const runtimeSocket = "/run/containerd/containerd.sock"

// execs numbers what is run in containers: names must differ.
var execs atomic.Int64

// Inside runs a program in a container, as kubectl exec does, and gives what it says.
func (l *Lab) Exec(namespace, pod, container string, args ...string) (string, error) {
	l.Helper()
	found := l.Get(namespace, pod)
	if found == nil {
		return "", fmt.Errorf("there is no pod %s/%s", namespace, pod)
	}
	id := ""
	for _, s := range slices.Concat(found.Status.InitContainerStatuses, found.Status.ContainerStatuses) {
		if s.Name == container {
			id = strings.TrimPrefix(s.ContainerID, "containerd://")
		}
	}
	return l.ctr(append([]string{"task", "exec", "--exec-id", fmt.Sprintf("e2e-%d", execs.Add(1)), id}, args...)...)
}

// ctr asks containerd.
func (l *Lab) ctr(args ...string) (string, error) {
	l.Helper()
	all := append([]string{"--address", runtimeSocket, "--namespace", "k8s.io"}, args...)
	text, err := l.Command(l.Context(), "ctr", all...).CombinedOutput()
	return string(text), err
}

// Signal is sent to the first process of a container.
func (l *Lab) Signal(pod *core.Pod, signal string) {
	l.Helper()
	id := strings.TrimPrefix(pod.Status.ContainerStatuses[0].ContainerID, "containerd://")
	if text, err := l.ctr("task", "kill", "--signal", signal, id); err != nil {
		l.Fatalf("%v: %s", err, text)
	}
}

// OnNode runs a program on the node and gives what it says. It has to succeed.
func (l *Lab) OnNode(name string, args ...string) string {
	l.Helper()
	var problems bytes.Buffer
	command := l.Command(l.Context(), name, args...)
	command.Stderr = &problems
	text, err := command.Output()
	if err != nil {
		l.Fatalf("%s %q: %v: %s%s", name, args, err, text, problems.String())
	}
	return string(text)
}

// URL of a port of a pod's address, the first of the family asked for ("4" or "6"), or just the first.
func (l *Lab) URL(name, family, port string) string {
	l.Helper()
	for _, ip := range l.Get(App, name).Status.PodIPs {
		if family == "" || (family == "6") == strings.Contains(ip.IP, ":") {
			return "http://" + net.JoinHostPort(ip.IP, port)
		}
	}
	l.Fatalf("%s has no address of family %q", name, family)
	return ""
}

// From asks for a URL in the application of a pod, and gives what is output and whether there was an answer. A pod "" is the node.
func (l *Lab) GetFrom(name, url string) (string, bool) {
	l.Helper()
	if name == "" {
		text, err := l.Command(l.Context(), l.Box, "get", url).CombinedOutput()
		return string(text), err == nil
	}
	// On a busy machine ctr loses what a program says that ends at once.
	const tries = 5
	for try := 1; ; try++ {
		if text, err := l.Exec(App, name, app, "/box", "get", url); err != nil || text != "" || try == tries {
			return text, err == nil
		}
	}
}

// unassigned are addresses that are not assigned (RFC 5737, RFC 3849).
const (
	unassigned4 = "http://192.0.2.1:9999"
	unassigned6 = "http://[2001:db8::1]:9999"
)

// Flow is which of a pod's connections went by its proxy.
type Flow struct{ In, Out bool }

// Redirected and Untouched are flows.
var (
	Redirected = Flow{In: true, Out: true}
	Untouched  = Flow{}
)

// Flow asks a pod from the node, and has it ask for an address that are not assigned, in the family of its first address unless
// one is given. An answer has to come in where In is false, too.
func (l *Lab) Flow(name, family string) Flow {
	l.Helper()
	in := l.answer(name, l.URL(name, family, AppPort))
	unassigned := unassigned4
	if strings.Contains(l.URL(name, family, AppPort), "[") {
		unassigned = unassigned6
	}
	out, _ := l.GetFrom(name, unassigned)
	return Flow{In: strings.Contains(in, "via inbound "+name), Out: strings.Contains(out, "via outbound "+name)}
}

// answer asks the application of a pod from the node. It may begin to listen a moment after its container was started.
func (l *Lab) answer(name, url string) string {
	l.Helper()
	const tries, pause = 20, 250 * time.Millisecond
	text := ""
	for range tries {
		var answered bool
		if text, answered = l.GetFrom("", url); answered && strings.Contains(text, "hello from "+name) {
			return text
		}
		time.Sleep(pause)
	}
	l.Errorf("%s does not answer: %s", name, text)
	return text
}

// Flows checks the Flow of pods of the mesh. A proxy listens a moment after its container was started.
func (l *Lab) Flows(names ...string) {
	l.Helper()
	const tries, pause = 10, 500 * time.Millisecond
	for _, name := range names {
		var got Flow
		for range tries {
			if got = l.Flow(name, ""); got == Redirected {
				break
			}
			time.Sleep(pause)
		}
		if got != Redirected {
			l.Errorf("%s: traffic by its proxy: %+v", name, got)
		}
	}
}

// Decision is what "istio-cni decisions" says of a pod.
type Decision struct {
	Pod, Reason, Source string
	Captured            bool
	Requests            int
}

// Decision asks in the agent's container. The zero value is for a pod that is not known there.
func (l *Lab) Decision(pod string) Decision {
	l.Helper()
	all := l.Decisions("/" + pod)
	if len(all) == 0 {
		return Decision{}
	}
	return all[0]
}

// Decisions returns the agent's decisions for the application pods whose namespaced name contains pod.
func (l *Lab) Decisions(pod string) (all []Decision) {
	l.Helper()
	text, err := l.Exec(Mesh, l.Agent().Name, agent, "/usr/local/bin/istio-cni", "decisions", "--json", "--pod="+App+pod)
	if err != nil {
		l.Fatalf("%v: %s", err, text)
	}
	l.Must(json.Unmarshal([]byte(text), &all))
	return all
}

// Output is the log of a container, or of the one before it, "" for one that has not run.
func (l *Lab) Output(namespace, pod, container string, previous bool) string {
	ctx, cancel := background()
	defer cancel()
	options := &core.PodLogOptions{Container: container, Previous: previous}
	stream, err := l.client.CoreV1().Pods(namespace).GetLogs(pod, options).Stream(ctx)
	if err != nil {
		return ""
	}
	defer stream.Close() //nolint:errcheck // only read from
	text, _ := io.ReadAll(stream)
	return string(text)
}
