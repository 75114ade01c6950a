package kube

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// The pod's wire form, cut down to what [sidecar.Facts] needs: everything else in the document is skipped, so that a
// field of tomorrow's API cannot break the decoding. Names are those of k8s.io/api/core/v1.
type (
	wirePod struct {
		Kind       string   `json:"kind"`
		APIVersion string   `json:"apiVersion"`
		Metadata   wireMeta `json:"metadata"`
		Spec       wireSpec `json:"spec"`
	}
	wireMeta struct {
		Name        string            `json:"name"`
		Namespace   string            `json:"namespace"`
		UID         string            `json:"uid"`
		Labels      map[string]string `json:"labels"`
		Annotations map[string]string `json:"annotations"`
	}
	wireSpec struct {
		HostNetwork     bool            `json:"hostNetwork"`
		SecurityContext *wireSecurity   `json:"securityContext"`
		InitContainers  []wireContainer `json:"initContainers"`
		Containers      []wireContainer `json:"containers"`
	}
	wireContainer struct {
		Name            string        `json:"name"`
		Args            []string      `json:"args"`
		Env             []wireEnv     `json:"env"`
		SecurityContext *wireSecurity `json:"securityContext"`
	}
	// wireEnv has no valueFrom: such a variable keeps its place and has an empty value.
	wireEnv struct {
		Name  string `json:"name"`
		Value string `json:"value"`
	}
	// wireSecurity keeps pointers: user 0 is a statement, an absent user is none.
	wireSecurity struct {
		RunAsUser  *int64 `json:"runAsUser"`
		RunAsGroup *int64 `json:"runAsGroup"`
	}
)

// errNotPod says that a document is JSON but no pod of the API this package speaks.
var errNotPod = errors.New("not a v1 Pod")

// Facts reduces one pod, as the API server sends it in JSON, to what decisions rest on. It touches nothing else.
func Facts(podJSON []byte) (sidecar.Facts, error) {
	var pod wirePod
	if err := json.Unmarshal(podJSON, &pod); err != nil {
		return sidecar.Facts{}, fmt.Errorf("decoding pod: %w", err)
	}
	if pod.Kind != "Pod" || pod.APIVersion != "v1" || pod.Metadata.Name == "" || pod.Metadata.Namespace == "" {
		return sidecar.Facts{}, fmt.Errorf("decoding pod: %w: kind %q, apiVersion %q, namespace %q, name %q",
			errNotPod, pod.Kind, pod.APIVersion, pod.Metadata.Namespace, pod.Metadata.Name)
	}
	return pod.facts(), nil
}

func (p *wirePod) facts() sidecar.Facts {
	facts := sidecar.Facts{
		Namespace:   p.Metadata.Namespace,
		Name:        p.Metadata.Name,
		UID:         p.Metadata.UID,
		HostNetwork: p.Spec.HostNetwork,
		Labels:      p.Metadata.Labels,
		Annotations: p.Metadata.Annotations,
		Containers:  make([]sidecar.Container, 0, len(p.Spec.InitContainers)+len(p.Spec.Containers)),
	}
	facts.RunAsUser, facts.RunAsGroup = p.Spec.SecurityContext.ids()
	for i := range p.Spec.InitContainers {
		container := p.Spec.InitContainers[i].fact()
		container.Init = true
		facts.Containers = append(facts.Containers, container)
	}
	for i := range p.Spec.Containers {
		facts.Containers = append(facts.Containers, p.Spec.Containers[i].fact())
	}
	return facts
}

func (c *wireContainer) fact() sidecar.Container {
	container := sidecar.Container{Name: c.Name, Args: c.Args}
	container.RunAsUser, container.RunAsGroup = c.SecurityContext.ids()
	for _, variable := range c.Env {
		container.Env = append(container.Env, sidecar.EnvVar(variable))
	}
	return container
}

func (s *wireSecurity) ids() (user, group *int64) {
	if s == nil {
		return nil, nil
	}
	return s.RunAsUser, s.RunAsGroup
}
