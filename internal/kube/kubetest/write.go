package kubetest

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// readBody decodes what a request sends, if its type is the wanted one.
func readBody(r *http.Request, content string, into any) bool {
	body, _ := io.ReadAll(io.LimitReader(r.Body, 1<<20)) // half a body is no JSON
	return r.Header.Get("Content-Type") == content && json.Unmarshal(body, into) == nil
}

// createLease takes a lease that is not there yet.
func (s *Server) createLease(w http.ResponseWriter, r *http.Request) {
	var whole object
	if !readBody(r, "application/json", &whole) || whole["kind"] != "Lease" {
		status(w, http.StatusBadRequest, "BadRequest", "not a lease in JSON")
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	at := parsePath(r.URL.Path)
	metadata, _ := whole["metadata"].(object)
	at.name, _ = metadata["name"].(string)
	if _, exists := s.objects[at.path()]; exists {
		status(w, http.StatusConflict, "AlreadyExists", "it already exists")
		return
	}
	s.store(at, whole)
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusCreated)
	w.Write(s.objects[at.path()]) //nolint:errcheck,gosec // the client may be gone
}

// replaceLease takes a lease that was made from the one that is there, as its resourceVersion says.
func (s *Server) replaceLease(w http.ResponseWriter, r *http.Request) {
	var whole object
	if !readBody(r, "application/json", &whole) || whole["kind"] != "Lease" {
		status(w, http.StatusBadRequest, "BadRequest", "not a lease in JSON")
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	metadata, _ := whole["metadata"].(object)
	if metadata["resourceVersion"] != metaOf(s.objects[r.URL.Path]).ResourceVersion {
		status(w, http.StatusConflict, "Conflict", "the object has been modified; please apply your changes to the latest version")
		return
	}
	s.store(parsePath(r.URL.Path), whole)
	answer(w, s.objects[r.URL.Path])
}

// patchNode applies a JSON patch to a node, or merges conditions into its status. A patch that changes nothing makes no
// new version, as with the API server.
func (s *Server) patchNode(w http.ResponseWriter, r *http.Request) {
	at := parsePath(r.URL.Path)
	s.mu.Lock()
	defer s.mu.Unlock()
	var whole object
	if err := json.Unmarshal(s.objects[at.path()], &whole); err != nil {
		notFound(w, r)
		return
	}
	var operations []operation
	var merge object
	var err error
	switch ofStatus := strings.HasSuffix(r.URL.Path, "/status"); {
	case !ofStatus && readBody(r, "application/json-patch+json", &operations):
		err = apply(whole, operations)
	case ofStatus && readBody(r, "application/strategic-merge-patch+json", &merge):
		err = mergeConditions(whole, merge)
	default:
		status(w, http.StatusUnsupportedMediaType, "UnsupportedMediaType", "not a patch that is known here")
		return
	}
	if err != nil {
		status(w, http.StatusUnprocessableEntity, "Invalid", "the server rejected our request due to an error in our request: "+err.Error())
		return
	}
	// The API server encodes no empty list.
	if spec, ok := whole["spec"].(object); ok {
		if taints, is := spec["taints"].([]any); is && len(taints) == 0 {
			delete(spec, "taints")
		}
	}
	var before object
	if json.Unmarshal(s.objects[at.path()], &before) != nil || !reflect.DeepEqual(before, whole) {
		s.store(at, whole)
	}
	answer(w, s.objects[at.path()])
}

// operation is one of a JSON patch, RFC 6902.
type operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value"`
}

// apply knows the operations test, add, replace and remove on members of objects, and on elements of lists that are
// members. As in the API server's library, a member that is not there passes the test for null.
func apply(whole object, operations []operation) error {
	for _, o := range operations {
		parts := strings.Split(strings.TrimPrefix(o.Path, "/"), "/")
		in, list := whole, ""
		for _, part := range parts[:len(parts)-1] {
			switch next := in[part].(type) {
			case object:
				in, list = next, ""
			case []any:
				in, list = asObject(next), part
			default:
				return fmt.Errorf("%s operation does not apply: no %s", o.Op, o.Path)
			}
		}
		if err := o.on(whole, in, parts, list != ""); err != nil {
			return err
		}
	}
	return nil
}

// asObject is a list with its indexes as the names of members.
func asObject(list []any) object {
	all := object{}
	for i, one := range list {
		all[strconv.Itoa(i)] = one
	}
	return all
}

// on applies an operation to a member of an object, or to an element of a list, which is found again by its path.
func (o operation) on(whole, in object, parts []string, element bool) error {
	last := parts[len(parts)-1]
	_, there := in[last]
	switch {
	case o.Op == "test" && reflect.DeepEqual(in[last], o.Value):
	case o.Op == "test":
		return fmt.Errorf("testing value %s failed", o.Path)
	case element:
		owner := whole
		for _, part := range parts[:len(parts)-2] {
			owner, _ = owner[part].(object)
		}
		name := parts[len(parts)-2]
		list, _ := owner[name].([]any)
		index, err := strconv.Atoi(last)
		switch {
		case o.Op == "add" && last == "-":
			owner[name] = append(list, o.Value)
		case o.Op == "remove" && err == nil && there:
			owner[name] = slices.Delete(slices.Clone(list), index, index+1)
		default:
			return fmt.Errorf("%s operation does not apply: %s", o.Op, o.Path)
		}
	case o.Op == "add", o.Op == "replace" && there:
		in[last] = o.Value
	default:
		return fmt.Errorf("%s operation does not apply: %s", o.Op, o.Path)
	}
	return nil
}

// mergeConditions merges status.conditions by their type. A UID that is not the object's is a conflict.
func mergeConditions(whole, patch object) error {
	metadata, _ := whole["metadata"].(object)
	wanted, _ := patch["metadata"].(object)
	if uid, given := wanted["uid"]; given && uid != metadata["uid"] {
		return fmt.Errorf("metadata.uid: field is immutable")
	}
	from, _ := patch["status"].(object)
	to, ok := whole["status"].(object)
	if !ok {
		to = object{}
		whole["status"] = to
	}
	conditions, _ := to["conditions"].([]any)
	list, _ := from["conditions"].([]any)
	for _, one := range list {
		condition, _ := one.(object)
		at := slices.IndexFunc(conditions, func(c any) bool {
			has, _ := c.(object)
			return has["type"] == condition["type"]
		})
		if at < 0 {
			conditions = append(conditions, condition)
			continue
		}
		conditions[at] = condition
	}
	to["conditions"] = conditions
	return nil
}

// Edit changes an object as it is at this moment, as another writer would.
func (s *Server) Edit(path string, change func(map[string]any)) {
	s.tb.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	var whole object
	if err := json.Unmarshal(s.objects[path], &whole); err != nil {
		s.tb.Fatalf("kubetest: nothing to edit at %s: %v", path, err)
	}
	change(whole)
	s.store(parsePath(path), whole)
}
