package lab

import (
	"maps"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Names of containers in injected pods.
const (
	Validation = "istio-validation"
	Proxy      = "istio-proxy"
	app        = "app"
)

// StatusKey is the annotation that marks an injected pod.
const StatusKey = "sidecar.istio.io/status"

const (
	proxyUser = 1337
	appUser   = 1000
	// AppPort is the port of the application container.
	AppPort = "8080"
)

// Change modifies a pod template.
type Change func(*core.PodTemplateSpec)

// Container returns a container of an imported image.
func Container(name, image string, user int64, args ...string) core.Container {
	return core.Container{
		Name: name, Image: image, ImagePullPolicy: core.PullNever, Args: args,
		SecurityContext: &core.SecurityContext{RunAsUser: &user, RunAsGroup: &user},
	}
}

// Plain returns a pod without sidecar, with an application.
func Plain(changes ...Change) core.PodTemplateSpec {
	grace, no := int64(1), false
	template := core.PodTemplateSpec{Spec: core.PodSpec{
		AutomountServiceAccountToken: &no, TerminationGracePeriodSeconds: &grace,
		Containers: []core.Container{Container(app, BoxImage, appUser, "serve", ":"+AppPort)},
	}}
	for _, change := range changes {
		change(&template)
	}
	return template
}

// Injected returns the pod that injection makes of Plain with the CNI plugin enabled.
func Injected(changes ...Change) core.PodTemplateSpec {
	template := Plain()
	template.Annotations = map[string]string{StatusKey: `{"containers":["istio-proxy"]}`}
	template.Spec.InitContainers = []core.Container{
		Container(Validation, Image, proxyUser, "istio-iptables", "--run-validation", "--skip-rule-apply", "--probe-timeout=2s"),
	}
	template.Spec.Containers = append([]core.Container{Container(Proxy, BoxImage, proxyUser, "proxy", "sidecar")}, template.Spec.Containers...)
	for _, change := range changes {
		change(&template)
	}
	return template
}

// Annotated adds annotations.
func Annotated(pairs map[string]string) Change {
	return func(template *core.PodTemplateSpec) {
		if template.Annotations == nil {
			template.Annotations = map[string]string{}
		}
		maps.Copy(template.Annotations, pairs)
	}
}

// ProxyEnv adds an environment variable to the proxy.
func ProxyEnv(name, value string) Change {
	return func(template *core.PodTemplateSpec) {
		proxy := template.Spec.Containers
		for i := range proxy {
			if proxy[i].Name == Proxy {
				proxy[i].Env = append(proxy[i].Env, core.EnvVar{Name: name, Value: value})
			}
		}
	}
}

// Native makes the proxy a native sidecar: an init container with restartPolicy Always.
func Native(template *core.PodTemplateSpec) {
	always := core.ContainerRestartPolicyAlways
	proxy := template.Spec.Containers[0]
	proxy.RestartPolicy = &always
	template.Spec.Containers = template.Spec.Containers[1:]
	template.Spec.InitContainers = append(template.Spec.InitContainers, proxy)
}

// Transparent gives the proxy interceptionMode TPROXY, as injection does: UID 0 with the proxy's group, and NET_ADMIN
// for transparent sockets.
func Transparent(template *core.PodTemplateSpec) {
	Annotated(map[string]string{"sidecar.istio.io/interceptionMode": "TPROXY"})(template)
	root := int64(0)
	proxy := &template.Spec.Containers[0]
	proxy.Args = []string{"proxy", "sidecar", "transparent"}
	proxy.SecurityContext.RunAsUser = &root
	proxy.SecurityContext.Capabilities = &core.Capabilities{Add: []core.Capability{"NET_ADMIN"}, Drop: []core.Capability{"ALL"}}
}

// HostNetwork sets hostNetwork. The pod keeps its injection annotation, because the reference's injection ignores the
// field.
func HostNetwork(template *core.PodTemplateSpec) { template.Spec.HostNetwork = true }

// On has the pod scheduled to a node.
func On(node string) Change {
	return func(template *core.PodTemplateSpec) {
		template.Spec.NodeSelector = map[string]string{core.LabelHostname: node}
	}
}

// Once sets restartPolicy Never.
func Once(template *core.PodTemplateSpec) { template.Spec.RestartPolicy = core.RestartPolicyNever }

// Pod creates a pod in namespace App.
func (l *Lab) Pod(name string, template core.PodTemplateSpec) {
	l.Helper()
	template.Name = name
	_, err := l.client.CoreV1().Pods(App).Create(l.Context(), &core.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}, meta.CreateOptions{})
	l.Must(err)
}

// Remove deletes pods in namespace App and waits until they are gone.
func (l *Lab) Remove(names ...string) {
	l.Helper()
	uids := map[string]types.UID{}
	for _, name := range names {
		uids[name] = l.Get(App, name).UID
		l.Must(l.client.CoreV1().Pods(App).Delete(l.Context(), name, meta.DeleteOptions{}))
	}
	for _, name := range names {
		l.Until("the end of "+name, func() bool { pod := l.Get(App, name); return pod == nil || pod.UID != uids[name] })
	}
}

// RemoveAll deletes all pods in namespace App and waits until they are gone.
func (l *Lab) RemoveAll() {
	l.Helper()
	l.Must(l.client.CoreV1().Pods(App).DeleteCollection(l.Context(), meta.DeleteOptions{}, meta.ListOptions{}))
	l.Until("the pods to go", func() bool {
		pods, err := l.client.CoreV1().Pods(App).List(l.Context(), meta.ListOptions{})
		return err == nil && len(pods.Items) == 0
	})
}
