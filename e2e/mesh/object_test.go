package mesh

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"

	apps "k8s.io/api/apps/v1"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	rbac "k8s.io/api/rbac/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	kube "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
)

const (
	validation = "istio-validation"
	proxyUser  = 1337
)

func container(name, image string, user int64, args ...string) core.Container {
	return core.Container{
		Name: name, Image: image, ImagePullPolicy: core.PullNever, Args: args,
		SecurityContext: &core.SecurityContext{RunAsUser: &user, RunAsGroup: &user},
	}
}

// injected is what injection makes of a pod with an application that listens nowhere. The proxy's two ports are two containers.
func injected() core.PodTemplateSpec {
	grace, no := int64(1), false
	check := container(validation, cniImage, proxyUser, "iptables", "--run-validation", "--skip-rule-apply", "--probe-timeout=2s")
	return core.PodTemplateSpec{
		ObjectMeta: meta.ObjectMeta{Annotations: map[string]string{statusKey: `{"containers":["istio-proxy"]}`}},
		Spec: core.PodSpec{
			AutomountServiceAccountToken: &no, TerminationGracePeriodSeconds: &grace,
			InitContainers: []core.Container{check},
			Containers: []core.Container{
				container("istio-proxy", boxImage, proxyUser, "serve", ":15001"),
				container("istio-proxy-inbound", boxImage, proxyUser, "serve", ":15006"),
				container("app", boxImage, 1000),
			},
		},
	}
}

// pod makes one.
func (l *lab) pod(name string, template core.PodTemplateSpec) {
	l.Helper()
	template.Name = name
	_, err := l.client.CoreV1().Pods(appNamespace).Create(l.Context(), &core.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}, meta.CreateOptions{})
	l.must(err)
}

// plain is a pod outside of the mesh.
func plain(hostNetwork bool) core.PodTemplateSpec {
	template := injected()
	template.Annotations = nil
	template.Spec.InitContainers, template.Spec.Containers = nil, template.Spec.Containers[2:]
	if hostNetwork {
		// It looks as if it were injected.
		template.Spec.HostNetwork = true
		template.Annotations = map[string]string{statusKey: "{}"}
		template.Spec.Containers = append(template.Spec.Containers, container("istio-proxy", boxImage, proxyUser))
	}
	return template
}

// statefulSet makes one with a pod NAME-0.
func (l *lab) statefulSet(name string) {
	l.Helper()
	labels := map[string]string{"app": name}
	template := injected()
	template.Labels = labels
	_, err := l.client.AppsV1().StatefulSets(appNamespace).Create(l.Context(), &apps.StatefulSet{
		ObjectMeta: meta.ObjectMeta{Name: name}, Spec: apps.StatefulSetSpec{
			Selector: &meta.LabelSelector{MatchLabels: labels}, Template: template, ServiceName: name,
		},
	}, meta.CreateOptions{})
	l.must(err)
}

// job makes one of that name whose pod is tried once.
func (l *lab) job() {
	l.Helper()
	template, once := injected(), int32(0)
	template.Spec.RestartPolicy = core.RestartPolicyNever
	_, err := l.client.BatchV1().Jobs(appNamespace).Create(l.Context(), &batch.Job{
		ObjectMeta: meta.ObjectMeta{Name: "job"}, Spec: batch.JobSpec{Template: template, BackoffLimit: &once},
	}, meta.CreateOptions{})
	l.must(err)
}

// jobPod gives the name of the job's pod, "" as long as there is none.
func (l *lab) jobPod() string {
	l.Helper()
	pods, err := l.client.CoreV1().Pods(appNamespace).List(l.Context(), meta.ListOptions{LabelSelector: "batch.kubernetes.io/job-name=job"})
	l.must(err)
	if len(pods.Items) == 0 {
		return ""
	}
	return pods.Items[0].Name
}

// manifest are the objects of manifests/istio-cni.yaml in their order.
func (l *lab) manifest() (all []kube.Object) {
	l.Helper()
	_, file, _, _ := runtime.Caller(0)
	text, err := os.ReadFile(filepath.Join(filepath.Dir(file), "..", "..", "manifests", "istio-cni.yaml"))
	l.must(err)
	const window = 1 << 16
	documents := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), window)
	for {
		var raw kube.RawExtension
		err := documents.Decode(&raw)
		if errors.Is(err, io.EOF) {
			return all
		}
		l.must(err)
		if len(raw.Raw) == 0 || string(raw.Raw) == "null" {
			continue // the comment ahead of the first
		}
		object, _, err := scheme.Codecs.UniversalDeserializer().Decode(raw.Raw, nil, nil)
		l.must(err)
		all = append(all, object)
	}
}

// apply does as kubectl apply -f does where nothing is yet.
func (l *lab) apply(objects []kube.Object) {
	l.Helper()
	ctx, options := l.Context(), meta.CreateOptions{}
	for _, object := range objects {
		var err error
		switch o := object.(type) {
		case *core.ServiceAccount:
			_, err = l.client.CoreV1().ServiceAccounts(o.Namespace).Create(ctx, o, options)
		case *core.ConfigMap:
			_, err = l.client.CoreV1().ConfigMaps(o.Namespace).Create(ctx, o, options)
		case *rbac.ClusterRole:
			_, err = l.client.RbacV1().ClusterRoles().Create(ctx, o, options)
		case *rbac.ClusterRoleBinding:
			_, err = l.client.RbacV1().ClusterRoleBindings().Create(ctx, o, options)
		case *rbac.Role:
			_, err = l.client.RbacV1().Roles(o.Namespace).Create(ctx, o, options)
		case *rbac.RoleBinding:
			_, err = l.client.RbacV1().RoleBindings(o.Namespace).Create(ctx, o, options)
		case *apps.DaemonSet:
			_, err = l.client.AppsV1().DaemonSets(o.Namespace).Create(ctx, o, options)
		default:
			l.Fatalf("the manifest has a %T", object)
		}
		l.must(err)
	}
}

// remove does as kubectl delete -f does: in the order of the file, so that the account and its rights go first.
func (l *lab) remove(objects []kube.Object) {
	l.Helper()
	ctx, options := l.Context(), meta.DeleteOptions{}
	for _, object := range objects {
		var err error
		switch o := object.(type) {
		case *core.ServiceAccount:
			err = l.client.CoreV1().ServiceAccounts(o.Namespace).Delete(ctx, o.Name, options)
		case *core.ConfigMap:
			err = l.client.CoreV1().ConfigMaps(o.Namespace).Delete(ctx, o.Name, options)
		case *rbac.ClusterRole:
			err = l.client.RbacV1().ClusterRoles().Delete(ctx, o.Name, options)
		case *rbac.ClusterRoleBinding:
			err = l.client.RbacV1().ClusterRoleBindings().Delete(ctx, o.Name, options)
		case *rbac.Role:
			err = l.client.RbacV1().Roles(o.Namespace).Delete(ctx, o.Name, options)
		case *rbac.RoleBinding:
			err = l.client.RbacV1().RoleBindings(o.Namespace).Delete(ctx, o.Name, options)
		case *apps.DaemonSet:
			err = l.client.AppsV1().DaemonSets(o.Namespace).Delete(ctx, o.Name, options)
		}
		l.must(err)
	}
}
