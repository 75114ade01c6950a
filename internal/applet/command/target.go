package command

import (
	"fmt"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/audit"
)

// Target is a pod, or a workload whose pods are meant.
type Target struct {
	// Kind is pod or a workload's resource. Namespace is "" where the argument names none.
	Kind, Namespace, Name string
}

// Pod is the kind of a pod.
const Pod = "pod"

// kind returns the resource that a word in front of a name stands for in kubectl, "" for any other word.
func kind(word string) string {
	word, _, _ = strings.Cut(word, ".") // "deployment.apps"
	switch word {
	case "po", "pod", "pods":
		return Pod
	case "deploy", "deployment", "deployments":
		return "deployments.apps"
	case "ds", "daemonset", "daemonsets":
		return "daemonsets.apps"
	case "sts", "statefulset", "statefulsets":
		return "statefulsets.apps"
	case "rs", "replicaset", "replicasets":
		return "replicasets.apps"
	case "job", "jobs":
		return "jobs.batch"
	}
	return ""
}

// ParseTarget reads NAME, NAMESPACE/NAME, KIND/NAME or NAMESPACE/KIND/NAME. namespace is the flag -n, "" without it. A word that is a
// kind of kubectl's is never a namespace: with -n such a namespace has a name as well.
func ParseTarget(text, namespace string) (t Target, err error) {
	t = Target{Kind: Pod, Namespace: namespace}
	parts := strings.Split(text, "/")
	t.Name, parts = parts[len(parts)-1], parts[:len(parts)-1]
	if last := len(parts) - 1; last >= 0 && kind(parts[last]) != "" {
		t.Kind, parts = kind(parts[last]), parts[:last]
	}
	if len(parts) == 1 {
		t.Namespace, parts = parts[0], nil
	}
	// The parts are used in the path of a request.
	if len(parts) > 0 || t.Name == "" || strings.Contains(text, "//") || text[0] == '/' || strings.ContainsAny(t.Namespace+t.Name, "/?#%") {
		return t, fmt.Errorf("pod %q: want NAMESPACE/NAME, or NAME and -n NAMESPACE", text)
	}
	if namespace != "" && t.Namespace != namespace {
		return t, fmt.Errorf("pod %q and --namespace %s contradict each other (of a KIND/NAME the kind is pod, deploy, ds, sts, rs or job)", text, namespace)
	}
	return t, nil
}

// PodKey returns the argument with which PodOf finds the pod NAMESPACE/NAME, also in a namespace that is called like a kind.
func PodKey(pod string) string {
	namespace, name, _ := strings.Cut(pod, "/")
	if kind(namespace) != "" {
		return namespace + "/" + Pod + "/" + name
	}
	return pod
}

// PodOf returns NAMESPACE/NAME of the pod that an argument names on a node.
func PodOf(text, namespace string) (string, error) {
	t, err := ParseTarget(text, namespace)
	switch {
	case err != nil:
		return "", err
	case t.Kind != Pod:
		return "", workloadError(text)
	case t.Namespace == "":
		return "", fmt.Errorf("pod %q: want NAMESPACE/NAME, or NAME and -n NAMESPACE", text)
	}
	return t.Namespace + "/" + t.Name, nil
}

// workloadError is the error on a node about a workload.
func workloadError(text string) error {
	return fmt.Errorf("%q: a node agent knows pods only, kubectl istio-cni finds the pods of a workload (a pod in a namespace of that name: -n NAMESPACE NAME)", text)
}

// String returns NAME or NAMESPACE/NAME.
func (t Target) String() string { return strings.TrimPrefix(t.Namespace+"/"+t.Name, "/") }

// Is reports whether the target names a pod. Without a namespace it names the pods of all namespaces.
func (t Target) Is(s audit.Status) bool {
	return t.Name == s.Pod && (t.Namespace == "" || t.Namespace == s.Namespace)
}
