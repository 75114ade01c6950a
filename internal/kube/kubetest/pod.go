package kubetest

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Pod describes a pod by the fields that tests need.
type Pod struct {
	Namespace, Name, UID string
	Labels, Annotations  map[string]string
	Containers           []Container
	RuntimeClass         string
}

// Container is the API's type.
type Container = corev1.Container

// EnvVar is the API's type.
type EnvVar = corev1.EnvVar

// JSON returns the pod as the API server would send it.
func (p Pod) JSON(tb testing.TB) []byte {
	tb.Helper()
	return marshal(corev1.Pod{
		TypeMeta: metav1.TypeMeta{Kind: "Pod", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{
			Name: p.Name, Namespace: p.Namespace, ResourceVersion: "1", UID: types.UID(p.UID), Labels: p.Labels, Annotations: p.Annotations,
		},
		Spec:   corev1.PodSpec{NodeName: "node-1", Containers: p.Containers, RuntimeClassName: &p.RuntimeClass},
		Status: corev1.PodStatus{Phase: corev1.PodPending},
	})
}
