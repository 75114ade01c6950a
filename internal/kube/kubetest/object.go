package kubetest

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

type object = map[string]any

// place is a parsed API path. name is empty for a collection, namespace for all namespaces or a cluster-scoped object, part for
// the whole object.
type place struct{ group, plural, namespace, name, part string }

func parsePath(path string) place {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	var at place
	switch {
	case len(parts) > 2 && parts[0] == "apis":
		at.group, parts = parts[1], parts[3:]
	case len(parts) > 1 && parts[0] == "api":
		parts = parts[2:]
	default:
		return place{}
	}
	if len(parts) > 2 && parts[0] == "namespaces" {
		at.namespace, parts = parts[1], parts[2:]
	}
	if len(parts) > 0 {
		at.plural, parts = parts[0], parts[1:]
	}
	if len(parts) > 0 {
		at.name, parts = parts[0], parts[1:]
	}
	at.part = strings.Join(parts, "/")
	return at
}

// kinds returns the kinds that kubetest serves, by resource.
func kinds() map[string]schema.GroupKind {
	return map[string]schema.GroupKind{
		"pods": {Kind: "Pod"}, "nodes": {Kind: "Node"}, "configmaps": {Kind: "ConfigMap"}, "events": {Kind: "Event"}, "namespaces": {Kind: "Namespace"},
		"daemonsets": {Group: "apps", Kind: "DaemonSet"}, "leases": {Group: "coordination.k8s.io", Kind: "Lease"},
	}
}

// kind returns the kind, or "" for a resource that kubetest does not serve.
func (p place) kind() string { return kinds()[p.plural].Kind }

func (p place) apiVersion() string {
	return schema.GroupVersion{Group: p.group, Version: "v1"}.String()
}

func (p place) path() string {
	path := "/api/v1/"
	if p.group != "" {
		path = "/apis/" + p.group + "/v1/"
	}
	if p.namespace != "" {
		path += "namespaces/" + p.namespace + "/"
	}
	path += p.plural
	if p.name != "" {
		path += "/" + p.name
	}
	return path
}

func (p place) resource() schema.GroupResource {
	return schema.GroupResource{Group: p.group, Resource: p.plural}
}

func (p place) notFound() *apierrors.StatusError { return apierrors.NewNotFound(p.resource(), p.name) }

// placeOf returns the place of an object, by its kind and metadata.
func placeOf(tb testing.TB, whole *unstructured.Unstructured) place {
	tb.Helper()
	kind := whole.GetKind()
	at := place{namespace: whole.GetNamespace(), name: whole.GetName()}
	for plural, known := range kinds() {
		if known.Kind == kind {
			at.plural, at.group = plural, known.Group
		}
	}
	if at.plural == "" || at.name == "" {
		tb.Fatalf("kubetest: not a named object of a served kind: kind %q, name %q", kind, at.name)
	}
	return at
}

// ConfigMap returns an object for [Server.Set].
func ConfigMap(namespace, name string, data map[string]string) []byte {
	return marshal(object{
		"kind": "ConfigMap", "apiVersion": "v1", "metadata": object{"namespace": namespace, "name": name}, "data": data,
	})
}

// Namespace returns an object for [Server.Set].
func Namespace(name string, labels map[string]string) []byte {
	return marshal(object{"kind": "Namespace", "apiVersion": "v1", "metadata": object{"name": name, "labels": labels}})
}

// DaemonSet returns an object for [Server.Set]; spec is the pod template's, in JSON, or empty.
func DaemonSet(namespace, name, spec string) []byte {
	if spec == "" {
		spec = "{}"
	}
	return marshal(object{
		"kind": "DaemonSet", "apiVersion": "apps/v1", "metadata": object{"namespace": namespace, "name": name},
		"spec": object{"template": object{"spec": json.RawMessage(spec)}},
	})
}

// Node returns an object for [Server.Set]; taints are a JSON list, or empty.
func Node(name string, labels map[string]string, taints string) []byte {
	spec := object{}
	if taints != "" {
		spec["taints"] = json.RawMessage(taints)
	}
	return marshal(object{
		"kind": "Node", "apiVersion": "v1", "metadata": object{"name": name, "labels": labels}, "spec": spec,
	})
}

func marshal(o any) []byte {
	data, err := json.Marshal(o)
	if err != nil {
		panic(err) // a bug in the test
	}
	return data
}

// decode decodes an object. It returns an empty object for malformed data.
func decode(data []byte) *unstructured.Unstructured {
	whole := &unstructured.Unstructured{}
	if json.Unmarshal(data, &whole.Object) != nil {
		whole.Object = nil
	}
	return whole
}

// Set creates or updates an object. It assigns a new resourceVersion and a missing UID, and notifies the watches.
func (s *Server) Set(data []byte) {
	s.tb.Helper()
	whole := decode(data)
	at := placeOf(s.tb, whole)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.store(at, whole.Object)
}

