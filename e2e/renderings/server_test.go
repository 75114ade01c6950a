package renderings

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// server is an administrator's client of the API server.
type server struct {
	client   dynamic.Interface
	kinds    *restmapper.DeferredDiscoveryRESTMapper
	warnings *warnings
}

// warnings collects the Warning headers of responses.
type warnings struct {
	mu    sync.Mutex
	texts []string
}

// HandleWarningHeader implements rest.WarningHandler.
func (w *warnings) HandleWarningHeader(_ int, _, text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.texts = append(w.texts, text)
}

func (w *warnings) drain() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	texts := w.texts
	w.texts = nil
	return texts
}

func newServer(config *rest.Config) (*server, error) {
	warnings := &warnings{}
	config.WarningHandler = warnings
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("making a client: %w", err)
	}
	kinds, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("making a client: %w", err)
	}
	return &server{client, restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(kinds)), warnings}, nil
}

// of returns the client of an object's resource and namespace.
func (s *server) of(o *object) (dynamic.ResourceInterface, error) {
	kind := o.GroupVersionKind()
	mapping, err := s.kinds.RESTMapping(kind.GroupKind(), kind.Version)
	if err != nil {
		return nil, fmt.Errorf("looking for %s: %w", kind, err)
	}
	if (mapping.Scope.Name() == meta.RESTScopeNameNamespace) != (o.GetNamespace() != "") {
		return nil, fmt.Errorf("%s: scope is %s", id(o), mapping.Scope.Name())
	}
	return s.client.Resource(mapping.Resource).Namespace(o.GetNamespace()), nil
}

// create creates an object. Unknown and duplicate fields are errors.
func (s *server) create(ctx context.Context, o *object, dryRun ...string) (*object, error) {
	place, err := s.of(o)
	if err != nil {
		return nil, err
	}
	return place.Create(ctx, o, metav1.CreateOptions{FieldValidation: metav1.FieldValidationStrict, DryRun: dryRun})
}

// get reads a stored object.
func (s *server) get(ctx context.Context, o *object) (*object, error) {
	place, err := s.of(o)
	if err != nil {
		return nil, err
	}
	return place.Get(ctx, o.GetName(), metav1.GetOptions{})
}

// watch sends the events of an object from now on.
func (s *server) watch(ctx context.Context, o *object) (watch.Interface, error) {
	place, err := s.of(o)
	if err != nil {
		return nil, err
	}
	return place.Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + o.GetName()})
}

// patch patches an object, with the same field validation as create.
func (s *server) patch(ctx context.Context, o *object, kind types.PatchType, text []byte) (*object, error) {
	place, err := s.of(o)
	if err != nil {
		return nil, err
	}
	return place.Patch(ctx, o.GetName(), kind, text, metav1.PatchOptions{FieldValidation: metav1.FieldValidationStrict})
}

// apply creates or updates an object by server-side apply.
func (s *server) apply(ctx context.Context, o *object) (*object, error) {
	place, err := s.of(o)
	if err != nil {
		return nil, err
	}
	force := true
	return place.Patch(ctx, o.GetName(), types.ApplyPatchType, []byte(text(o)),
		metav1.PatchOptions{FieldManager: "helm", Force: &force, FieldValidation: metav1.FieldValidationStrict})
}

// remove deletes an object and checks that it is gone.
func (s *server) remove(ctx context.Context, o *object) error {
	place, err := s.of(o)
	if err != nil {
		return err
	}
	// Without a policy a Job keeps its pods, and waits for the garbage collector, which is not there.
	policy := metav1.DeletePropagationBackground
	if err := place.Delete(ctx, o.GetName(), metav1.DeleteOptions{PropagationPolicy: &policy}); err != nil {
		return err
	}
	switch left, err := s.get(ctx, o); {
	case err == nil:
		return fmt.Errorf("%s is still there: finalizers %q", id(o), left.GetFinalizers())
	case !apierrors.IsNotFound(err):
		return err
	}
	return nil
}

// define creates CustomResourceDefinitions as published by their projects, and waits until they are Established.
func (s *server) define(ctx context.Context, dir string) error {
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return fmt.Errorf("looking for custom resources: %w", err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return fmt.Errorf("reading a custom resource: %w", err)
		}
		objects, err := lab.Decode(text)
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		for _, o := range objects {
			if _, err := s.create(ctx, o); err != nil {
				return fmt.Errorf("defining %s: %w", o.GetName(), err)
			}
			if err := s.established(ctx, o); err != nil {
				return err
			}
		}
	}
	s.kinds.Reset()
	s.warnings.drain()
	return nil
}

func (s *server) established(ctx context.Context, o *object) error {
	return cluster.Until(ctx, "the custom resource "+o.GetName(), func() (bool, error) {
		now, err := s.get(ctx, o)
		if err != nil {
			return false, err
		}
		conditions, _, _ := unstructured.NestedSlice(now.Object, "status", "conditions") // null at first
		for _, c := range conditions {
			if c, is := c.(map[string]any); is && c["type"] == "Established" && c["status"] == "True" {
				return true, nil
			}
		}
		return false, nil
	})
}

// namespace creates a namespace with a Pod Security level.
func (s *server) namespace(ctx context.Context, name, level string) error {
	o := &object{}
	o.SetAPIVersion("v1")
	o.SetKind("Namespace")
	o.SetName(name)
	o.SetLabels(map[string]string{"pod-security.kubernetes.io/enforce": level})
	if _, err := s.create(ctx, o); err != nil {
		return fmt.Errorf("making namespace %q: %w", name, err)
	}
	return nil
}

func (s *server) priorityClass(ctx context.Context, name string) error {
	o := &object{Object: map[string]any{"value": int64(1)}}
	o.SetAPIVersion("scheduling.k8s.io/v1")
	o.SetKind("PriorityClass")
	o.SetName(name)
	if _, err := s.create(ctx, o); err != nil {
		return fmt.Errorf("making priority class %q: %w", name, err)
	}
	return nil
}

// setQuotaStatus writes the status of a ResourceQuota in place of its controller, which does not run: without a
// status the quota admits no pod.
func (s *server) setQuotaStatus(ctx context.Context, quota *object) error {
	hard, _, err := unstructured.NestedMap(quota.Object, "spec", "hard")
	if err != nil {
		return err
	}
	used := map[string]any{}
	for name := range hard {
		used[name] = "0"
	}
	now := quota.DeepCopy()
	now.Object["status"] = map[string]any{"hard": hard, "used": used}
	place, err := s.of(quota)
	if err != nil {
		return err
	}
	_, err = place.UpdateStatus(ctx, now, metav1.UpdateOptions{})
	return err
}

// tryPod creates a pod by dry run.
func (s *server) tryPod(ctx context.Context, pod *object) (made *object, err error) {
	waiting := cluster.Until(ctx, "the quota's status", func() (bool, error) {
		made, err = s.create(ctx, pod, metav1.DryRunAll)
		return err == nil || !strings.Contains(err.Error(), "status unknown for quota"), nil
	})
	if waiting != nil {
		return nil, waiting
	}
	return made, err
}
