package kubetest

import (
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// write handles a request that changes an object.
func (s *Server) write(w http.ResponseWriter, r *http.Request) {
	at := parsePath(r.URL.Path)
	body, _ := io.ReadAll(io.LimitReader(r.Body, 1<<20)) // a truncated body is invalid JSON
	content := r.Header.Get("Content-Type")
	s.mu.Lock()
	defer s.mu.Unlock()
	if at.plural == "selfsubjectaccessreviews" {
		s.review(w, r, body)
		return
	}
	created := at.name == "" || at.part == "eviction"
	if s.objects[at.path()] == nil && (at.name != "" || at.kind() == "") {
		refuse(w, at.notFound())
		return
	}
	var refused *apierrors.StatusError
	switch {
	case r.Method == http.MethodPatch:
		refused = s.patch(at, content, body)
	case len(body) > 0 && content != "application/json":
		refused = apierrors.NewBadRequest("not JSON")
	case at.part == "eviction":
		refused = s.evict(at, body)
	case r.Method == http.MethodPost:
		at, refused = s.create(at, body)
	case r.Method == http.MethodPut:
		refused = s.replace(at, body)
	default:
		s.delete(w, r, at, body)
		return
	}
	switch {
	case refused != nil:
		refuse(w, refused)
	case at.part == "eviction":
		send(w, http.StatusCreated, marshal(statusOf(metav1.Status{Status: metav1.StatusSuccess, Code: http.StatusCreated})))
	case created:
		send(w, http.StatusCreated, s.objects[at.path()])
	default:
		answer(w, s.objects[at.path()])
	}
}

// create stores a new object. It requires the lock, as do the functions below.
func (s *Server) create(at place, body []byte) (place, *apierrors.StatusError) {
	var whole unstructured.Unstructured
	if err := json.Unmarshal(body, &whole); err != nil || whole.GetKind() != at.kind() || whole.GetName() == "" ||
		whole.GetNamespace() != at.namespace {
		return at, apierrors.NewBadRequest("not an object of this kind and namespace")
	}
	at.name = whole.GetName()
	about, of, _ := unstructured.NestedString(whole.Object, "involvedObject", "namespace")
	switch {
	case of && about != at.namespace, at.kind() == "Event" && !of && at.namespace != "default":
		return at, invalid("involvedObject.namespace: does not match event.namespace")
	case s.objects[at.path()] != nil:
		return at, apierrors.NewAlreadyExists(at.resource(), at.name)
	}
	s.store(at, whole.Object)
	return at, nil
}

// replace stores an object if its resourceVersion is the current one.
func (s *Server) replace(at place, body []byte) *apierrors.StatusError {
	var whole unstructured.Unstructured
	if err := json.Unmarshal(body, &whole); err != nil || whole.GetKind() != at.kind() {
		return apierrors.NewBadRequest("not an object of this kind")
	}
	if whole.GetResourceVersion() != decode(s.objects[at.path()]).GetResourceVersion() {
		return apierrors.NewConflict(at.resource(), at.name, errors.New("the object has been modified"))
	}
	s.store(at, whole.Object)
	return nil
}

// patch applies a patch with the API server's libraries. A patch without a change creates no new version.
func (s *Server) patch(at place, content string, body []byte) *apierrors.StatusError {
	stored := s.objects[at.path()]
	var patched []byte
	var operations jsonpatch.Patch
	var err error
	switch content {
	case "application/json-patch+json":
		if operations, err = jsonpatch.DecodePatch(body); err == nil {
			patched, err = operations.Apply(stored)
		}
	case "application/merge-patch+json":
		patched, err = jsonpatch.MergePatch(stored, body)
	case "application/strategic-merge-patch+json":
		patched, err = jsonpatch.MergePatch(stored, withConditions(body, decode(stored)))
	default:
		return failure(http.StatusUnsupportedMediaType, metav1.StatusReasonUnsupportedMediaType, "unknown patch type")
	}
	if err != nil {
		return invalid("the server rejected our request due to an error in our request: " + err.Error())
	}
	before, whole := decode(stored), decode(patched)
	switch {
	case whole.GetUID() != before.GetUID():
		return invalid("metadata.uid: Invalid value: field is immutable")
	case whole.GetResourceVersion() != before.GetResourceVersion():
		return apierrors.NewConflict(at.resource(), at.name, errors.New("the object has been modified"))
	}
	if taints, is, _ := unstructured.NestedSlice(whole.Object, "spec", "taints"); is && len(taints) == 0 {
		unstructured.RemoveNestedField(whole.Object, "spec", "taints") // the API server encodes no empty list
	}
	if !reflect.DeepEqual(whole, before) {
		s.store(at, whole.Object)
	}
	return nil
}

// withConditions replaces the conditions in a strategic merge patch of an object's status with the merged conditions: the API
// server merges conditions by type.
func withConditions(body []byte, of *unstructured.Unstructured) []byte {
	patch := decode(body)
	changed, _, _ := unstructured.NestedSlice(patch.Object, "status", "conditions")
	all, _, _ := unstructured.NestedSlice(of.Object, "status", "conditions")
	fields := func(condition any) object { return condition.(object) } //nolint:forcetypeassert // the program sends objects
	for _, one := range changed {
		at := slices.IndexFunc(all, func(other any) bool { return fields(one)["type"] == fields(other)["type"] })
		if at < 0 {
			all = append(all, one)
			continue
		}
		maps.Copy(fields(all[at]), fields(one))
	}
	if err := unstructured.SetNestedSlice(patch.Object, all, "status", "conditions"); err != nil {
		return body
	}
	return marshal(patch.Object)
}

func invalid(why string) *apierrors.StatusError {
	return failure(http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, why)
}

// broken returns the error of a deletion if a precondition does not hold.
func broken(options *metav1.DeleteOptions, at place, is *unstructured.Unstructured) *apierrors.StatusError {
	if options == nil || options.Preconditions == nil {
		return nil
	}
	uid, version := options.Preconditions.UID, options.Preconditions.ResourceVersion
	if uid != nil && *uid != is.GetUID() || version != nil && *version != is.GetResourceVersion() {
		return apierrors.NewConflict(at.resource(), at.name, errors.New("Precondition failed")) //nolint:staticcheck // the API server's words
	}
	return nil
}

// delete respects preconditions. Without gracePeriodSeconds=0 it only marks a scheduled pod as deleting because the kubelet
// removes the pod; see [Server.Delete].
func (s *Server) delete(w http.ResponseWriter, r *http.Request, at place, body []byte) {
	var options metav1.DeleteOptions
	if len(body) > 0 && json.Unmarshal(body, &options) != nil {
		refuse(w, apierrors.NewBadRequest("not options in JSON"))
		return
	}
	if refused := broken(&options, at, decode(s.objects[at.path()])); refused != nil {
		refuse(w, refused)
		return
	}
	if r.URL.Query().Get("gracePeriodSeconds") == "0" {
		answer(w, s.remove(at))
		return
	}
	answer(w, s.end(at))
}

func (s *Server) end(at place) []byte {
	whole := decode(s.objects[at.path()])
	if node, _, _ := unstructured.NestedString(whole.Object, "spec", "nodeName"); node == "" {
		return s.remove(at)
	}
	if whole.GetDeletionTimestamp() == nil {
		metadata, _ := whole.Object["metadata"].(object)
		metadata["deletionTimestamp"], metadata["deletionGracePeriodSeconds"] = "2026-01-01T00:00:00Z", 30
	}
	s.store(at, whole.Object)
	return s.objects[at.path()]
}

func (s *Server) evict(at place, body []byte) *apierrors.StatusError {
	var eviction policyv1.Eviction
	err := json.Unmarshal(body, &eviction)
	if err != nil || eviction.APIVersion != "policy/v1" || eviction.Name != at.name || eviction.Namespace != at.namespace {
		return apierrors.NewBadRequest("name in URL does not match name in Eviction object")
	}
	if refused := broken(eviction.DeleteOptions, at, decode(s.objects[at.path()])); refused != nil {
		return refused
	}
	s.end(at)
	return nil
}

// Edit changes the current version of an object like another writer.
func (s *Server) Edit(path string, change func(map[string]any)) {
	s.tb.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	whole := decode(s.objects[path])
	if whole.Object == nil {
		s.tb.Fatalf("kubetest: nothing to edit at %s", path)
	}
	change(whole.Object)
	s.store(parsePath(path), whole.Object)
}

// review responds to a SelfSubjectAccessReview in JSON. The real server would prefer protobuf.
func (s *Server) review(w http.ResponseWriter, r *http.Request, body []byte) {
	if accepted := r.Header.Get("Accept"); accepted != "application/json" {
		refuse(w, failure(http.StatusNotAcceptable, metav1.StatusReasonNotAcceptable, "kubetest has no "+accepted))
		return
	}
	whole := decode(body)
	attributes, _, _ := unstructured.NestedStringMap(whole.Object, "spec", "resourceAttributes")
	right := attributes["verb"] + " " + strings.Trim(attributes["resource"]+"/"+attributes["subresource"], "/")
	whole.Object["status"] = object{"allowed": !slices.Contains(s.denied, right)}
	send(w, http.StatusCreated, marshal(whole.Object))
}

// Deny makes access reviews deny rights such as "delete pods" and "patch pods/status"; all others are allowed. Requests are not refused.
func (s *Server) Deny(rights ...string) { s.locked(func() { s.denied = append(s.denied, rights...) }) }
