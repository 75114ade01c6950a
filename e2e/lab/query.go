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

// Get returns a pod, or nil if it does not exist.
func (l *Lab) Get(namespace, name string) *core.Pod {
	l.Helper()
	pod, err := l.client.CoreV1().Pods(namespace).Get(l.Context(), name, meta.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	l.Must(err)
	return pod
}

// Ready reports whether a pod exists and is ready.
func Ready(pod *core.Pod) bool {
	return pod != nil && slices.ContainsFunc(pod.Status.Conditions, func(c core.PodCondition) bool {
		return c.Type == core.PodReady && c.Status == core.ConditionTrue
	})
}

// IsReady reports whether a pod in namespace App exists and is ready.
func (l *Lab) IsReady(name string) bool { l.Helper(); return Ready(l.Get(App, name)) }

// UntilReady waits until pods in namespace App are ready.
func (l *Lab) UntilReady(names ...string) {
	l.Helper()
	for _, name := range names {
		l.Until("pod "+name, func() bool { return l.IsReady(name) })
	}
}

// ValidationFailed reports whether the container istio-validation exited with 126, now or in its last termination
// state: traffic is not redirected.
func ValidationFailed(pod *core.Pod) bool {
	return pod != nil && slices.ContainsFunc(pod.Status.InitContainerStatuses, func(s core.ContainerStatus) bool {
		is := func(s core.ContainerState) bool { return s.Terminated != nil && s.Terminated.ExitCode == 126 }
		return s.Name == Validation && (is(s.State) || is(s.LastTerminationState))
	})
}

// Failed is ValidationFailed for a pod in namespace App.
func (l *Lab) Failed(name string) bool { l.Helper(); return ValidationFailed(l.Get(App, name)) }

// Restarts returns the sum of a pod's container restart counts.
func Restarts(pod *core.Pod) (n int32) {
	for _, s := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		n += s.RestartCount
	}
	return n
}

// Event reports whether a pod has an event with this reason whose message contains words.
func (l *Lab) Event(name, reason, words string) bool {
	l.Helper()
	events, err := l.client.CoreV1().Events(App).List(l.Context(), meta.ListOptions{})
	l.Must(err)
	return slices.ContainsFunc(events.Items, func(e core.Event) bool {
		return e.InvolvedObject.Name == name && e.Reason == reason && strings.Contains(e.Message, words)
	})
}

const runtimeSocket = "/run/containerd/containerd.sock"

// execs numbers the exec IDs of containerd tasks, which must be unique.
var execs atomic.Int64

// Exec runs a program in a container, like kubectl exec, and returns its output.
func (l *Lab) Exec(namespace, pod, container string, args ...string) (string, error) {
	l.Helper()
	found := l.Get(namespace, pod)
	if found == nil || found.Spec.NodeName == "" {
		return "", fmt.Errorf("pod %s/%s does not exist, or has no node", namespace, pod)
	}
	id := ""
	for _, s := range slices.Concat(found.Status.InitContainerStatuses, found.Status.ContainerStatuses) {
		if s.Name == container {
			id = strings.TrimPrefix(s.ContainerID, "containerd://")
		}
	}
	return l.ctr(found, append([]string{"task", "exec", "--exec-id", fmt.Sprintf("e2e-%d", execs.Add(1)), id}, args...)...)
}

// ctr runs containerd's command line client on the node of a pod.
func (l *Lab) ctr(pod *core.Pod, args ...string) (string, error) {
	l.Helper()
	all := append([]string{"--address", runtimeSocket, "--namespace", "k8s.io"}, args...)
	text, err := l.On(pod.Spec.NodeName).Command(l.Context(), "ctr", all...).CombinedOutput()
	return string(text), err
}

// Signal sends a signal to the first process of a pod's first container.
func (l *Lab) Signal(pod *core.Pod, signal string) {
	l.Helper()
	id := strings.TrimPrefix(pod.Status.ContainerStatuses[0].ContainerID, "containerd://")
	if text, err := l.ctr(pod, "task", "kill", "--signal", signal, id); err != nil {
		l.Fatalf("%v: %s", err, text)
	}
}

// OnNode runs a program on the first node and returns its standard output. The test ends if the program fails.
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

// URL returns the URL of a port at a pod's first address, or its first address of a family ("4" or "6").
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

// tries bounds Exec of a program that exits at once: under load ctr loses its output.
const tries = 5

// GetFrom requests a URL from the application container of a pod, or from the first node if name is "". It returns the
// response and whether the status was 200.
func (l *Lab) GetFrom(name, url string) (string, bool) {
	l.Helper()
	if name == "" {
		text, err := l.Command(l.Context(), l.Box, "get", url).CombinedOutput()
		return string(text), err == nil
	}
	for try := 1; ; try++ {
		if text, err := l.Exec(App, name, app, "/box", "get", url); err != nil || text != "" || try == tries {
			return text, err == nil
		}
	}
}

// unassigned4 and unassigned6 are addresses for documentation (RFC 5737, RFC 3849).
const (
	unassigned4 = "http://192.0.2.1:9999"
	unassigned6 = "http://[2001:db8::1]:9999"
)

// Flow reports whether inbound and outbound connections of a pod pass its proxy.
type Flow struct{ In, Out bool }

// Redirected and Untouched are the flows of pods with and without redirection.
var (
	Redirected = Flow{In: true, Out: true}
	Untouched  = Flow{}
)

// Flow sends a request from the node to a pod, and one from the pod to an unassigned address, in a family or, if "",
// in the family of its first address. The pod must respond also where In is false.
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

// answer requests the application of a pod from the node, and retries while it starts to listen.
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

// Flows checks that pods are redirected in both directions, and retries while their proxies start to listen.
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

// Decision is one decision in the output of "istio-cni decisions".
type Decision struct {
	Namespace, Pod, Reason, Source string
	Captured                       bool
}

// Decision returns the agent's decision about a pod, or the zero value if it has none.
func (l *Lab) Decision(pod string) Decision {
	l.Helper()
	all := l.Decisions("/" + pod)
	if len(all) == 0 {
		return Decision{}
	}
	return all[0]
}

// Decisions returns the agent's decisions for the application pods whose namespaced name contains pod.
func (l *Lab) Decisions(pod string) []Decision { l.Helper(); return l.DecisionsOf(l.Agent(), pod) }

// DecisionsOf is Decisions of the agent in a pod.
func (l *Lab) DecisionsOf(from *core.Pod, pod string) []Decision {
	l.Helper()
	text := ""
	for try := 0; text == "" && try < tries; try++ {
		var err error
		// Not by --pod, with which the command fails if there is none.
		text, err = l.Exec(Mesh, from.Name, agent, "/usr/local/bin/istio-cni", "decisions", "--json")
		if err != nil {
			l.Fatalf("%v: %s", err, text)
		}
	}
	var list struct{ Items []Decision }
	l.Must(json.Unmarshal([]byte(text), &list))
	return slices.DeleteFunc(list.Items, func(d Decision) bool { return !strings.Contains(d.Namespace+"/"+d.Pod, App+pod) })
}

// Output returns the log of a container, or of its previous instance, "" if there is none.
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
