package kubetest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"

	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// write handles a request that changes an object.
func (s *Server) write(w http.ResponseWriter, r *http.Request) {
	at := parsePath(r.URL.Path)
	body, _ := io.ReadAll(io.LimitReader(r.Body, 1<<20)) // half a body is no JSON
	content := r.Header.Get("Content-Type")
	s.mu.Lock()
	defer s.mu.Unlock()
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
		s.delete(w, at, body)
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

// create stores a new object. It needs the lock, as do all functions that follow.
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

// patch applies a patch. A patch without a change creates no new version.
func (s *Server) patch(at place, content string, body []byte) *apierrors.StatusError {
	before, whole := decode(s.objects[at.path()]), decode(s.objects[at.path()])
	var operations []operation
	var change object
	var err error
	switch into := map[bool]any{true: &operations, false: &change}[content == "application/json-patch+json"]; {
	case !strings.HasSuffix(content, "-patch+json") || json.Unmarshal(body, into) != nil:
		return unsupported()
	default:
		merge(whole.Object, change, content == "application/strategic-merge-patch+json")
	}
	for _, o := range operations {
		_, err = o.apply(whole.Object, strings.Split(o.Path, "/")[1:])
		if err != nil {
			break
		}
	}
	switch {
	case err != nil:
		return invalid("the server rejected our request due to an error in our request: " + err.Error())
	case whole.GetUID() != before.GetUID():
		return invalid("metadata.uid: Invalid value: field is immutable")
	case whole.GetResourceVersion() != before.GetResourceVersion():
		return apierrors.NewConflict(at.resource(), at.name, errors.New("the object has been modified"))
	}
	if taints, is, _ := unstructured.NestedSlice(whole.Object, "spec", "taints"); is && len(taints) == 0 {
		unstructured.RemoveNestedField(whole.Object, "spec", "taints") // the API server encodes no empty list
	}
	if !reflect.DeepEqual(decode(marshal(whole.Object)), before) {
		s.store(at, whole.Object)
	}
	return nil
}

func unsupported() *apierrors.StatusError {
	return failure(http.StatusUnsupportedMediaType, metav1.StatusReasonUnsupportedMediaType, "not a patch that is known here")
}

func invalid(why string) *apierrors.StatusError {
	return failure(http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, why)
}

// merge implements RFC 7396, and a strategic merge of lists of conditions.
func merge(into, patch object, strategic bool) {
	for key, value := range patch {
		change, deep := value.(object)
		list, isList := value.([]any)
		switch next, is := into[key].(object); {
		case value == nil:
			delete(into, key)
		case deep:
			if !is {
				next = object{}
				into[key] = next
			}
			merge(next, change, strategic)
		case isList && strategic:
			was, _ := into[key].([]any)
			into[key] = append(slices.DeleteFunc(was, func(one any) bool {
				return slices.ContainsFunc(list, func(other any) bool { return typeOf(one) == typeOf(other) })
			}), list...)
		default:
			into[key] = value
		}
	}
}

// typeOf returns the merge key of conditions.
func typeOf(condition any) any {
	whole, _ := condition.(object)
	return whole["type"]
}

// operation is one operation of a JSON patch, RFC 6902.
type operation struct {
	Op, Path string
	Value    any
}

// apply implements test, add of members and at the end of lists, and remove of elements. As in the API server's library, an
// absent member passes the test for null.
func (o operation) apply(in any, path []string) (any, error) {
	if len(path) == 0 {
		if o.Op == "test" && !reflect.DeepEqual(in, o.Value) {
			return nil, fmt.Errorf("testing value %s failed", o.Path)
		}
		return o.Value, nil
	}
	name, rest := path[0], path[1:]
	switch whole := in.(type) {
	case object:
		value, err := o.apply(whole[name], rest)
		if err == nil && o.Op != "test" {
			whole[name] = value
		}
		return whole, err
	case []any:
		index, err := strconv.Atoi(name)
		switch there := err == nil && index < len(whole); {
		case name == "-" && o.Op == "add":
			return append(whole, o.Value), nil
		case there && o.Op == "remove":
			return slices.Delete(whole, index, index+1), nil
		case there && o.Op == "test":
			_, err = o.apply(whole[index], rest)
			return whole, err
		}
	}
	return nil, fmt.Errorf("%s operation does not apply: %s", o.Op, o.Path)
}

// broken returns the error of a deletion whose precondition does not hold.
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

// delete respects preconditions. It only marks a scheduled pod as deleting, as the kubelet removes it; see [Server.Delete].
func (s *Server) delete(w http.ResponseWriter, at place, body []byte) {
	var options metav1.DeleteOptions
	if len(body) > 0 && json.Unmarshal(body, &options) != nil {
		refuse(w, apierrors.NewBadRequest("not options in JSON"))
		return
	}
	if refused := broken(&options, at, decode(s.objects[at.path()])); refused != nil {
		refuse(w, refused)
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
	if protected, is := s.budgets[at.path()]; is {
		return protected.refuses()
	}
	if refused := broken(eviction.DeleteOptions, at, decode(s.objects[at.path()])); refused != nil {
		return refused
	}
	s.end(at)
	return nil
}

// budget is a PodDisruptionBudget that allows no eviction.
type budget struct {
	name       string
	retryAfter int
}

// Protect makes evictions of a pod, given by its path, fail because of a PodDisruptionBudget; an empty name removes the budget.
// Zero seconds mean no Retry-After, as the API server sends it only if the budget's status is about to be recomputed.
func (s *Server) Protect(path, name string, retryAfter int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if name == "" {
		delete(s.budgets, path)
		return
	}
	s.budgets[path] = budget{name, retryAfter}
}

func (b budget) refuses() *apierrors.StatusError {
	refused := apierrors.NewTooManyRequests("Cannot evict pod as it would violate the pod's disruption budget.", b.retryAfter)
	why := fmt.Sprintf("The disruption budget %s needs 2 healthy pods and has 2 currently", b.name)
	if b.retryAfter > 0 {
		why = fmt.Sprintf("The disruption budget %s is still being processed by the server.", b.name)
	}
	refused.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: "DisruptionBudget", Message: why}}
	return refused
}

// Edit changes the current version of an object, as another writer would.
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
