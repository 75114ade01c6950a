package kubetest_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// contractKubeconfig is the variable with an administrator's kubeconfig. TestContract then runs against that API server instead of
// the fake one. e2e/contract sets it.
const contractKubeconfig = "KUBETEST_CONTRACT_KUBECONFIG"

type object = map[string]any

// contract is one API server in one test.
type contract struct {
	*testing.T
	url  string
	http *http.Client
	fake *kubetest.Server // nil for a real one
	ns   string
}

// TestContract: the fake API server and a real one send the same responses to the same requests.
func TestContract(t *testing.T) {
	c := &contract{T: t}
	path := os.Getenv(contractKubeconfig)
	if path == "" {
		c.fake = kubetest.NewServer(t)
		path = c.fake.Kubeconfig(t)
	}
	config, err := clientcmd.BuildConfigFromFlags("", path)
	check.OK(c, err)
	c.http, err = rest.HTTPClientFor(config)
	check.OK(c, err)
	c.url = strings.TrimRight(config.Host, "/")
	for name, test := range map[string]func(*contract){
		"Get": testGet, "NotFound": testNotFound, "Unauthorized": testUnauthorized, "List": testList, "Pages": testPages,
		"Selectors": testSelectors, "BadSelectors": testBadSelectors, "Watch": testWatch, "WatchSelects": testWatchSelects,
		"WatchEnds": testWatchEnds, "WatchList": testWatchList, "WatchExpired": testWatchExpired, "Bookmarks": testBookmarks, "NodePatch": testNodePatch,
		"NodeStatus": testNodeStatus, "PodLabels": testPodLabels, "PodStatus": testPodStatus, "Delete": testDelete, "Evict": testEvict, "Lease": testLease,
		"Events": testEvents, "Access": testAccess, "Namespaces": testNamespaces,
	} {
		t.Run(name, func(t *testing.T) {
			one := *c
			one.T, one.ns = t, "contract-"+strings.ToLower(name)
			one.begin()
			test(&one)
		})
	}
}

// begin creates the namespace of the test, with the service account that each pod needs.
func (c *contract) begin() {
	c.Helper()
	if c.fake != nil {
		return
	}
	c.addNamespace(c.ns)
	c.create("/api/v1/namespaces/"+c.ns+"/serviceaccounts", object{
		"kind": "ServiceAccount", "apiVersion": "v1", "metadata": object{"name": "default"},
	})
}

// addNamespace creates a namespace with a label.
func (c *contract) addNamespace(name string) object {
	c.Helper()
	return c.create("/api/v1/namespaces", object{
		"kind": "Namespace", "apiVersion": "v1", "metadata": object{"name": name, "labels": object{"contract": name}},
	})
}

// answer is a response.
type answer struct {
	code   int
	header http.Header
	text   []byte
	body   object // nil unless the text is JSON
}

func (a answer) String() string { return fmt.Sprintf("%d %.300s", a.code, a.text) }

// at returns a part of the body, or nil.
func (a answer) at(path ...string) any { return at(a.body, path...) }

func at(in any, path ...string) any {
	for _, part := range path {
		whole, _ := in.(object)
		in = whole[part]
	}
	return in
}

func (c *contract) request(ctx context.Context, method, path, content string, body any) *http.Response {
	c.Helper()
	var text []byte
	if body != nil {
		var err error
		text, err = json.Marshal(body)
		check.OK(c, err)
	}
	request, err := http.NewRequestWithContext(ctx, method, c.url+path, bytes.NewReader(text))
	check.OK(c, err)
	request.Header.Set("Accept", "application/json")
	if content != "" {
		request.Header.Set("Content-Type", content)
	}
	response, err := c.http.Do(request)
	check.OK(c, err)
	return response
}

// do sends a request. content is the type of the body: "merge" and "json" stand for the types of these patches.
func (c *contract) do(method, path, content string, body any) answer {
	c.Helper()
	switch content {
	case "":
		if body != nil {
			content = "application/json"
		}
	case "json", "merge", "strategic-merge":
		content = "application/" + content + "-patch+json"
	}
	response := c.request(c.Context(), method, path, content, body)
	defer response.Body.Close() //nolint:errcheck // it is read
	text, err := io.ReadAll(response.Body)
	check.OK(c, err)
	a := answer{code: response.StatusCode, header: response.Header, text: text}
	_ = json.Unmarshal(text, &a.body) // the body stays nil then
	return a
}