// store requires the lock.
func (s *Server) store(at place, content object) {
	whole := unstructured.Unstructured{Object: content}
	s.version++
	was := s.objects[at.path()]
	if whole.GetUID() == "" {
		whole.SetUID(types.UID("uid-" + strconv.Itoa(s.version)))
		if was != nil {
			whole.SetUID(decode(was).GetUID())
		}
	}
	whole.SetResourceVersion(strconv.Itoa(s.version))
	data := marshal(content)
	s.objects[at.path()] = data
	s.publish(change{s.version, at, data, was, false})
}

// Delete removes an object by its path, such as /api/v1/namespaces/shop/configmaps/prices, and notifies the watches.
func (s *Server) Delete(path string) {
	s.tb.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, found := s.objects[path]; !found {
		s.tb.Fatalf("kubetest: nothing to delete at %s", path)
	}
	s.remove(parsePath(path))
}

// remove removes an object and returns its last version. It requires the lock.
func (s *Server) remove(at place) []byte {
	data := s.objects[at.path()]
	delete(s.objects, at.path())
	s.version++
	whole := decode(data)
	whole.SetResourceVersion(strconv.Itoa(s.version))
	last := marshal(whole.Object)
	s.publish(change{s.version, at, last, data, true})
	return last
}

// selection is a collection with its selectors.
type selection struct {
	in     place
	fields fields.Selector
	labels labels.Selector
}

func selectionOf(r *http.Request) (selection, error) {
	query := r.URL.Query()
	s := selection{in: parsePath(r.URL.Path)}
	var labelErr, fieldErr error
	s.labels, labelErr = labels.Parse(query.Get("labelSelector"))
	s.fields, fieldErr = fields.ParseSelector(query.Get("fieldSelector"))
	err := errors.Join(labelErr, fieldErr)
	if err != nil {
		return s, err
	}
	for _, term := range s.fields.Requirements() {
		if _, known := fieldsOf(s.in, nil)[term.Field]; !known {
			err = errors.Join(err, fmt.Errorf("field label not supported: %s", term.Field))
		}
	}
	return s, err
}

// fieldsOf returns the selectable fields of an object's kind. Without data their values are empty.
func fieldsOf(at place, data []byte) fields.Set {
	all := fields.Set{"metadata.name": at.name, "metadata.namespace": at.namespace}
	if at.plural != "pods" {
		return all
	}
	var pod struct {
		Spec   struct{ NodeName, RestartPolicy string }
		Status struct{ Phase, PodIP string }
	}
	if data != nil && json.Unmarshal(data, &pod) != nil {
		return all
	}
	maps.Copy(all, fields.Set{
		"spec.nodeName": pod.Spec.NodeName, "spec.restartPolicy": pod.Spec.RestartPolicy, "status.phase": pod.Status.Phase,
		"status.podIP": pod.Status.PodIP,
	})
	return all
}

// picks reports whether an object is in the collection and matches the label selector and the field selector.
func (s selection) picks(at place, data []byte) bool {
	in := s.in
	if in.plural != at.plural || in.group != at.group || in.namespace != "" && in.namespace != at.namespace {
		return false
	}
	if !s.labels.Empty() && !s.labels.Matches(labels.Set(decode(data).GetLabels())) {
		return false
	}
	return s.fields.Matches(fieldsOf(at, data))
}

// picked returns the objects of a selection. It requires the lock.
func (s *Server) picked(within selection) []json.RawMessage {
	items := []json.RawMessage{}
	for _, path := range slices.Sorted(maps.Keys(s.objects)) {
		if data := s.objects[path]; within.picks(parsePath(path), data) {
			items = append(items, data)
		}
	}
	return items
}

// list returns the response to a request for a collection. It respects limit and continue.
func (s *Server) list(r *http.Request, within selection) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	query, in := r.URL.Query(), within.in
	items := s.picked(within)
	// The number after "from:" is the number of objects in earlier pages.
	skip, err := strconv.Atoi(strings.TrimPrefix(query.Get("continue"), "from:"))
	if err != nil {
		skip = 0
	}
	items = items[min(skip, len(items)):]
	metadata := object{"resourceVersion": strconv.Itoa(s.version)}
	limit, err := strconv.Atoi(query.Get("limit"))
	if err == nil && limit < len(items) {
		items = items[:limit]
		metadata["continue"] = "from:" + strconv.Itoa(skip+limit)
	}
	return marshal(object{"kind": in.kind() + "List", "apiVersion": in.apiVersion(), "metadata": metadata, "items": items})
}

// Events returns the server's events, as JSON and in no particular order.
func (s *Server) Events() [][]byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	var events [][]byte
	for path, data := range s.objects {
		if parsePath(path).plural == "events" {
			events = append(events, data)
		}
	}
	return events
}

// Object returns the server's object at a path, or nil.
func (s *Server) Object(path string) []byte {
	return valueOf(s, func() []byte { return s.objects[path] })
}
