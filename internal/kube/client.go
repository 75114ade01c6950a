package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
)

// Config says how to reach the API server: with the service account of the program's own pod, or by a kubeconfig.
type Config struct {
	Server Address
	// Kubeconfig is a file that is used instead of the server, the token and the authority here, unless empty.
	Kubeconfig string
	// TokenFile and CAFile are those that the kubelet projects into the pod, and swaps when they change.
	TokenFile, CAFile string
	// SkipVerify accepts any server's certificate; CAFile is not read then.
	SkipVerify bool
	// Timeout bounds each request but a watch, besides the caller's context; 10 s by default.
	Timeout time.Duration
	// IdleTimeout is for how long a watch may be silent before its server counts as hanging; 150 s by default. The API
	// server sends a bookmark each minute.
	IdleTimeout time.Duration
	// Backoff is between the attempts of a watch; nil means client-go's default.
	Backoff *wait.Backoff
	// Once is for a process that asks once: one HTTP/1.1 connection, kept for further attempts. HTTP/2 would cost its own
	// opening exchange for the sake of requests that are never sent.
	Once bool
}

// Client sends requests to one API server. Each method but the Follow ones and [Client.Lookup] sends one request and
// leaves it to the caller whether to try again; their errors are [Error]. It may be used by several goroutines.
//
// Token and authority are read again for each request but the first, so that the one after a rotation has the new ones.
// What was read last stays in use while a file is missing or damaged. So it is with a kubeconfig.
type Client struct {
	config Config
	server *url.URL

	requests atomic.Int64
	limit    int64 // of an answer, for tests
	longest  int   // of a list, in objects, for tests

	mu      sync.Mutex
	current *endpoint
	unused  bool // current was read by NewClient, and no request has used it yet
}

// NewClient checks the configuration. It sends no request. With a kubeconfig it reads that at once, and an error is a
// [ConfigError]: that of a missing file satisfies errors.Is(err, fs.ErrNotExist). Without one it checks the address,
// [ErrNoHost] and [ErrNoPort] included, and reads no file: the node may come up before they are there.
func NewClient(config Config) (*Client, error) {
	if config.Timeout <= 0 {
		config.Timeout = 10 * time.Second
	}
	if config.IdleTimeout <= 0 {
		config.IdleTimeout = 150 * time.Second
	}
	c := &Client{config: config}
	var err error
	if config.Kubeconfig == "" {
		c.server, err = config.Server.URL()
		return c, err
	}
	if c.current, err = c.load(); err != nil {
		return nil, err
	}
	c.server, c.unused = c.current.server, true
	return c, nil
}

// Server is the API server's URL, for messages.
func (c *Client) Server() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.current != nil {
		return c.current.server.Redacted()
	}
	return c.server.Redacted()
}

// Requests is the number of requests that were sent.
func (c *Client) Requests() int { return int(c.requests.Load()) }

// Close drops the idle connections.
func (c *Client) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.current != nil {
		c.current.connections.CloseIdleConnections()
	}
}

func (c *Client) load() (*endpoint, error) {
	var config *rest.Config
	var err error
	if c.config.Kubeconfig != "" {
		config, err = readKubeconfig(c.config.Kubeconfig)
	} else {
		config, err = c.config.serviceAccount()
	}
	if err != nil {
		return nil, err
	}
	fresh, err := newEndpoint(config, c.config.Once)
	if err != nil && c.config.Kubeconfig != "" {
		return nil, &ConfigError{File: c.config.Kubeconfig, Err: err}
	}
	return fresh, err
}

func (c Config) serviceAccount() (*rest.Config, error) {
	server, err := c.Server.URL()
	if err != nil {
		return nil, err
	}
	config := &rest.Config{Host: server.String(), BearerTokenFile: c.TokenFile}
	config.CAFile, config.Insecure = c.CAFile, c.SkipVerify
	if c.SkipVerify {
		config.CAFile = ""
	}
	if server.Scheme != "https" {
		return &rest.Config{Host: config.Host}, nil
	}
	return config, inline(config)
}

// endpoint gives the connections for the credentials as they are now.
func (c *Client) endpoint() (*endpoint, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.unused {
		c.unused = false
		return c.current, nil
	}
	fresh, err := c.load()
	switch {
	case err == nil && c.current != nil && fresh.equals(c.current):
	case err == nil:
		if c.current != nil {
			c.current.connections.CloseIdleConnections()
		}
		c.current = fresh
	case c.current == nil:
		return nil, err
	}
	return c.current, nil
}

