package kube

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"reflect"
	"sync"
	"time"
)

// Access says how the node agent reaches the API server: with the service account of its own pod, or as a person does.
type Access struct {
	Server Address
	// Kubeconfig is a file that is used instead of the server, the token and the authority here, unless empty.
	Kubeconfig string
	// TokenFile and CAFile are those that the kubelet projects into the pod, and swaps when they change.
	TokenFile, CAFile string
	// SkipVerify accepts whoever answers; CAFile is not read then.
	SkipVerify bool
	// Now is the clock of event timestamps; it is required.
	Now func() time.Time
	// Attempt bounds each request but a watch, besides the caller's context; 10 s by default.
	Attempt time.Duration
	Pace    Pace
}

// API asks one API server on behalf of the node agent. Each method but the Follow ones sends one request and leaves it
// to the caller whether to try again; their errors are [CallError]. It may be used by several goroutines.
//
// Token and authority are read again for each request, so that the one after a rotation has the new ones. What was read
// last stays in use while a file is missing or damaged. So it is with a kubeconfig, whose server stays the first one.
type API struct {
	access Access
	server *url.URL

	mu      sync.Mutex
	current *endpoint
}

// NewAPI checks the address, [ErrNoHost] and [ErrNoPort] included. It reads no file and sends no request: the node may
// come up before either is there. A kubeconfig is read at once, and its error is a [ConfigError].
func NewAPI(access Access) (*API, error) {
	server, err := access.server()
	if err != nil {
		return nil, err
	}
	if access.Now == nil {
		return nil, errors.New("the API needs a clock")
	}
	if access.Attempt <= 0 {
		access.Attempt = 10 * time.Second
	}
	access.Pace = access.Pace.withDefaults()
	return &API{access: access, server: server}, nil
}

func (a Access) server() (*url.URL, error) {
	if a.Kubeconfig == "" {
		return a.Server.URL()
	}
	loaded, err := loadSettings(a.Kubeconfig)
	return loaded.server, err
}

// Server is the API server's URL, for messages.
func (a *API) Server() string { return a.server.String() }

// Close drops the connections that nothing uses just now.
func (a *API) Close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.current != nil {
		a.current.connections.CloseIdleConnections()
	}
}

func (a *API) settings() (settings, error) {
	if a.access.Kubeconfig != "" {
		return loadSettings(a.access.Kubeconfig)
	}
	at := cluster{Server: a.server.String(), CAFile: a.access.CAFile, Insecure: a.access.SkipVerify}
	if at.Insecure {
		at.CAFile = ""
	}
	return settle(at, user{TokenFile: a.access.TokenFile}, "")
}

// endpoint gives the connections for the credentials as they are now.
func (a *API) endpoint() (*endpoint, error) {
	loaded, err := a.settings()
	a.mu.Lock()
	defer a.mu.Unlock()
	if err == nil && a.current != nil && reflect.DeepEqual(loaded, a.current.settings) {
		return a.current, nil
	}
	var fresh *endpoint
	if err == nil {
		fresh, err = newEndpoint(loaded, longLived)
	}
	switch {
	case err == nil && a.current != nil:
		a.current.connections.CloseIdleConnections()
		a.current = fresh
	case err == nil:
		a.current = fresh
	case a.current == nil:
		return nil, err
	}
	return a.current, nil
}

// apiResource is one sort of object of the API.
type apiResource struct{ group, version, plural, kind string }

func pods() apiResource       { return apiResource{"", "v1", "pods", "Pod"} }
func nodes() apiResource      { return apiResource{"", "v1", "nodes", "Node"} }
func configMaps() apiResource { return apiResource{"", "v1", "configmaps", "ConfigMap"} }
func events() apiResource     { return apiResource{"", "v1", "events", "Event"} }
func daemonSets() apiResource { return apiResource{"apps", "v1", "daemonsets", "DaemonSet"} }
func leases() apiResource     { return apiResource{"coordination.k8s.io", "v1", "leases", "Lease"} }

func (r apiResource) apiVersion() string {
	if r.group == "" {
		return r.version
	}
	return r.group + "/" + r.version
}

// call is one request. An empty name means the collection, an empty namespace an object without or all of them.
type call struct {
	verb            string // as in RBAC
	resource        apiResource
	namespace, name string
	part            string // a part of the object that has a path of its own, such as status
	query           url.Values
	body            any // what is sent as JSON, nil for nothing
}

// String is what the call is about, for messages.
func (c *call) String() string {
	text := c.resource.plural
	if c.part != "" {
		text += "/" + c.part
	}
	if c.name != "" || c.namespace != "" {
		text += " "
	}
	if c.namespace != "" && c.name != "" {
		return clean(text + c.namespace + "/" + c.name)
	}
	return clean(text + c.namespace + c.name)
}

var errNoSegment = errors.New("namespace or name cannot stand in a request")

func (c *call) url(server *url.URL) (*url.URL, error) {
	path := []string{"api", c.resource.version}
	if c.resource.group != "" {
		path = []string{"apis", c.resource.group, c.resource.version}
	}
	if c.namespace != "" {
		path = append(path, "namespaces", c.namespace)
	}
	path = append(path, c.resource.plural)
	if c.name != "" {
		path = append(path, c.name)
	}
	if c.part != "" {
		path = append(path, c.part)
	}
	for _, segment := range path {
		if !validSegment(segment) {
			return nil, errNoSegment
		}
	}
	at := server.JoinPath(path...)
	at.RawQuery = c.query.Encode()
	return at, nil
}

