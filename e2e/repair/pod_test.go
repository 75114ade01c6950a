package repair

import (
	"encoding/json"
	"maps"

	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Names of Istio's API.
const (
	statusKey  = "sidecar.istio.io/status"
	brokenKey  = "cni.istio.io/uninitialized"
	validation = "istio-validation"
	proxy      = "istio-proxy"
	node       = "node-a"
)

// change modifies a pod.
type change func(*core.Pod)

// pod creates an injected pod with a node name, an address and a validation that has not started, and reports its
// status. It is deleted at once with grace period 0, because there is no kubelet.
func (l *fixture) pod(name string, changes ...change) *core.Pod {
	l.Helper()
	no, grace, user := false, int64(0), int64(1337)
	container := func(name string) core.Container { return core.Container{Name: name, Image: "none"} }
	check := container(validation)
	check.Args = []string{"istio-iptables", "--run-validation", "--skip-rule-apply"}
	check.SecurityContext = &core.SecurityContext{RunAsUser: &user, RunAsGroup: &user}
	pod := &core.Pod{
		ObjectMeta: meta.ObjectMeta{Namespace: l.app, Name: name, Annotations: map[string]string{statusKey: `{"containers":["istio-proxy"]}`}},
		Spec: core.PodSpec{
			NodeName: node, AutomountServiceAccountToken: &no, TerminationGracePeriodSeconds: &grace,
			InitContainers: []core.Container{check}, Containers: []core.Container{container(proxy), container("app")},
		},
		Status: core.PodStatus{
			Phase: core.PodPending, PodIP: "10.1.1.1", PodIPs: []core.PodIP{{IP: "10.1.1.1"}},
			InitContainerStatuses: []core.ContainerStatus{{Name: validation, Image: "none", State: waiting("PodInitializing")}},
		},
	}
	for _, change := range changes {
		change(pod)
	}
	made, err := l.client.CoreV1().Pods(pod.Namespace).Create(l.Context(), pod, meta.CreateOptions{})
	l.Must(err)
	return l.report(made, pod.Status)
}

// breaks reports that the validation has failed.
func (l *fixture) breaks(name string) {
	l.Helper()
	pod := l.get(l.app, name)
	broken()(pod)
	l.report(pod, pod.Status)
}

// report patches the status of a pod, as the kubelet does.
func (l *fixture) report(pod *core.Pod, status core.PodStatus) *core.Pod {
	l.Helper()
	text, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": pod.UID}, "status": status})
	l.Must(err)
	made, err := l.client.CoreV1().Pods(pod.Namespace).Patch(l.Context(), pod.Name, types.MergePatchType, text, meta.PatchOptions{}, "status")
	l.Must(err)
	return made
}

// annotate changes an annotation that the program does not read, if the pod exists.
func (l *fixture) annotate(name, value string) {
	l.Helper()
	patch := []byte(`{"metadata":{"annotations":{"example.com/annotated":"` + value + `"}}}`)
	_, err := l.client.CoreV1().Pods(l.app).Patch(l.Context(), name, types.MergePatchType, patch, meta.PatchOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		l.Errorf("changing pod %s: %v", name, err)
	}
}

// get returns a pod, or nil if it does not exist.
func (l *fixture) get(namespace, name string) *core.Pod {
	l.Helper()
	pod, err := l.client.CoreV1().Pods(namespace).Get(l.Context(), name, meta.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	l.Must(err)
	return pod
}

func (l *fixture) gone(name string) bool { l.Helper(); return l.get(l.app, name) == nil }

// labelled returns the value of the broken-pod label.
func (l *fixture) labelled(name string) string {
	l.Helper()
	if pod := l.get(l.app, name); pod != nil {
		return pod.Labels[brokenKey]
	}
	return "no such pod"
}

// delete deletes a pod, as another client would.
func (l *fixture) delete(name string) {
	l.Helper()
	l.Must(l.client.CoreV1().Pods(l.app).Delete(l.Context(), name, meta.DeleteOptions{}))
}

// States of containers.

func waiting(reason string) core.ContainerState {
	return core.ContainerState{Waiting: &core.ContainerStateWaiting{Reason: reason}}
}

func ended(code int32) core.ContainerState {
	reason := "Error"
	if code == 0 {
		reason = "Completed"
	}
	return core.ContainerState{Terminated: &core.ContainerStateTerminated{
		ExitCode: code, Reason: reason, StartedAt: meta.Now(), FinishedAt: meta.Now(),
	}}
}

// status sets the state and the last state of the validation container.
func status(is, last core.ContainerState) change {
	return func(p *core.Pod) {
		restarts := int32(0)
		if last != (core.ContainerState{}) {
			restarts = 1
		}
		p.Status.InitContainerStatuses = []core.ContainerStatus{{
			Name: validation, Image: "none", State: is, LastTerminationState: last, RestartCount: restarts,
		}}
	}
}

// broken is the status that the reference looks for.
func broken() change { return status(waiting("CrashLoopBackOff"), ended(126)) }

func labels(all map[string]string) change {
	return func(p *core.Pod) {
		if p.Labels == nil {
			p.Labels = map[string]string{}
		}
		maps.Copy(p.Labels, all)
	}
}

func on(node string) change { return func(p *core.Pod) { p.Spec.NodeName = node } }

func in(namespace string) change { return func(p *core.Pod) { p.Namespace = namespace } }

func grace(seconds int64) change {
	return func(p *core.Pod) { p.Spec.TerminationGracePeriodSeconds = &seconds }
}

func phase(phase core.PodPhase) change { return func(p *core.Pod) { p.Status.Phase = phase } }

// encode marshals an API object, which cannot fail.
func encode(object any) string {
	text, err := json.Marshal(object)
	if err != nil {
		panic(err)
	}
	return string(text)
}
