package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"

	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	kube "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
)

// agent is the name of the agent's container.
const agent = "install-cni"

// Object is an object of any kind.
type Object = *unstructured.Unstructured

// Objects are the objects of a manifest, in order.
type Objects []Object

// Manifest returns the objects of manifests/istio-cni.yaml.
func (l *Lab) Manifest() Objects {
	l.Helper()
	text, err := os.ReadFile(filepath.Join(repository(), "manifests", "istio-cni.yaml"))
	l.Must(err)
	return l.Parse(text)
}

// Chart renders the chart with values and returns its objects.
func (l *Lab) Chart(values string) Objects {
	l.Helper()
	return l.render(filepath.Join(repository(), "manifests", "istio-cni"), values)
}

// render renders the chart of a directory with values.
func (l *Lab) render(chart, values string) Objects {
	l.Helper()
	file := filepath.Join(l.TempDir(), "values.yaml")
	l.Must(os.WriteFile(file, []byte(values), 0o600))
	command := exec.CommandContext(l.Context(), l.Artifacts.Chart, "--chart", chart, "-f", file)
	var problems bytes.Buffer
	command.Stderr = &problems
	text, err := command.Output()
	if err != nil {
		l.Fatalf("rendering the chart: %v: %s", err, problems.String())
	}
	return l.Parse(text)
}

func repository() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Join(filepath.Dir(file), "..", "..")
}

// Parse is Decode of a stream that must be valid.
func (l *Lab) Parse(text []byte) Objects {
	l.Helper()
	all, err := Decode(text)
	l.Must(err)
	return all
}

// Decode decodes a stream of YAML documents.
func Decode(text []byte) (all Objects, err error) {
	const window = 1 << 16
	documents := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), window)
	for {
		var raw kube.RawExtension
		err := documents.Decode(&raw)
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, fmt.Errorf("decoding YAML: %w", err)
		}
		if len(raw.Raw) == 0 || string(raw.Raw) == "null" {
			continue // a comment
		}
		object := &unstructured.Unstructured{}
		if err := object.UnmarshalJSON(raw.Raw); err != nil {
			return nil, fmt.Errorf("decoding an object: %w", err)
		}
		all = append(all, object)
	}
}

// Apply applies objects like "kubectl apply --server-side". Unknown fields are an error.
func (l *Lab) Apply(objects Objects) {
	l.Helper()
	to := l.resources()
	for _, object := range objects {
		body, err := object.MarshalJSON()
		l.Must(err)
		force := true
		_, err = to(object).Patch(l.Context(), object.GetName(), "application/apply-patch+yaml", body, meta.PatchOptions{
			FieldManager: "e2e", Force: &force, FieldValidation: meta.FieldValidationStrict,
		})
		if err != nil {
			l.Fatalf("applying %s %s: %v", object.GetKind(), object.GetName(), err)
		}
	}
}

// Delete deletes objects like "kubectl delete -f", in the order of the file: the ServiceAccount and its roles are
// deleted first.
func (l *Lab) Delete(objects Objects) {
	l.Helper()
	to := l.resources()
	for _, object := range objects {
		err := to(object).Delete(l.Context(), object.GetName(), meta.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			l.Fatalf("deleting %s %s: %v", object.GetKind(), object.GetName(), err)
		}
	}
}

func (l *Lab) resources() func(*unstructured.Unstructured) dynamic.ResourceInterface {
	l.Helper()
	config := l.REST()
	// Warnings are tested by e2e/renderings.
	config.WarningHandler = rest.NoWarnings{}
	client, err := dynamic.NewForConfig(config)
	l.Must(err)
	mapper := restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(l.client.Discovery()))
	return func(object *unstructured.Unstructured) dynamic.ResourceInterface {
		l.Helper()
		kind := object.GroupVersionKind()
		mapping, err := mapper.RESTMapping(kind.GroupKind(), kind.Version)
		l.Must(err)
		if object.GetNamespace() == "" {
			return client.Resource(mapping.Resource)
		}
		return client.Resource(mapping.Resource).Namespace(object.GetNamespace())
	}
}