func (c *call) request(ctx context.Context, to *endpoint) (*http.Request, error) {
	at, err := c.url(to.settings.server)
	if err != nil {
		return nil, err
	}
	method, content := c.method()
	var body io.Reader = http.NoBody
	if c.body != nil {
		data, encodeErr := json.Marshal(c.body)
		if encodeErr != nil {
			return nil, fmt.Errorf("encoding the request: %w", encodeErr)
		}
		body = bytes.NewReader(data)
	}
	request, err := http.NewRequestWithContext(ctx, method, at.String(), body)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Accept", "application/json")
	if content != "" {
		request.Header.Set("Content-Type", content)
	}
	return request, nil
}

// method is the HTTP method of the verb and the type of what is sent.
func (c *call) method() (method, content string) {
	switch c.verb {
	case "create":
		return http.MethodPost, "application/json"
	case "delete":
		return http.MethodDelete, "application/json"
	case "update":
		return http.MethodPut, "application/json"
	case "patch":
		switch c.body.(type) {
		case jsonPatch:
			return http.MethodPatch, "application/json-patch+json"
		case strategicPatch:
			return http.MethodPatch, "application/strategic-merge-patch+json"
		}
		return http.MethodPatch, "application/merge-patch+json"
	}
	return http.MethodGet, ""
}

// connect sends a call. It gives a good answer, whose body the caller closes, or a [CallError].
func (a *API) connect(ctx context.Context, c *call) (*http.Response, *progress, error) {
	to, err := a.endpoint()
	if err != nil {
		return nil, nil, a.failed(c, "", &failure{class: NoCredentials, err: err})
	}
	request, err := c.request(ctx, to)
	if err != nil {
		return nil, nil, a.failed(c, "", &failure{class: InvalidKey, err: err})
	}
	response, reached, failed := to.open(request)
	if failed != nil {
		c.doubt(failed)
		return nil, nil, a.failed(c, to.proxy(request), failed)
	}
	return response, reached, nil
}

// send sends a call and reads the whole answer.
func (a *API) send(ctx context.Context, c *call) ([]byte, error) {
	limited, cancel := context.WithTimeout(ctx, a.access.Attempt)
	defer cancel()
	response, reached, err := a.connect(limited, c)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close() //nolint:errcheck // only read from
	body, failed := readBody(response, reached, maxAnswer, "answer")
	if failed != nil {
		return nil, a.failed(c, "", failed)
	}
	return body, nil
}

// maxAnswer bounds an object and a page of a list. The API server's store takes objects of 1.5 MiB, most are far smaller,
// and pages are bounded by number.
const maxAnswer = 64 << 20

// doubt takes a class back that only the API server itself may decide. A load balancer, a proxy or another server at
// the address also says 401, 403 or 404, but not with a Status, and not about this object.
func (c *call) doubt(failed *failure) {
	verdict := &failed.verdict
	genuine := verdict.Kind == "Status"
	switch failed.class { //nolint:exhaustive // the others are no verdicts
	case Unauthorized, Forbidden:
		if !genuine {
			failed.class = Undecodable
		}
	case TooManyRequests:
		// An eviction that a PodDisruptionBudget stands against (k8s.io/api/policy/v1.DisruptionBudgetCause).
		if verdict.blames("DisruptionBudget") {
			failed.err = ErrDisruptionBudget
		}
	case NotFound:
		about := verdict.Details
		switch {
		case !genuine:
			failed.class = Undecodable
		case verdict.Reason != "NotFound" || about.Kind != c.resource.plural || about.Group != c.resource.group ||
			about.Name != c.name || c.name == "":
			failed.class = Rejected
		}
	}
}

// get fetches one object into a struct that has its fields. The answer must be that object.
func get[T any](ctx context.Context, a *API, of apiResource, namespace, name string) (T, error) {
	c := call{verb: "get", resource: of, namespace: namespace, name: name}
	var none, object T
	if name == "" || namespace == "" && of != nodes() {
		return none, a.failed(&c, "", &failure{class: InvalidKey, err: errNoSegment})
	}
	body, err := a.send(ctx, &c)
	if err != nil {
		return none, err
	}
	var head wireObject
	err = json.Unmarshal(body, &head)
	if err == nil {
		err = json.Unmarshal(body, &object)
	}
	if err == nil && !head.is(&c) {
		err = fmt.Errorf("asked for %s of %s, got kind %q, apiVersion %q, namespace %q, name %q", c.resource.kind,
			c.resource.apiVersion(), head.Kind, head.APIVersion, head.Metadata.Namespace, head.Metadata.Name)
	}
	if err != nil {
		return none, a.failed(&c, "", &failure{class: Undecodable, status: http.StatusOK, err: err})
	}
	return object, nil
}

// wireObject is what all objects have.
type wireObject struct {
	Kind       string         `json:"kind"`
	APIVersion string         `json:"apiVersion"`
	Metadata   wireObjectMeta `json:"metadata"`
}

type wireObjectMeta struct {
	Namespace         string `json:"namespace"`
	Name              string `json:"name"`
	UID               string `json:"uid"`
	ResourceVersion   string `json:"resourceVersion"`
	DeletionTimestamp string `json:"deletionTimestamp"`
}

func (o *wireObject) is(asked *call) bool {
	return o.Kind == asked.resource.kind && o.APIVersion == asked.resource.apiVersion() &&
		o.Metadata.Namespace == asked.namespace && o.Metadata.Name == asked.name
}