// codecs know the types of objects that this program reads, and no others: a scheme with all of them would be paid for by
// each start of the plugin.
var codecs = sync.OnceValue(func() serializer.CodecFactory { //nolint:gochecknoglobals // made once, never changed
	scheme := runtime.NewScheme()
	scheme.AddKnownTypes(corev1.SchemeGroupVersion, &corev1.Pod{}, &corev1.PodList{}, &corev1.Node{}, &corev1.NodeList{},
		&corev1.ConfigMap{}, &corev1.ConfigMapList{}, &corev1.Event{})
	scheme.AddKnownTypes(appsv1.SchemeGroupVersion, &appsv1.DaemonSet{})
	scheme.AddKnownTypes(coordinationv1.SchemeGroupVersion, &coordinationv1.Lease{})
	scheme.AddKnownTypes(policyv1.SchemeGroupVersion, &policyv1.Eviction{})
	metav1.AddToGroupVersion(scheme, corev1.SchemeGroupVersion)
	return serializer.NewCodecFactory(scheme)
})

// endpoint is one server with the connections to it.
type endpoint struct {
	config      *rest.Config
	server      *url.URL
	proxy       func(*http.Request) (*url.URL, error)
	next        http.RoundTripper
	connections *http.Transport
	client      *rest.RESTClient
	secrets     *strings.Replacer
}

// equals tells whether the connections of two endpoints are interchangeable.
func (e *endpoint) equals(other *endpoint) bool {
	a, b := *e.config, *other.config
	a.Proxy, b.Proxy = nil, nil // functions are not comparable
	through, _ := e.proxy(&http.Request{URL: e.server})
	otherThrough, _ := other.proxy(&http.Request{URL: other.server})
	return reflect.DeepEqual(a, b) && reflect.DeepEqual(through, otherThrough)
}

// userAgent is how the API server's audit log knows the program.
const userAgent = "istio-cni"

// newEndpoint takes TLS, authentication and requests from client-go, and the connections from net/http: those of client-go
// live in a cache of the process, follow redirects and compress.
func newEndpoint(config *rest.Config, once bool) (*endpoint, error) {
	config.UserAgent = userAgent
	server, _, err := rest.DefaultServerUrlFor(&rest.Config{Host: config.Host, TLSClientConfig: config.TLSClientConfig})
	if err != nil {
		return nil, errors.New("the server is not a URL") // the cause would repeat it, and a password may stand in it
	}
	if server.Scheme != "http" && server.Scheme != "https" {
		return nil, fmt.Errorf("the server's scheme %q is neither http nor https", server.Scheme)
	}
	tlsConfig, err := rest.TLSConfigFor(config)
	if err != nil {
		return nil, fmt.Errorf("preparing TLS: %w", err)
	}
	e := &endpoint{config: config, server: server, proxy: config.Proxy}
	if e.proxy == nil {
		e.proxy = http.ProxyFromEnvironment
	}
	e.connections = &http.Transport{
		Proxy:           e.proxy,
		DialContext:     (&net.Dialer{KeepAlive: 30 * time.Second}).DialContext,
		TLSClientConfig: tlsConfig,
		// The server compresses only what is far larger than a pod.
		DisableCompression:     true,
		MaxResponseHeaderBytes: 64 << 10,
		IdleConnTimeout:        90 * time.Second,
		Protocols:              new(http.Protocols),
	}
	e.connections.Protocols.SetHTTP1(true)
	if !once {
		// A watch and short requests share one connection. One whose other end is gone silently is noticed by pings.
		e.connections.Protocols.SetHTTP2(true)
		e.connections.HTTP2 = &http.HTTP2Config{SendPingTimeout: 30 * time.Second, PingTimeout: 15 * time.Second}
	}
	if e.next, err = rest.HTTPWrappersForConfig(config, e.connections); err != nil {
		return nil, fmt.Errorf("preparing authentication: %w", err)
	}
	var secrets []string
	for _, secret := range []string{config.BearerToken, config.Password} {
		if secret != "" {
			secrets = append(secrets, secret, "[redacted]")
		}
	}
	e.secrets = strings.NewReplacer(secrets...)
	e.client, err = rest.NewRESTClient(server, "", rest.ClientContentConfig{
		AcceptContentTypes: runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON,
		ContentType:        runtime.ContentTypeJSON,
		GroupVersion:       corev1.SchemeGroupVersion,
		Negotiator:         runtime.NewClientNegotiator(codecs().WithoutConversion(), corev1.SchemeGroupVersion),
	}, nil, &http.Client{Transport: e})
	return e, err
}

