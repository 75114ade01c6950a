package kubetest

import (
	"encoding/json"
	"testing"
)

// Pod describes a pod in the few words that tests need. Zero fields are absent from the object.
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

type object = map[string]any

// JSON is the pod as the API server would send it.
func (p Pod) JSON(tb testing.TB) []byte {
	tb.Helper()
	metadata := object{"name": p.Name, "namespace": p.Namespace, "resourceVersion": "1"}
	set(metadata, "uid", p.UID, p.UID != "")
	set(metadata, "labels", p.Labels, p.Labels != nil)
	set(metadata, "annotations", p.Annotations, p.Annotations != nil)
	spec := object{"containers": containers(p.Containers), "nodeName": "node-1"}
	set(spec, "initContainers", containers(p.InitContainers), p.InitContainers != nil)
	set(spec, "hostNetwork", true, p.HostNetwork)
	spec["securityContext"] = security(p.RunAsUser, p.RunAsGroup)
	return encode(tb, object{
		"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": spec, "status": object{"phase": "Pending"},
	})
}

func encode(tb testing.TB, o object) []byte {
	tb.Helper()
	data, err := json.Marshal(o)
	if err != nil {
		tb.Errorf("kubetest: encoding JSON: %v", err)
	}
	return data
}

func containers(from []Container) []object {
	list := make([]object, 0, len(from))
	for _, c := range from {
		one := object{"name": c.Name, "image": "registry.example/" + c.Name + ":1"}
		set(one, "args", c.Args, c.Args != nil)
		set(one, "restartPolicy", c.RestartPolicy, c.RestartPolicy != "")
		set(one, "securityContext", security(c.RunAsUser, c.RunAsGroup), c.RunAsUser != nil || c.RunAsGroup != nil)
		variables := make([]object, 0, len(c.Env)+len(c.EnvFromField))
		for _, v := range c.Env {
			variables = append(variables, object{"name": v.Name, "value": v.Value})
		}
		for _, v := range c.EnvFromField {
			field := object{"fieldRef": object{"apiVersion": "v1", "fieldPath": v.Value}}
			variables = append(variables, object{"name": v.Name, "valueFrom": field})
		}
		set(one, "env", variables, len(variables) > 0)
		list = append(list, one)
	}
	return list
}

func security(user, group *int64) object {
	context := object{}
	set(context, "runAsUser", user, user != nil)
	set(context, "runAsGroup", group, group != nil)
	return context
}

func set(in object, key string, value any, present bool) {
	if present {
		in[key] = value
	}
}
