package kubetest

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Pod describes a pod by the fields that tests need. Zero fields are absent from the object.
type Pod struct {
	Namespace, Name, UID  string
	Labels, Annotations   map[string]string
	HostNetwork           bool
	RunAsUser, RunAsGroup *int64
	InitContainers        []Container
	Containers            []Container
}

// Container is one container of a [Pod].
type Container struct {
	Name string
	Args []string
	// Env are literal variables; EnvFromField are those with a valueFrom, by field path.
	Env                   []EnvVar
	EnvFromField          []EnvVar
	RunAsUser, RunAsGroup *int64
	// RestartPolicy is "Always" for a native sidecar among the init containers.
	RestartPolicy string
}

// EnvVar is a variable and its literal value or field path.
type EnvVar struct{ Name, Value string }

// JSON returns the pod as the API server would send it.
func (p Pod) JSON(tb testing.TB) []byte {
	tb.Helper()
	return marshal(corev1.Pod{
		TypeMeta: metav1.TypeMeta{Kind: "Pod", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{
			Name: p.Name, Namespace: p.Namespace, ResourceVersion: "1", UID: types.UID(p.UID), Labels: p.Labels, Annotations: p.Annotations,
		},
		Spec: corev1.PodSpec{
			NodeName: "node-1", HostNetwork: p.HostNetwork,
			SecurityContext: &corev1.PodSecurityContext{RunAsUser: p.RunAsUser, RunAsGroup: p.RunAsGroup},
			InitContainers:  containers(p.InitContainers), Containers: containers(p.Containers),
		},
		Status: corev1.PodStatus{Phase: corev1.PodPending},
	})
}

func containers(from []Container) []corev1.Container {
	list := make([]corev1.Container, 0, len(from))
	for _, c := range from {
		one := corev1.Container{Name: c.Name, Image: "registry.example/" + c.Name + ":1", Args: c.Args}
		if c.RestartPolicy != "" {
			one.RestartPolicy = new(corev1.ContainerRestartPolicy(c.RestartPolicy))
		}
		if c.RunAsUser != nil || c.RunAsGroup != nil {
			one.SecurityContext = &corev1.SecurityContext{RunAsUser: c.RunAsUser, RunAsGroup: c.RunAsGroup}
		}
		for _, v := range c.Env {
			one.Env = append(one.Env, corev1.EnvVar{Name: v.Name, Value: v.Value})
		}
		for _, v := range c.EnvFromField {
			field := &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: v.Value}
			one.Env = append(one.Env, corev1.EnvVar{Name: v.Name, ValueFrom: &corev1.EnvVarSource{FieldRef: field}})
		}
		list = append(list, one)
	}
	return list
}