// RoundTrip makes an answer that is not good a [failure], so that client-go neither tries again nor reads it, and puts
// bounds to the others. A redirect is not good: the token would go along.
func (e *endpoint) RoundTrip(r *http.Request) (*http.Response, error) {
	reached := exchangeOf(r.Context())
	r = r.WithContext(reached.trace(r.Context()))
	if through, err := e.proxy(r); err == nil && through != nil {
		reached.proxy = through.Redacted()
	}
	response, err := e.next.RoundTrip(r)
	if err != nil {
		return nil, reached.failure(err)
	}
	done := response.StatusCode == http.StatusOK || r.Method == http.MethodPost && response.StatusCode == http.StatusCreated ||
		r.Method == http.MethodDelete && response.StatusCode == http.StatusAccepted
	if !done {
		defer response.Body.Close() //nolint:errcheck // only read from
		return nil, refusal(response, e.secrets)
	}
	if response.ContentLength > reached.limit {
		response.Body.Close() //nolint:errcheck,gosec // only read from
		return nil, reached.tooLarge()
	}
	reached.contentType = response.Header.Get("Content-Type")
	reached.left = reached.limit
	response.Body = &boundedBody{response.Body, reached}
	return response, nil
}

// apiResource is one sort of object of the API.
type apiResource struct{ group, version, plural, kind string }

func pods() apiResource       { return apiResource{"", "v1", "pods", "Pod"} }
func nodes() apiResource      { return apiResource{"", "v1", "nodes", "Node"} }
func configMaps() apiResource { return apiResource{"", "v1", "configmaps", "ConfigMap"} }
func events() apiResource     { return apiResource{"", "v1", "events", "Event"} }
func daemonSets() apiResource { return apiResource{"apps", "v1", "daemonsets", "DaemonSet"} }
func leases() apiResource     { return apiResource{"coordination.k8s.io", "v1", "leases", "Lease"} }

func (r apiResource) path() []string {
	if r.group == "" {
		return []string{"/api", r.version}
	}
	return []string{"/apis", r.group, r.version}
}