// want sends a request and checks the code of the response.
func (c *contract) want(code int, method, path, content string, body any) answer {
	c.Helper()
	a := c.do(method, path, content, body)
	if a.code != code {
		c.Fatalf("%s %s: %s, want %d", method, path, a, code)
	}
	return a
}

// fails sends a request and checks that the response is a Status with the reason.
func (c *contract) fails(code int, reason, method, path, content string, body any) answer {
	c.Helper()
	a := c.want(code, method, path, content, body)
	if a.at("kind") != "Status" || a.at("status") != "Failure" || a.at("reason") != reason || a.at("code") != float64(code) {
		c.Errorf("%s %s: %s, want a Status with reason %s", method, path, a, reason)
	}
	return a
}

func (c *contract) create(collection string, whole object) object {
	c.Helper()
	return c.want(http.StatusCreated, http.MethodPost, collection, "", whole).body
}

func (c *contract) pods() string           { return "/api/v1/namespaces/" + c.ns + "/pods" }
func (c *contract) pod(name string) string { return c.pods() + "/" + name }

// addPod creates a pod with labels such as "app=web" on a node, which need not exist.
func (c *contract) addPod(name, node string, labels ...string) object {
	c.Helper()
	set := object{}
	for _, label := range labels {
		key, value, _ := strings.Cut(label, "=")
		set[key] = value
	}
	return c.create(c.pods(), object{
		"kind": "Pod", "apiVersion": "v1", "metadata": object{"namespace": c.ns, "name": name, "labels": set},
		"spec":   object{"nodeName": node, "containers": []object{{"name": "app", "image": "none"}}},
		"status": object{"phase": "Pending"},
	})
}

// label changes a label of an object.
func (c *contract) label(path, key string, value any) {
	c.Helper()
	c.want(http.StatusOK, http.MethodPatch, path, "merge", object{"metadata": object{"labels": object{key: value}}})
}

// remove deletes an object at once.
func (c *contract) remove(path string) {
	c.Helper()
	c.want(http.StatusOK, http.MethodDelete, path+"?gracePeriodSeconds=0", "", nil)
}

func (c *contract) addNode(name string) {
	c.Helper()
	c.create("/api/v1/nodes", object{"kind": "Node", "apiVersion": "v1", "metadata": object{"name": name}, "spec": object{}})
}

func version(whole any) string {
	text, _ := at(whole, "metadata", "resourceVersion").(string)
	return text
}

func uid(whole any) string {
	text, _ := at(whole, "metadata", "uid").(string)
	return text
}

func testGet(c *contract) {
	made := c.addPod("web", "node-1", "app=web")
	a := c.want(http.StatusOK, http.MethodGet, c.pod("web"), "", nil)
	if a.header.Get("Content-Type") != "application/json" || a.at("kind") != "Pod" || a.at("apiVersion") != "v1" ||
		a.at("metadata", "name") != "web" || a.at("metadata", "namespace") != c.ns || a.at("spec", "nodeName") != "node-1" ||
		a.at("metadata", "labels", "app") != "web" {
		c.Errorf("%s", a)
	}
	if uid(a.body) == "" || version(a.body) == "" || version(a.body) != version(made) {
		c.Errorf("uid %q, resourceVersion %q, made as %q", uid(a.body), version(a.body), version(made))
	}
	c.label(c.pod("web"), "app", "other")
	if b := c.want(http.StatusOK, http.MethodGet, c.pod("web"), "", nil); uid(b.body) != uid(a.body) || version(b.body) == version(a.body) {
		c.Errorf("uid %q after %q, resourceVersion %q after %q", uid(b.body), uid(a.body), version(b.body), version(a.body))
	}
}

func testNotFound(c *contract) {
	for path, about := range map[string][3]string{
		c.pod("none"):        {"none", "pods", ""},
		"/api/v1/nodes/none": {"none", "nodes", ""},
		"/apis/coordination.k8s.io/v1/namespaces/" + c.ns + "/leases/none": {"none", "leases", "coordination.k8s.io"},
		"/apis/apps/v1/namespaces/" + c.ns + "/daemonsets/none":            {"none", "daemonsets", "apps"},
	} {
		a := c.fails(http.StatusNotFound, "NotFound", http.MethodGet, path, "", nil)
		group, _ := a.at("details", "group").(string)
		if a.at("details", "name") != about[0] || a.at("details", "kind") != about[1] || group != about[2] {
			c.Errorf("%s: %s", path, a)
		}
		message, _ := a.at("message").(string)
		check.Contains(c, message, `"none" not found`)
	}
	// A deletion, an eviction and a patch of a missing pod.
	c.fails(http.StatusNotFound, "NotFound", http.MethodDelete, c.pod("none"), "", nil)
	c.fails(http.StatusNotFound, "NotFound", http.MethodPost, c.pod("none")+"/eviction", "", c.eviction("none", ""))
	c.fails(http.StatusNotFound, "NotFound", http.MethodPatch, c.pod("none")+"/status", "merge", object{})
}

