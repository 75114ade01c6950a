package renderings

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/meshcni/istio-cni/e2e/lab"
)

// object is an object of any kind.
type object = unstructured.Unstructured

// rendering is one rendered text of the chart.
type rendering struct {
	// names are the names of all renderings with this text.
	names []string
	// objects are in installation order.
	objects []*object
}

// name returns a unique name.
func (r rendering) name() string {
	if len(r.names) == 1 {
		return r.names[0]
	}
	return fmt.Sprintf("%s and %d more", r.names[0], len(r.names)-1)
}

// id identifies an object in messages and as a map key.
func id(o *object) string { return o.GetKind() + "/" + o.GetNamespace() + "/" + o.GetName() }

// byID indexes objects by id.
func byID(objects []*object) map[string]*object {
	out := map[string]*object{}
	for _, o := range objects {
		out[id(o)] = o
	}
	return out
}

// byName returns the rendering of that name.
func byName(all []rendering, name string) (rendering, error) {
	at := slices.IndexFunc(all, func(r rendering) bool { return slices.Contains(r.names, name) })
	if at < 0 {
		return rendering{}, fmt.Errorf("no rendering named %q", name)
	}
	return all[at], nil
}

// renderAll runs the chart program and reads its output. Renderings with the same text are merged.
func renderAll(ctx context.Context, program, version, dir string) ([]rendering, error) {
	_, file, _, _ := runtime.Caller(0)
	command := exec.CommandContext(ctx, program, "--kube-version", version, "--all", dir)
	command.Dir = filepath.Join(filepath.Dir(file), "../..")
	if text, err := command.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("rendering: %w: %s", err, text)
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return nil, fmt.Errorf("looking for renderings: %w", err)
	}
	var out []rendering
	known := map[string]int{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("reading a rendering: %w", err)
		}
		head, body, _ := strings.Cut(string(text), "\n")
		name := strings.TrimPrefix(head, "# ")
		if at, is := known[body]; is {
			out[at].names = append(out[at].names, name)
			continue
		}
		objects, err := lab.Decode([]byte(body))
		if err != nil || len(objects) == 0 {
			return nil, fmt.Errorf("%s has %d objects: %w", name, len(objects), err)
		}
		known[body] = len(out)
		out = append(out, rendering{[]string{name}, objects})
	}
	return out, nil
}

// namespaces returns the namespaces of all objects.
func namespaces(all []rendering) []string {
	var out []string
	for _, r := range all {
		for _, o := range r.objects {
			if o.GetNamespace() != "" {
				out = append(out, o.GetNamespace())
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// pods returns the pods of the templates of workload objects.
func pods(objects []*object) ([]*object, error) {
	var out []*object
	for _, o := range objects {
		template, is, err := unstructured.NestedMap(o.Object, "spec", "template")
		if err != nil {
			return nil, fmt.Errorf("looking for a template in %s: %w", id(o), err)
		}
		if !is {
			continue
		}
		pod := &object{Object: template}
		pod.SetAPIVersion("v1")
		pod.SetKind("Pod")
		pod.SetNamespace(o.GetNamespace())
		pod.SetGenerateName(o.GetName() + "-")
		out = append(out, pod)
	}
	return out, nil
}

// text returns an object as JSON, to compare it as a whole.
func text(o *object) string {
	out, err := json.Marshal(o)
	if err != nil {
		panic(err) // it came from JSON
	}
	return string(out)
}