// call is one request. An empty name means the collection, an empty namespace an object without or all of them.
type call struct {
	verb            string // as in RBAC
	resource        apiResource
	namespace, name string
	part            string // a part of the object that has a path of its own, such as status
	options         *metav1.ListOptions
	patch           types.PatchType
	body            any // what is sent as JSON, nil for nothing
	// limit bounds a good answer, maxAnswer by default.
	limit int64
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

// validSegment tells whether a text may stand in a URL's path: nothing that could lead to another resource.
func validSegment(text string) bool {
	const longest = 253 // of a DNS-1123 subdomain
	if text == "" || text == "." || text == ".." || len(text) > longest {
		return false
	}
	for _, r := range text {
		letter := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z'
		if !letter && (r < '0' || r > '9') && r != '-' && r != '.' && r != '_' {
			return false
		}
	}
	return true
}

// request makes the call one of client-go, which sends it once.
func (c *call) request(to *rest.RESTClient) (*rest.Request, error) {
	verb := map[string]string{
		"create": http.MethodPost, "delete": http.MethodDelete, "update": http.MethodPut, "patch": http.MethodPatch,
	}[c.verb]
	if verb == "" {
		verb = http.MethodGet
	}
	r := to.Verb(verb).AbsPath(c.resource.path()...).MaxRetries(0).WarningHandlerWithContext(rest.NoWarnings{})
	for _, segment := range []string{c.namespace, c.name} {
		if segment != "" && !validSegment(segment) {
			return nil, errNoSegment
		}
	}
	r = r.NamespaceIfScoped(c.namespace, c.namespace != "").Resource(c.resource.plural)
	if c.name != "" {
		r = r.Name(c.name)
	}
	if c.part != "" {
		r = r.SubResource(c.part)
	}
	if c.options != nil {
		r = r.VersionedParams(c.options, metav1.ParameterCodec)
	}
	if c.body == nil {
		return r, r.Error()
	}
	data, err := json.Marshal(c.body)
	if err != nil {
		return nil, fmt.Errorf("encoding the request: %w", err)
	}
	if c.patch != "" {
		r = r.SetHeader("Content-Type", string(c.patch))
	} else {
		r = r.SetHeader("Content-Type", runtime.ContentTypeJSON)
	}
	return r.Body(data), r.Error()
}

// exchange prepares one request. Its context is without a logger: client-go logs failures on its own, credentials and
// server's texts included, and each is in an [Error] as well.
func (c *Client) exchange(ctx context.Context, what *call) (context.Context, *rest.Request, *exchange, error) {
	to, err := c.endpoint()
	if err != nil {
		return ctx, nil, nil, c.failed(what, nil, &failure{class: NoCredentials, err: err})
	}
	request, err := what.request(to.client)
	if err != nil {
		return ctx, nil, nil, c.failed(what, nil, &failure{class: InvalidKey, err: err})
	}
	reached := &exchange{endpoint: to, limit: cmp.Or(what.limit, c.limit, maxAnswer)}
	c.requests.Add(1)
	return klog.NewContext(context.WithValue(ctx, exchangeKey{}, reached), logr.Discard()), request, reached, nil
}

// maxAnswer bounds an object and a page of a list. The API server's store takes objects of 1.5 MiB, most are far smaller.
const maxAnswer = 64 << 20

// transmit sends a call and gives the body of the answer.
func (c *Client) transmit(ctx context.Context, what *call) ([]byte, *exchange, error) {
	limited, cancel := context.WithTimeout(ctx, c.config.Timeout)
	defer cancel()
	limited, request, reached, err := c.exchange(limited, what)
	if err != nil {
		return nil, nil, err
	}
	body, err := request.Do(limited).Raw()
	if err != nil {
		failed := asFailure(err)
		what.doubt(failed)
		return nil, reached, c.failed(what, reached, failed)
	}
	return body, reached, nil
}

// send sends a call and gives the answer, which is of a type that is known here.
func (c *Client) send(ctx context.Context, what *call) (runtime.Object, *exchange, error) {
	body, reached, err := c.transmit(ctx, what)
	if err != nil {
		return nil, reached, err
	}
	// What the answer says about its type does not matter: it is recognized by its content.
	object, _, err := codecs().UniversalDeserializer().Decode(body, nil, nil)
	if err != nil {
		return nil, reached, c.failed(what, reached, &failure{class: Undecodable, status: http.StatusOK, err: err})
	}
	return object, reached, nil
}

// act sends a change whose answer is of no interest: that it was accepted is all there is to know.
func (c *Client) act(ctx context.Context, what *call) error {
	_, _, err := c.transmit(ctx, what)
	return err
}

// doubt takes a class back that only the API server itself may decide. A load balancer, a proxy or another server at
// the address also says 401, 403 or 404, but not with a Status, and not about this object.
func (c *call) doubt(failed *failure) {
	switch failed.class { //nolint:exhaustive // the others are no verdicts
	case Unauthorized, Forbidden:
		if failed.verdict == nil {
			failed.class = Undecodable
		}
	case TooManyRequests:
		// An eviction that a PodDisruptionBudget stands against (k8s.io/api/policy/v1.DisruptionBudgetCause).
		if apierrors.HasStatusCause(failed.err, policyv1.DisruptionBudgetCause) {
			failed.err = fmt.Errorf("%w: %w", ErrDisruptionBudget, failed.err)
		}
	case NotFound:
		switch {
		case failed.verdict == nil:
			failed.class = Undecodable
		case c.name == "" || !c.named(failed.verdict):
			failed.class = Rejected
		}
	}
}

// named tells whether a verdict is that there is no object of this name.
func (c *call) named(verdict *metav1.Status) bool {
	about := verdict.Details
	return verdict.Reason == metav1.StatusReasonNotFound && about != nil && about.Kind == c.resource.plural &&
		about.Group == c.resource.group && about.Name == c.name
}

// failed is the error of a call. It is where credentials are taken out of whatever a server wrote.
func (c *Client) failed(what *call, reached *exchange, f *failure) *Error {
	failed := &Error{
		Class: f.class, Verb: what.verb, Object: what.String(), Server: c.Server(), Status: f.status, Message: f.message,
		RetryAfter: f.retryAfter, Err: f.err,
	}
	if reached == nil {
		return failed
	}
	failed.Server, failed.Proxy = reached.endpoint.server.Redacted(), reached.proxy
	failed.Message = reached.endpoint.secrets.Replace(failed.Message)
	if failed.Err != nil {
		if text := failed.Err.Error(); reached.endpoint.secrets.Replace(text) != text {
			failed.Err = errors.New(reached.endpoint.secrets.Replace(text))
		}
	}
	return failed
}

// get fetches one object. The answer must be that object.
func get[T metav1.Object](ctx context.Context, c *Client, of apiResource, namespace, name string) (T, error) {
	what := &call{verb: "get", resource: of, namespace: namespace, name: name}
	if name == "" || namespace == "" && of != nodes() {
		return *new(T), c.failed(what, nil, &failure{class: InvalidKey, err: errNoSegment})
	}
	return ask[T](ctx, c, what)
}

// ask sends a call whose answer must be the object that the call is about, or creates.
func ask[T metav1.Object](ctx context.Context, c *Client, what *call) (T, error) {
	object, reached, err := c.send(ctx, what)
	if err != nil {
		return *new(T), err
	}
	is, ok := object.(T)
	if ok && is.GetNamespace() == what.namespace && (is.GetName() == what.name || what.verb == "create") {
		return is, nil
	}
	kind := object.GetObjectKind().GroupVersionKind()
	var namespace, name string
	if has, err := meta.Accessor(object); err == nil {
		namespace, name = has.GetNamespace(), has.GetName()
	}
	return *new(T), c.failed(what, reached, &failure{class: Undecodable, status: http.StatusOK, err: fmt.Errorf(
		"asked for %s, got kind %q, apiVersion %q, namespace %q, name %q", what.resource.kind, kind.Kind,
		kind.GroupVersion().String(), namespace, name)})
}