// Install installs the chart with values, waits until the agent is ready, and returns the objects.
func (l *Lab) Install(values string) Objects {
	l.Helper()
	return l.install(l.Chart(values))
}

// InstallChart is Install with the chart of another directory, such as the reference's.
func (l *Lab) InstallChart(chart, values string) Objects {
	l.Helper()
	return l.install(l.render(chart, values))
}

func (l *Lab) install(objects Objects) Objects {
	l.Helper()
	l.Apply(objects)
	l.UntilAgentReady()
	return objects
}

// Uninstall deletes the objects returned by Install and waits until the agent's pod is gone.
func (l *Lab) Uninstall(objects Objects) {
	l.Helper()
	l.Delete(objects)
	l.Until("the agent to go", func() bool { return l.Agent() == nil })
}

// Agent returns the agent's pod, the youngest if there are several, or nil.
func (l *Lab) Agent() *core.Pod { l.Helper(); return l.agent("") }

// AgentOn is Agent of one node.
func (l *Lab) AgentOn(node string) *core.Pod { l.Helper(); return l.agent("spec.nodeName=" + node) }

func (l *Lab) agent(fields string) (youngest *core.Pod) {
	l.Helper()
	pods, err := l.client.CoreV1().Pods(Mesh).List(l.Context(), meta.ListOptions{LabelSelector: "k8s-app=istio-cni-node", FieldSelector: fields})
	l.Must(err)
	for i, pod := range pods.Items {
		if youngest == nil || youngest.CreationTimestamp.Before(&pod.CreationTimestamp) {
			youngest = &pods.Items[i]
		}
	}
	return youngest
}

// UntilAgentReady waits until the agent's pod is ready.
func (l *Lab) UntilAgentReady() {
	l.Helper()
	l.Until("the agent", func() bool { return Ready(l.Agent()) })
}

// DaemonSet returns the agent's DaemonSet.
func (l *Lab) DaemonSet(ctx context.Context) *apps.DaemonSet {
	l.Helper()
	set, err := l.client.AppsV1().DaemonSets(Mesh).Get(ctx, "istio-cni-node", meta.GetOptions{})
	l.Must(err)
	return set
}

// RolledOut reports whether all pods of the agent are ready and of the last generation.
func (l *Lab) RolledOut() bool {
	l.Helper()
	set := l.DaemonSet(l.Context())
	s := set.Status
	return s.ObservedGeneration == set.Generation && s.DesiredNumberScheduled > 0 &&
		s.UpdatedNumberScheduled == s.DesiredNumberScheduled && s.NumberAvailable == s.DesiredNumberScheduled && s.NumberUnavailable == 0
}

// NetworkFile returns the content of a file in the node's NetDir.
func (l *Lab) NetworkFile(name string) string {
	l.Helper()
	text, err := os.ReadFile(l.NodeFile(filepath.Join(l.NetDir(), filepath.Base(name))))
	l.Must(err)
	return string(text)
}

// NetworkFiles returns the file names in the node's NetDir.
func (l *Lab) NetworkFiles() (all []string) {
	l.Helper()
	entries, err := os.ReadDir(l.NodeFile(l.NetDir()))
	l.Must(err)
	for _, entry := range entries {
		all = append(all, entry.Name())
	}
	return all
}

// Networks returns the content of all files in the node's NetDir by name.
func (l *Lab) Networks() map[string]string {
	l.Helper()
	all := map[string]string{}
	for _, name := range l.NetworkFiles() {
		all[name] = l.NetworkFile(name)
	}
	return all
}

// Plugin installs a program as a CNI plugin of the node.
func (l *Lab) Plugin(name, from string) {
	l.Helper()
	text, err := os.ReadFile(from)
	l.Must(err)
	if err := os.WriteFile(l.NodeFile(filepath.Join(l.BinDir(), name)), text, 0o755); err != nil {
		l.Must(fmt.Errorf("installing plugin %q: %w", name, err))
	}
}