func testUnauthorized(c *contract) {
	request, err := http.NewRequestWithContext(c.Context(), http.MethodGet, c.url+c.pod("none"), http.NoBody)
	check.OK(c, err)
	request.Header.Set("Authorization", "Bearer nonsense")
	config := &rest.Config{Host: c.url, TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
	client, err := rest.HTTPClientFor(config)
	check.OK(c, err)
	response, err := client.Do(request)
	check.OK(c, err)
	defer response.Body.Close() //nolint:errcheck // it is read
	var status object
	check.OK(c, json.NewDecoder(response.Body).Decode(&status))
	if response.StatusCode != http.StatusUnauthorized || status["kind"] != "Status" || status["reason"] != "Unauthorized" {
		c.Errorf("%d %v", response.StatusCode, status)
	}
}

// names returns the names of the objects of a list.
func (c *contract) names(query string) (all []string, list object) {
	c.Helper()
	a := c.want(http.StatusOK, http.MethodGet, c.pods()+query, "", nil)
	items, ok := a.at("items").([]any)
	if !ok || a.at("kind") != "PodList" || a.at("apiVersion") != "v1" || version(a.body) == "" {
		c.Fatalf("%s: not a list: %s", query, a)
	}
	for _, item := range items {
		name, _ := at(item, "metadata", "name").(string)
		all = append(all, name)
	}
	return all, a.body
}

func testList(c *contract) {
	if none, _ := c.names(""); len(none) != 0 {
		c.Errorf("%q in an empty namespace", none)
	}
	for _, name := range []string{"b", "a", "c"} {
		c.addPod(name, "node-1")
	}
	for _, query := range []string{"", "?resourceVersion=0"} {
		agenttest.Eventually(c.T, query, func() bool { names, _ := c.names(query); return slices.Equal(names, []string{"a", "b", "c"}) })
	}
	// A list of all namespaces includes this namespace's pods.
	a := c.want(http.StatusOK, http.MethodGet, "/api/v1/pods?fieldSelector=metadata.namespace%3D"+c.ns, "", nil)
	if items, _ := a.at("items").([]any); len(items) != 3 {
		c.Errorf("%d pods of the namespace in all namespaces", len(items))
	}
}

func testPages(c *contract) {
	for _, name := range []string{"a", "b", "c"} {
		c.addPod(name, "node-1")
	}
	var all []string
	query, first := "?limit=2", ""
	for range 2 {
		names, list := c.names(query)
		all = append(all, names...)
		if first == "" {
			first = version(list)
		}
		check.Equal(c, version(list), first, "another resourceVersion on another page")
		token, _ := at(list, "metadata", "continue").(string)
		if (token == "") != (len(all) == 3) {
			c.Fatalf("continue %q after %q", token, all)
		}
		query = "?limit=2&continue=" + url.QueryEscape(token)
	}
	if !slices.Equal(all, []string{"a", "b", "c"}) {
		c.Errorf("%q on two pages", all)
	}
}

func testSelectors(c *contract) {
	c.addPod("a", "node-1", "app=web", "tier=1")
	c.addPod("b", "node-2", "app=web")
	c.addPod("c", "node-1", "app=db", "tier=2")
	for query, want := range map[string]string{
		"labelSelector=app=web": "a b", "labelSelector=app==web,tier": "a", "labelSelector=app!=web": "c",
		"labelSelector=app in (web,db),!tier": "b", "labelSelector=app notin (web)": "c", "labelSelector=tier>1": "c",
		"labelSelector=tier<2": "a", "labelSelector=": "a b c", "labelSelector=app=none": "",
		"fieldSelector=spec.nodeName=node-1": "a c", "fieldSelector=spec.nodeName!=node-1": "b", "fieldSelector=metadata.name=b": "b",
		"fieldSelector=status.phase=Pending,spec.nodeName==node-2": "b", "fieldSelector=status.phase=Running": "",
		"fieldSelector=spec.nodeName=node-1&labelSelector=tier": "a c", "fieldSelector=metadata.namespace=" + c.ns: "a b c",
	} {
		values := url.Values{}
		for part := range strings.SplitSeq(query, "&") {
			key, value, _ := strings.Cut(part, "=")
			values.Set(key, value)
		}
		if names, _ := c.names("?" + values.Encode()); strings.Join(names, " ") != want {
			c.Errorf("%s picks %q, want %q", query, names, want)
		}
	}
}

func testBadSelectors(c *contract) {
	for _, query := range []string{
		"labelSelector=a+in", "labelSelector=%28", "labelSelector=a%3D-", "fieldSelector=spec.hostname%3Dx", "fieldSelector=nonsense",
	} {
		for _, watch := range []string{"", "&watch=true&resourceVersion=0&timeoutSeconds=1"} {
			c.fails(http.StatusBadRequest, "BadRequest", http.MethodGet, c.pods()+"?"+query+watch, "", nil)
		}
	}
}

// stream is a watch.
type stream struct {
	c    *contract
	body *bufio.Reader
}

// change is one line of a watch.
type change struct {
	Type   string
	Object object
}

func (c *contract) watch(path, query string) stream {
	c.Helper()
	ctx, cancel := context.WithTimeout(c.Context(), time.Minute)
	c.Cleanup(cancel)
	response := c.request(ctx, http.MethodGet, path+"?watch=true"+query, "", nil)
	c.Cleanup(func() { _ = response.Body.Close() })
	if response.StatusCode != http.StatusOK || response.Header.Get("Content-Type") != "application/json" {
		text, _ := io.ReadAll(io.LimitReader(response.Body, 1<<10))
		c.Fatalf("watch: %d %s %s", response.StatusCode, response.Header.Get("Content-Type"), text)
	}
	return stream{c, bufio.NewReader(response.Body)}
}

// next returns the next change, false at the proper end of the stream.
func (s stream) next() (change, bool) {
	s.c.Helper()
	line, err := s.body.ReadBytes('\n')
	if errors.Is(err, io.EOF) && len(line) == 0 {
		return change{}, false
	}
	check.OK(s.c, err)
	var one change
	check.OK(s.c, json.Unmarshal(line, &one))
	return one, true
}

// wants checks the type and the object of the next change.
func (s stream) wants(kind, name string) change {
	s.c.Helper()
	one, ok := s.next()
	if !ok || one.Type != kind || at(one.Object, "metadata", "name") != name || one.Object["kind"] != "Pod" {
		s.c.Fatalf("%v %s %v, want %s of %s", ok, one.Type, one.Object, kind, name)
	}
	return one
}

func testWatch(c *contract) {
	c.addPod("before", "node-1")
	_, list := c.names("")
	s := c.watch(c.pods(), "&resourceVersion="+version(list))
	made := c.addPod("web", "node-1")
	if one := s.wants("ADDED", "web"); version(one.Object) != version(made) || uid(one.Object) != uid(made) {
		c.Errorf("added as %v, made as %v", one.Object["metadata"], made["metadata"])
	}
	c.label(c.pod("web"), "app", "web")
	modified := s.wants("MODIFIED", "web")
	check.Equal(c, at(modified.Object, "metadata", "labels", "app"), "web", "modified to", modified.Object)
	c.remove(c.pod("web"))
	for {
		one, ok := s.next()
		if ok && one.Type == "MODIFIED" {
			continue // the deletion has begun
		}
		if !ok || one.Type != "DELETED" || version(one.Object) == version(modified.Object) || uid(one.Object) != uid(made) {
			c.Errorf("%v %s %v after %v", ok, one.Type, one.Object["metadata"], modified.Object["metadata"])
		}
		break
	}
	// A second watch from the same version gets the same events.
	c.watch(c.pods(), "&resourceVersion="+version(list)).wants("ADDED", "web")
}

// testWatchSelects: pods enter and leave a selection.
func testWatchSelects(c *contract) {
	_, list := c.names("")
	s := c.watch(c.pods(), "&labelSelector=app%3Dweb&fieldSelector=spec.nodeName%3Dnode-1&resourceVersion="+version(list))
	c.addPod("far", "node-2", "app=web")
	c.addPod("web", "node-1", "app=db")
	c.label(c.pod("web"), "app", "web")
	s.wants("ADDED", "web")
	c.label(c.pod("web"), "tier", "1")
	s.wants("MODIFIED", "web")
	c.label(c.pod("web"), "app", "db")
	s.wants("DELETED", "web")
	c.label(c.pod("web"), "app", "web")
	s.wants("ADDED", "web")
}

func testWatchEnds(c *contract) {
	_, list := c.names("")
	s := c.watch(c.pods(), "&timeoutSeconds=1&resourceVersion="+version(list))
	if one, ok := s.next(); ok {
		c.Errorf("%v in a namespace without changes", one)
	}
}

// testWatchList requests the list as a stream, with a bookmark at its end.
func testWatchList(c *contract) {
	c.addPod("a", "node-1")
	c.addPod("b", "node-1")
	const streamed = "&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&timeoutSeconds=30"
	s := c.watch(c.pods(), streamed)
	found := map[any]bool{}
	for {
		one, ok := s.next()
		if !ok || one.Type == "BOOKMARK" {
			if !ok || at(one.Object, "metadata", "annotations", "k8s.io/initial-events-end") != "true" || version(one.Object) == "" {
				c.Errorf("%v %v, want the bookmark at the end of the list", ok, one)
			}
			break
		}
		check.Equal(c, one.Type, "ADDED", one, "in a list")
		found[at(one.Object, "metadata", "name")] = true
	}
	if !maps.Equal(found, map[any]bool{"a": true, "b": true}) {
		c.Errorf("listed %v", found)
	}
	c.addPod("c", "node-1")
	s.wants("ADDED", "c")
	end, ok := c.watch("/apis/coordination.k8s.io/v1/namespaces/"+c.ns+"/leases", streamed).next() // of an empty list
	if !ok || end.Type != "BOOKMARK" || end.Object["kind"] != "Lease" || end.Object["apiVersion"] != "coordination.k8s.io/v1" {
		c.Errorf("%v %v, want the bookmark of a kind with a group", ok, end)
	}
}

// testWatchExpired begins a watch before the oldest stored version. A real server stores the versions since its start.
func testWatchExpired(c *contract) {
	c.addPod("web", "node-1")
	if c.fake != nil {
		c.fake.Compact()
	}
	s := c.watch(c.pods(), "&resourceVersion=1&timeoutSeconds=30")
	one, ok := s.next()
	if !ok || one.Type != "ERROR" || one.Object["kind"] != "Status" || one.Object["code"] != float64(http.StatusGone) ||
		one.Object["reason"] != "Expired" {
		c.Fatalf("%v %v, want the Status 410 Expired", ok, one)
	}
	if one, ok := s.next(); ok {
		c.Errorf("%v after the error", one)
	}
}

func testBookmarks(c *contract) {
	_, list := c.names("")
	// The real server sends a bookmark shortly before the end if there was an event.
	s := c.watch(c.pods(), "&allowWatchBookmarks=true&timeoutSeconds=10&resourceVersion="+version(list))
	c.addPod("web", "node-1")
	s.wants("ADDED", "web")
	if c.fake != nil {
		c.fake.Bookmark()
	}
	one, ok := s.next()
	if !ok || one.Type != "BOOKMARK" || one.Object["kind"] != "Pod" || one.Object["apiVersion"] != "v1" || version(one.Object) == "" ||
		at(one.Object, "metadata", "name") != nil {
		c.Errorf("%v %v", ok, one)
	}
}

func testNodePatch(c *contract) {
	const path = "/api/v1/nodes/contract-patch"
	c.addNode("contract-patch")
	before := c.want(http.StatusOK, http.MethodGet, path, "", nil)
	taints := []object{{"key": "mesh", "value": "no", "effect": "NoSchedule"}}
	patch := func(test any, add any) []object {
		return []object{{"op": "test", "path": "/spec/taints", "value": test}, {"op": "add", "path": "/spec/taints", "value": add}}
	}
	identity := object{"op": "test", "path": "/metadata/uid", "value": uid(before.body)}
	// An absent member passes the test for null.
	initial, _ := before.at("spec", "taints").([]any)
	c.want(http.StatusOK, http.MethodPatch, path, "json", append(patch(initial, taints), identity))
	after := c.want(http.StatusOK, http.MethodGet, path, "", nil)
	if got, _ := after.at("spec", "taints").([]any); len(got) != 1 || at(got[0], "key") != "mesh" || version(after.body) == version(before.body) {
		c.Errorf("%s", after)
	}
	// Without a change, there is no new version.
	c.want(http.StatusOK, http.MethodPatch, path, "json", patch(taints, taints))
	if again := c.want(http.StatusOK, http.MethodGet, path, "", nil); version(again.body) != version(after.body) {
		c.Errorf("version %s after a patch that changes nothing, was %s", version(again.body), version(after.body))
	}
	// After a concurrent change, or for another node of the same name.
	c.fails(http.StatusUnprocessableEntity, "Invalid", http.MethodPatch, path, "json", patch([]object{}, taints))
	c.fails(http.StatusUnprocessableEntity, "Invalid", http.MethodPatch, path, "json",
		[]object{{"op": "test", "path": "/metadata/uid", "value": "another"}, {"op": "add", "path": "/spec/taints", "value": []object{}}})
	c.fails(http.StatusUnsupportedMediaType, "UnsupportedMediaType", http.MethodPatch, path, "text/plain", object{})
}

func testNodeStatus(c *contract) {
	c.addNode("contract-status")
	testStatus(c, "/api/v1/nodes/contract-status")
}

func testPodLabels(c *contract) {
	made := c.addPod("web", "node-1", "app=web")
	patch := func(uid, version string, labels object) object {
		return object{"metadata": object{"uid": uid, "resourceVersion": version, "labels": labels}}
	}
	a := c.want(http.StatusOK, http.MethodPatch, c.pod("web")+"/status", "merge", patch(uid(made), version(made), object{"broken": "true"}))
	if a.at("metadata", "labels", "broken") != "true" || a.at("metadata", "labels", "app") != "web" || version(a.body) == version(made) {
		c.Errorf("%s", a)
	}
	c.fails(http.StatusConflict, "Conflict", http.MethodPatch, c.pod("web")+"/status", "merge", patch(uid(made), version(made), object{"x": "y"}))
	other := c.do(http.MethodPatch, c.pod("web")+"/status", "merge", patch("another", version(a.body), object{"x": "y"}))
	if other.code != http.StatusConflict && other.code != http.StatusUnprocessableEntity {
		c.Errorf("another pod of the same name: %s", other)
	}
	if b := c.want(http.StatusOK, http.MethodGet, c.pod("web"), "", nil); b.at("metadata", "labels", "x") != nil {
		c.Errorf("%s", b)
	}
	const key = "example.com/mode"
	for _, value := range []any{"on", nil, nil} { // to remove what is not there changes nothing
		annotate := object{"metadata": object{"uid": uid(made), "annotations": object{key: value}}}
		if a := c.want(http.StatusOK, http.MethodPatch, c.pod("web")+"/status", "merge", annotate); a.at("metadata", "annotations", key) != value {
			c.Errorf("annotation %v: %s", value, a)
		}
	}
}

// testNamespaces reads, lists and watches namespaces by a label.
func testNamespaces(c *contract) {
	const path, name = "/api/v1/namespaces", "contract-mode"
	made := c.addNamespace(name)
	if a := c.want(http.StatusOK, http.MethodGet, path+"/"+name, "", nil); a.at("kind") != "Namespace" || uid(a.body) != uid(made) || uid(made) == "" ||
		a.at("metadata", "namespace") != nil || a.at("metadata", "labels", "contract") != name {
		c.Errorf("%s", a)
	}
	c.fails(http.StatusNotFound, "NotFound", http.MethodGet, path+"/none", "", nil)
	const selected = "labelSelector=contract%3D" + name
	list := c.want(http.StatusOK, http.MethodGet, path+"?"+selected, "", nil)
	if items, _ := list.at("items").([]any); len(items) != 1 || list.at("kind") != "NamespaceList" {
		c.Errorf("%s", list)
	}
	s := c.watch(path, "&"+selected+"&resourceVersion="+version(list.body))
	c.label(path+"/"+name, "mode", "ambient")
	if one, ok := s.next(); !ok || one.Type != "MODIFIED" || one.Object["kind"] != "Namespace" || at(one.Object, "metadata", "labels", "mode") != "ambient" {
		c.Errorf("%v %v", ok, one)
	}
}

func testPodStatus(c *contract) {
	c.addPod("web", "node-1")
	testStatus(c, c.pod("web"))
}

func testStatus(c *contract, path string) {
	made := c.want(http.StatusOK, http.MethodGet, path, "", nil).body
	path += "/status"
	patch := func(uid string, conditions ...object) object {
		return object{"metadata": object{"uid": uid}, "status": object{"conditions": conditions}}
	}
	ready := object{"type": "Ready", "status": "False", "reason": "None", "message": "m", "lastTransitionTime": "2026-01-02T03:04:05Z"}
	mesh := object{"type": "example.com/Mesh", "status": "False", "reason": "Lost", "message": "a rule", "lastTransitionTime": "2026-01-02T03:04:05Z"}
	c.want(http.StatusOK, http.MethodPatch, path, "strategic-merge", patch(uid(made), ready))
	before := c.want(http.StatusOK, http.MethodPatch, path, "strategic-merge", patch(uid(made), mesh))
	// The API server merges conditions by type and field by field.
	after := c.want(http.StatusOK, http.MethodPatch, path, "strategic-merge",
		patch(uid(made), object{"type": "example.com/Mesh", "status": "True", "reason": "Found"}))
	mesh["status"], mesh["reason"] = "True", "Found"
	got := map[any]object{}
	list, _ := after.at("status", "conditions").([]any)
	for _, one := range list {
		condition, _ := one.(object)
		maps.DeleteFunc(condition, func(_ string, value any) bool { return value == nil }) // lastProbeTime, lastHeartbeatTime
		got[condition["type"]] = condition
	}
	if !reflect.DeepEqual(got["Ready"], ready) || !reflect.DeepEqual(got["example.com/Mesh"], mesh) || version(after.body) == version(before.body) {
		c.Errorf("%s", after)
	}
	// Without a change, there is no new version.
	again := c.want(http.StatusOK, http.MethodPatch, path, "strategic-merge", patch(uid(made), mesh))
	check.Equal(c, version(again.body), version(after.body), "version")
	other := c.do(http.MethodPatch, path, "strategic-merge", patch("another", ready))
	if other.code != http.StatusConflict && other.code != http.StatusUnprocessableEntity {
		c.Errorf("another object of the same name: %s", other)
	}
}

func options(uid, version string) object {
	preconditions := object{}
	if uid != "" {
		preconditions["uid"] = uid
	}
	if version != "" {
		preconditions["resourceVersion"] = version
	}
	return object{"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": preconditions}
}

func testDelete(c *contract) {
	made := c.addPod("web", "node-1")
	c.fails(http.StatusConflict, "Conflict", http.MethodDelete, c.pod("web"), "", options("another", ""))
	c.fails(http.StatusConflict, "Conflict", http.MethodDelete, c.pod("web"), "", options(uid(made), "1"))
	c.want(http.StatusOK, http.MethodDelete, c.pod("web"), "", options(uid(made), version(made)))
	// The kubelet completes the deletion.
	if a := c.want(http.StatusOK, http.MethodGet, c.pod("web"), "", nil); a.at("metadata", "deletionTimestamp") == nil {
		c.Errorf("%s", a)
	}
	c.remove(c.pod("web"))
	c.fails(http.StatusNotFound, "NotFound", http.MethodGet, c.pod("web"), "", nil)
	// A pod without a node needs no kubelet.
	c.addPod("pending", "")
	c.want(http.StatusOK, http.MethodDelete, c.pod("pending"), "", nil)
	c.fails(http.StatusNotFound, "NotFound", http.MethodGet, c.pod("pending"), "", nil)
}

func (c *contract) eviction(name, uid string) object {
	return object{
		"kind": "Eviction", "apiVersion": "policy/v1", "metadata": object{"namespace": c.ns, "name": name}, "deleteOptions": options(uid, ""),
	}
}

func testEvict(c *contract) {
	free := c.addPod("free", "node-1")
	path := c.pod("free") + "/eviction"
	c.fails(http.StatusConflict, "Conflict", http.MethodPost, path, "", c.eviction("free", "another"))
	if a := c.do(http.MethodPost, path, "", c.eviction("other", "")); a.code != http.StatusBadRequest {
		c.Errorf("an eviction of another pod: %s", a)
	}
	a := c.want(http.StatusCreated, http.MethodPost, path, "", c.eviction("free", uid(free)))
	if a.at("kind") != "Status" || a.at("status") != "Success" {
		c.Errorf("%s", a)
	}
	if a := c.want(http.StatusOK, http.MethodGet, c.pod("free"), "", nil); a.at("metadata", "deletionTimestamp") == nil {
		c.Errorf("%s", a)
	}
	// A budget whose status is not computed yet.
	c.addPod("protected", "node-1", "app=protected")
	c.protect("protected")
	refused := c.fails(http.StatusTooManyRequests, "TooManyRequests", http.MethodPost, c.pod("protected")+"/eviction", "", c.eviction("protected", ""))
	causes, _ := refused.at("details", "causes").([]any)
	if len(causes) != 1 || at(causes[0], "reason") != "DisruptionBudget" || refused.header.Get("Retry-After") == "" {
		c.Errorf("%s, Retry-After %q", refused, refused.header.Get("Retry-After"))
	}
}

func (c *contract) protect(name string) {
	c.Helper()
	if c.fake != nil {
		c.fake.FailOn(c.pod(name)+"/eviction", kubetest.Budget, 1)
		return
	}
	c.want(http.StatusOK, http.MethodPatch, c.pod(name)+"/status", "merge", object{"status": object{
		"phase": "Running", "conditions": []object{{"type": "Ready", "status": "True"}},
	}})
	c.create("/apis/policy/v1/namespaces/"+c.ns+"/poddisruptionbudgets", object{
		"kind": "PodDisruptionBudget", "apiVersion": "policy/v1", "metadata": object{"name": "budget"},
		"spec": object{"minAvailable": 1, "selector": object{"matchLabels": object{"app": name}}},
	})
}

func testLease(c *contract) {
	leases := "/apis/coordination.k8s.io/v1/namespaces/" + c.ns + "/leases"
	lease := func(version, holder string) object {
		metadata := object{"namespace": c.ns, "name": "lock"}
		if version != "" {
			metadata["resourceVersion"] = version
		}
		return object{
			"kind": "Lease", "apiVersion": "coordination.k8s.io/v1", "metadata": metadata,
			"spec": object{"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": "2026-01-01T12:00:00.000001Z"},
		}
	}
	first := c.create(leases, lease("", "a"))
	c.fails(http.StatusConflict, "AlreadyExists", http.MethodPost, leases, "", lease("", "b"))
	second := c.want(http.StatusOK, http.MethodPut, leases+"/lock", "", lease(version(first), "b"))
	if second.at("spec", "holderIdentity") != "b" || second.at("spec", "renewTime") != "2026-01-01T12:00:00.000001Z" ||
		version(second.body) == version(first) || uid(second.body) != uid(first) {
		c.Errorf("%s after %v", second, first)
	}
	// One of two writers of the same version wins.
	c.fails(http.StatusConflict, "Conflict", http.MethodPut, leases+"/lock", "", lease(version(first), "c"))
	if now := c.want(http.StatusOK, http.MethodGet, leases+"/lock", "", nil); now.at("spec", "holderIdentity") != "b" {
		c.Errorf("%s", now)
	}
}

func testEvents(c *contract) {
	events := "/api/v1/namespaces/" + c.ns + "/events"
	event := func(name, namespace string) object {
		return object{
			"kind": "Event", "apiVersion": "v1", "metadata": object{"namespace": c.ns, "name": name},
			"involvedObject": object{"kind": "Pod", "apiVersion": "v1", "namespace": namespace, "name": "web", "uid": "x"},
			"reason":         "BrokenPod", "message": "it is broken", "type": "Warning", "count": 1,
			"firstTimestamp": "2026-01-01T12:00:00Z", "lastTimestamp": "2026-01-01T12:00:00Z",
			"source": object{"component": "test", "host": "node-1"}, "reportingComponent": "test", "reportingInstance": "node-1",
		}
	}
	made := c.create(events, event("web.1", c.ns))
	c.fails(http.StatusConflict, "AlreadyExists", http.MethodPost, events, "", event("web.1", c.ns))
	c.fails(http.StatusUnprocessableEntity, "Invalid", http.MethodPost, events, "", event("web.2", "another"))
	patch := object{"count": 7, "lastTimestamp": "2026-01-01T12:05:00Z"}
	a := c.want(http.StatusOK, http.MethodPatch, events+"/web.1", "merge", patch)
	if a.at("count") != 7.0 || a.at("lastTimestamp") != "2026-01-01T12:05:00Z" || a.at("firstTimestamp") != "2026-01-01T12:00:00Z" ||
		a.at("message") != "it is broken" || uid(a.body) != uid(made) || version(a.body) == version(made) {
		c.Errorf("%s", a)
	}
	c.fails(http.StatusNotFound, "NotFound", http.MethodPatch, events+"/none", "merge", patch)
}

// testAccess asks whether the administrator may do something, which is a request that stores nothing.
func testAccess(c *contract) {
	const path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
	a := c.want(http.StatusCreated, http.MethodPost, path, "", object{
		"kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1",
		"spec": object{"resourceAttributes": object{"namespace": c.ns, "verb": "patch", "group": "", "resource": "pods", "subresource": "status"}},
	})
	if a.at("kind") != "SelfSubjectAccessReview" || a.at("status", "allowed") != true || a.header.Get("Date") == "" {
		c.Errorf("got %s, Date %q", a, a.header.Get("Date"))
	}
}
