package kubetest

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
)

// preconditions are those of a deletion (k8s.io/apimachinery/pkg/apis/meta/v1.Preconditions).
type preconditions struct {
	UID, ResourceVersion *string
}

// broken says, in the API server's words, which one does not hold.
func (p preconditions) broken(is meta) string {
	switch {
	case p.UID != nil && *p.UID != is.UID:
		return fmt.Sprintf("Precondition failed: UID in precondition: %s, UID in object meta: %s", *p.UID, is.UID)
	case p.ResourceVersion != nil && *p.ResourceVersion != is.ResourceVersion:
		return fmt.Sprintf("Precondition failed: ResourceVersion in precondition: %s, ResourceVersion in object meta: %s",
			*p.ResourceVersion, is.ResourceVersion)
	}
	return ""
}

type deleteOptions struct {
	Kind          string
	Preconditions preconditions
}

// budget is a PodDisruptionBudget that allows no eviction.
type budget struct {
	name       string
	retryAfter int
}

// Protect makes evictions of a pod, given by its path, fail because of a PodDisruptionBudget; an empty name lifts that.
// Zero seconds are no Retry-After, as the API server answers unless the budget is about to be reckoned anew.
func (s *Server) Protect(path, name string, retryAfter int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if name == "" {
		delete(s.budgets, path)
		return
	}
	if s.budgets == nil {
		s.budgets = map[string]budget{}
	}
	s.budgets[path] = budget{name, retryAfter}
}

// writePod answers a request that changes a pod, if it is one that is known here.
func (s *Server) writePod(w http.ResponseWriter, r *http.Request, at place) bool {
	if at.plural != "pods" || at.group != "" || at.name == "" {
		return false
	}
	var serve func(http.ResponseWriter, *http.Request, place)
	switch r.Method + " " + at.part {
	case "DELETE ":
		serve = s.deletePod
	case "POST eviction":
		serve = s.evictPod
	case "PATCH status":
		serve = s.patchPodLabels
	default:
		return false
	}
	at.part = ""
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.objects[at.path()] == nil {
		notFoundAt(w, at)
		return true
	}
	serve(w, r, at)
	return true
}

// deletePod heeds preconditions. A pod on a node is only told to end, as the kubelet has the last word; see [Server.Delete].
// It needs the lock.
func (s *Server) deletePod(w http.ResponseWriter, r *http.Request, at place) {
	var options deleteOptions
	body, _ := io.ReadAll(io.LimitReader(r.Body, 1<<20)) // half a body is no JSON
	if len(body) > 0 && (r.Header.Get("Content-Type") != "application/json" || json.Unmarshal(body, &options) != nil) {
		status(w, http.StatusBadRequest, "BadRequest", "not options in JSON")
		return
	}
	if why := options.Preconditions.broken(metaOf(s.objects[at.path()])); why != "" {
		conflict(w, at, why)
		return
	}
	answer(w, s.end(at))
}

// end needs the lock.
func (s *Server) end(at place) []byte {
	var whole object
	if err := json.Unmarshal(s.objects[at.path()], &whole); err != nil {
		s.tb.Errorf("kubetest: decoding a pod: %v", err)
		return nil
	}
	metadata, _ := whole["metadata"].(object)
	spec, _ := whole["spec"].(object)
	node, _ := spec["nodeName"].(string)
	if node == "" {
		return s.remove(at)
	}
	set(metadata, "deletionTimestamp", "2026-01-01T00:00:00Z", metadata["deletionTimestamp"] == nil)
	set(metadata, "deletionGracePeriodSeconds", 30, metadata["deletionGracePeriodSeconds"] == nil)
	s.store(at, whole)
	return s.objects[at.path()]
}

// evictPod needs the lock.
func (s *Server) evictPod(w http.ResponseWriter, r *http.Request, at place) {
	var eviction struct {
		Kind, APIVersion string
		Metadata         struct{ Namespace, Name string }
		DeleteOptions    deleteOptions
	}
	if !readBody(r, "application/json", &eviction) || eviction.Kind != "Eviction" || eviction.APIVersion != "policy/v1" ||
		eviction.Metadata.Name != at.name || eviction.Metadata.Namespace != at.namespace {
		status(w, http.StatusBadRequest, "BadRequest", "name in URL does not match name in Eviction object")
		return
	}
	if protected, is := s.budgets[at.path()]; is {
		refuseEviction(w, protected)
		return
	}
	if why := eviction.DeleteOptions.Preconditions.broken(metaOf(s.objects[at.path()])); why != "" {
		conflict(w, at, why)
		return
	}
	s.end(at)
	statusAbout(w, http.StatusCreated, "", "", object{})
}

func refuseEviction(w http.ResponseWriter, by budget) {
	cause := object{
		"reason":  "DisruptionBudget",
		"message": fmt.Sprintf("The disruption budget %s needs 2 healthy pods and has 2 currently", by.name),
	}
	if by.retryAfter > 0 {
		cause["message"] = fmt.Sprintf("The disruption budget %s is still being processed by the server.", by.name)
		w.Header().Set("Retry-After", strconv.Itoa(by.retryAfter))
	}
	statusAbout(w, http.StatusTooManyRequests, "TooManyRequests",
		"Cannot evict pod as it would violate the pod's disruption budget.", object{"causes": []object{cause}})
}

func conflict(w http.ResponseWriter, at place, why string) {
	statusAbout(w, http.StatusConflict, "Conflict",
		fmt.Sprintf("Operation cannot be fulfilled on %s %q: %s", at.plural, at.name, why), object{"name": at.name, "kind": at.plural})
}

// patchPodLabels merges labels by way of the status, which is all of a pod's metadata that goes that way here. It needs the
// lock.
func (s *Server) patchPodLabels(w http.ResponseWriter, r *http.Request, at place) {
	var patch struct {
		Metadata struct {
			UID             *string
			ResourceVersion *string
			Labels          map[string]any
		}
	}
	if !readBody(r, "application/merge-patch+json", &patch) {
		status(w, http.StatusUnsupportedMediaType, "UnsupportedMediaType", "not a merge patch")
		return
	}
	is := metaOf(s.objects[at.path()])
	if uid := patch.Metadata.UID; uid != nil && *uid != is.UID {
		status(w, http.StatusUnprocessableEntity, "Invalid",
			fmt.Sprintf("Pod %q is invalid: metadata.uid: Invalid value: %q: field is immutable", at.name, *uid))
		return
	}
	if why := (preconditions{ResourceVersion: patch.Metadata.ResourceVersion}).broken(is); why != "" {
		conflict(w, at, why)
		return
	}
	var whole object
	if err := json.Unmarshal(s.objects[at.path()], &whole); err != nil {
		s.tb.Errorf("kubetest: decoding a pod: %v", err)
	}
	metadata, _ := whole["metadata"].(object)
	labels, _ := metadata["labels"].(object)
	if labels == nil {
		labels = object{}
		metadata["labels"] = labels
	}
	for key, value := range patch.Metadata.Labels {
		set(labels, key, value, value != nil)
		if value == nil {
			delete(labels, key)
		}
	}
	s.store(at, whole)
	answer(w, s.objects[at.path()])
}
