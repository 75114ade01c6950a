package kube

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
)

// Config selects the API server and the credentials: the service account of the program's own pod, or a kubeconfig.
type Config struct {
	Server Address
	// Kubeconfig is a file. Unless empty, it replaces Server, TokenFile and CAFile.
	Kubeconfig string
	// TokenFile and CAFile are the files that the kubelet projects into the pod and replaces on a rotation.
	TokenFile, CAFile string
	// SkipVerify accepts any server certificate and ignores CAFile.
	SkipVerify bool
	// Timeout bounds each request except a watch, in addition to the caller's context; 10 s by default.
	Timeout time.Duration
	// IdleTimeout bounds the time without an event of a watch; 150 s by default. A healthy API server sends a bookmark each
	// minute.
	IdleTimeout time.Duration
	// Backoff is the back-off between the attempts of a watch; nil means client-go's default.
	Backoff *wait.Backoff
	// Once is for a process with one request: it uses one HTTP/1.1 connection, kept for further attempts. HTTP/2 would add an
	// exchange of SETTINGS, which pays off only with several requests.
	Once bool
}

// Client sends requests to one API server. Each method except the Watch methods and [Client.Lookup] sends one request and
// leaves retries to the caller; its error is an [Error]. A Client is safe for concurrent use.
//
// client-go implements connections, TLS, authentication and the reload of a token file each minute. After a failed request, the
// client reads the kubeconfig, the certificate authority and the token file again. It rebuilds its transport if their content
// has changed, and keeps the present transport while a file is missing or damaged.
type Client struct {
	config Config

	requests atomic.Int64
	limit    int64 // in bytes of a response, for tests
	longest  int   // in objects of a list, for tests

	mu      sync.Mutex
	current *endpoint
	stale   bool // a request has failed since current was read
}

// NewClient checks the configuration and sends no request. It reads a kubeconfig at once: an error has the class InvalidConfig,
// and the error of a missing file satisfies errors.Is(err, fs.ErrNotExist). Without a kubeconfig NewClient checks the address
// and reads no file, because the files can appear after the start of the node.
func NewClient(config Config) (*Client, error) {
	config.Timeout = cmp.Or(config.Timeout, 10*time.Second)
	config.IdleTimeout = cmp.Or(config.IdleTimeout, 150*time.Second)
	c := &Client{config: config}
	var err error
	if config.Kubeconfig == "" {
		_, err = config.Server.URL()
	} else {
		_, err = c.endpoint()
	}
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Server returns the API server's URL, for messages.
func (c *Client) Server() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.current != nil {
		return c.current.server.Redacted()
	}
	server, _ := c.config.Server.URL() // valid, or there would be no client
	return server.String()
}

// Requests returns the number of requests sent.
func (c *Client) Requests() int { return int(c.requests.Load()) }

// Close closes the idle connections.
func (c *Client) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.current != nil {
		utilnet.CloseIdleConnectionsFor(c.current.client.Client.Transport)
	}
}

// endpoint returns the connections for the current credentials.
func (c *Client) endpoint() (*endpoint, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.current != nil && !c.stale {
		return c.current, nil
	}
	fresh, err := c.load()
	switch {
	case err == nil && (c.current == nil || !bytes.Equal(fresh.content, c.current.content)):
		c.current = fresh
	case err != nil && c.current == nil:
		return nil, err
	}
	c.stale = err != nil
	return c.current, nil
}

func (c *Client) load() (*endpoint, error) {
	file := c.config.Kubeconfig
	if file == "" {
		server, err := c.config.Server.URL()
		if err != nil {
			return nil, err
		}
		config := &rest.Config{Host: server.String()}
		if server.Scheme == "https" {
			config.BearerTokenFile, config.CAFile, config.Insecure = c.config.TokenFile, c.config.CAFile, c.config.SkipVerify
		}
		if config.Insecure {
			config.CAFile = ""
		}
		return newEndpoint(config, nil, c.config.Once)
	}
	config, content, err := readKubeconfig(file)
	var fresh *endpoint
	if err == nil {
		fresh, err = newEndpoint(config, content, c.config.Once)
	}
	if err != nil {
		return nil, &Error{Class: InvalidConfig, File: file, Err: err}
	}
	return fresh, nil
}

// codecs knows only the types of objects that this program reads, because a scheme with all types would slow down each start of
// the plugin.
var codecs = sync.OnceValue(func() serializer.CodecFactory { //nolint:gochecknoglobals // made once, never changed
	scheme := runtime.NewScheme()
	scheme.AddKnownTypes(corev1.SchemeGroupVersion, &corev1.Pod{}, &corev1.PodList{}, &corev1.Node{}, &corev1.NodeList{},
		&corev1.ConfigMap{}, &corev1.ConfigMapList{}, &corev1.Event{}, &corev1.Namespace{}, &corev1.NamespaceList{})
	scheme.AddKnownTypes(appsv1.SchemeGroupVersion, &appsv1.DaemonSet{})
	scheme.AddKnownTypes(coordinationv1.SchemeGroupVersion, &coordinationv1.Lease{})
	scheme.AddKnownTypes(policyv1.SchemeGroupVersion, &policyv1.Eviction{})
	metav1.AddToGroupVersion(scheme, corev1.SchemeGroupVersion)
	return serializer.NewCodecFactory(scheme)
})

// endpoint is one server with its connections.
type endpoint struct {
	server *url.URL
	client *rest.RESTClient
	// content is the content of all configuration files, to detect a change.
	content []byte
}

// newEndpoint builds client-go's transport and client. content is the content of the kubeconfig, if any.
func newEndpoint(config *rest.Config, content []byte, once bool) (*endpoint, error) {
	more, err := inline(config)
	if err != nil {
		return nil, err
	}
	config.UserAgent, config.DisableCompression = "istio-cni", true // compression is for responses far larger than a pod
	if once {
		config.NextProtos = []string{"http/1.1"}
	}
	server, _, err := rest.DefaultServerUrlFor(config)
	switch {
	case err != nil:
		return nil, errors.New("the server is not a URL that can be used") // the cause quotes the URL, which can have a password
	case server.Scheme != "http" && server.Scheme != "https":
		return nil, fmt.Errorf("the server's scheme %q is neither http nor https", server.Scheme)
	}
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return &observer{next} })
	connections, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("preparing TLS: %w", err)
	}
	connections.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse } // to keep the token here
	client, err := rest.NewRESTClient(server, "", rest.ClientContentConfig{
		AcceptContentTypes: runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON,
		ContentType:        runtime.ContentTypeJSON,
		GroupVersion:       corev1.SchemeGroupVersion,
		Negotiator:         runtime.NewClientNegotiator(codecs().WithoutConversion(), corev1.SchemeGroupVersion),
	}, nil, connections)
	return &endpoint{server: server, client: client, content: append(content, more...)}, err
}

// apiResource is one resource of the API.
type apiResource struct{ group, version, plural, kind string }

func pods() apiResource       { return apiResource{"", "v1", "pods", "Pod"} }
func nodes() apiResource      { return apiResource{"", "v1", "nodes", "Node"} }
func namespaces() apiResource { return apiResource{"", "v1", "namespaces", "Namespace"} }
func configMaps() apiResource { return apiResource{"", "v1", "configmaps", "ConfigMap"} }
func events() apiResource     { return apiResource{"", "v1", "events", "Event"} }
func daemonSets() apiResource { return apiResource{"apps", "v1", "daemonsets", "DaemonSet"} }
func leases() apiResource     { return apiResource{"coordination.k8s.io", "v1", "leases", "Lease"} }

// call is one request. An empty name means the collection, an empty namespace a cluster-scoped object or all namespaces.
type call struct {
	verb            string // as in RBAC
	resource        apiResource
	namespace, name string
	part            string // a subresource, such as status
	options         *metav1.ListOptions
	patch           types.PatchType
	body            any  // encoded as JSON, nil for none
	asJSON          bool // because the codecs do not know the response's type
}

// String returns the resource, namespace and name, for messages.
func (c *call) String() string {
	return clean(strings.TrimSuffix(c.resource.plural+"/"+c.part, "/") + " " + strings.Trim(c.namespace+"/"+c.name, "/"))
}

var errNoSegment = errors.New("the namespace or the name is not valid")

// validName reports whether a text can be the name of an object or of its namespace.
func validName(text string) bool { return len(validation.IsDNS1123Subdomain(text)) == 0 }

// request builds client-go's request, without retries.
func (c *call) request(to *rest.RESTClient) (*rest.Request, error) {
	verb := map[string]string{
		"create": http.MethodPost, "delete": http.MethodDelete, "update": http.MethodPut, "patch": http.MethodPatch,
	}[c.verb]
	root := "/apis"
	if c.resource.group == "" {
		root = "/api"
	}
	r := to.Verb(cmp.Or(verb, http.MethodGet)).AbsPath(root, c.resource.group, c.resource.version).MaxRetries(0).WarningHandlerWithContext(rest.NoWarnings{})
	r = r.NamespaceIfScoped(c.namespace, c.namespace != "").Resource(c.resource.plural).SubResource(c.part)
	if c.name != "" {
		r = r.Name(c.name)
	}
	if c.asJSON {
		r = r.SetHeader("Accept", runtime.ContentTypeJSON)
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
	return r.SetHeader("Content-Type", cmp.Or(string(c.patch), runtime.ContentTypeJSON)).Body(data), r.Error()
}

// Bounds of one object and of a page of a list, in bytes. The API server stores objects of up to 1.5 MiB, and JSON escapes make
// them at most six times larger. Most objects are far smaller.
const (
	maxObject = 16 << 20
	maxAnswer = 64 << 20
)

// begin prepares one request. It returns a context without a logger because client-go would log failures, with credentials and
// untrusted server texts. Each failure is an [Error] as well.
func (c *Client) begin(ctx context.Context, what *call) (context.Context, *rest.Request, *exchange, error) {
	x := &exchange{client: c, call: what, limit: cmp.Or(c.limit, maxAnswer)}
	x.at(authenticating)
	if what.verb == "get" {
		x.limit = maxObject
	}
	to, err := c.endpoint()
	if err != nil {
		return ctx, nil, x, x.fail(NoCredentials, err)
	}
	request, err := what.request(to.client)
	if err != nil {
		return ctx, nil, x, x.fail(InvalidKey, err)
	}
	c.requests.Add(1)
	return klog.NewContext(context.WithValue(ctx, exchangeKey{}, x), logr.Discard()), request, x, nil
}

// transmit sends a call and returns the body of the response.
func (c *Client) transmit(ctx context.Context, what *call) ([]byte, *exchange, error) {
	ctx, cancel := context.WithTimeout(ctx, c.config.Timeout)
	defer cancel()
	ctx, request, x, err := c.begin(ctx, what)
	if err != nil {
		return nil, x, err
	}
	result := request.Do(ctx)
	if err := result.Error(); err != nil {
		return nil, x, x.failure(ctx, err)
	}
	body, _ := result.Raw()
	return body, x, nil
}

// send sends a call and returns the decoded response, which has a type of the scheme.
func (c *Client) send(ctx context.Context, what *call) (runtime.Object, *exchange, error) {
	body, x, err := c.transmit(ctx, what)
	if err != nil {
		return nil, x, err
	}
	// The decoder detects the format from the content and ignores the header.
	object, _, err := codecs().UniversalDeserializer().Decode(body, nil, nil)
	if err != nil {
		return nil, x, x.fail(Undecodable, err)
	}
	return object, x, nil
}

// act sends a change and ignores the response's body.
func (c *Client) act(ctx context.Context, what *call) error {
	_, _, err := c.transmit(ctx, what)
	return err
}

// get fetches one object. It returns an error for a response with another object.
func get[T metav1.Object](ctx context.Context, c *Client, of apiResource, namespace, name string) (T, error) {
	what := &call{verb: "get", resource: of, namespace: namespace, name: name}
	if !validName(name) || of != nodes() && of != namespaces() && !validName(namespace) {
		return *new(T), c.invalid(what, errNoSegment)
	}
	return fetch[T](ctx, c, what)
}

// fetch sends a call whose response must be the object that the call names or creates.
func fetch[T metav1.Object](ctx context.Context, c *Client, what *call) (T, error) {
	object, x, err := c.send(ctx, what)
	if err != nil {
		return *new(T), err
	}
	is, ok := object.(T)
	if ok && is.GetNamespace() == what.namespace && (is.GetName() == what.name || what.verb == "create") {
		return is, nil
	}
	var namespace, name string
	if has, err := meta.Accessor(object); err == nil {
		namespace, name = has.GetNamespace(), has.GetName()
	}
	kind := object.GetObjectKind().GroupVersionKind()
	return *new(T), x.fail(Undecodable, fmt.Errorf("requested %s, got %s of %s, namespace %q, name %q", what.resource.kind, kind.Kind,
		kind.GroupVersion(), namespace, name))
}

// exchange is one request and its response on the wire.
type exchange struct {
	client *Client
	call   *call
	// secrets are the credentials of the request.
	secrets []string
	// limit bounds a response, or an event of a watch, in bytes; left is the number of bytes left to read.
	limit int64
	left  atomic.Int64
	// received is called when a part of a watch arrives, done when the watch ends; both are nil for other requests.
	received, done func()
	// unsent is the error of a request without a response, broken the error that interrupted a response.
	unsent, broken error

	// stage is set by hooks in goroutines of net/http, some of them after the end of the request.
	stage atomic.Value
}

// exchangeKey is the key of the exchange in a request's context.
type exchangeKey struct{}

// stage is the progress of an exchange.
type stage string

const (
	authenticating stage = "reading the credentials"
	starting       stage = "preparing the request"
	resolving      stage = "resolving the server's name"
	connecting     stage = "connecting"
	handshaking    stage = "in the TLS handshake"
	waiting        stage = "waiting for the response"
	reading        stage = "reading the response"
)

func (x *exchange) at(s stage) { x.stage.Store(s) }

// observer records the credentials of each outgoing request, and bounds the response.
type observer struct{ next http.RoundTripper }

// WrappedRoundTripper returns the wrapped transport, so that callers can close its idle connections.
func (o *observer) WrappedRoundTripper() http.RoundTripper { return o.next }

// RoundTrip sends a request.
func (o *observer) RoundTrip(r *http.Request) (*http.Response, error) {
	x, _ := r.Context().Value(exchangeKey{}).(*exchange)
	x.at(starting)
	_, credential, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	_, password, _ := r.BasicAuth()
	x.secrets = slices.DeleteFunc([]string{credential, password}, func(s string) bool { return s == "" })
	response, err := o.next.RoundTrip(r.WithContext(httptrace.WithClientTrace(r.Context(), &httptrace.ClientTrace{
		DNSStart:             func(httptrace.DNSStartInfo) { x.at(resolving) },
		ConnectStart:         func(string, string) { x.at(connecting) },
		TLSHandshakeStart:    func() { x.at(handshaking) },
		GotConn:              func(httptrace.GotConnInfo) { x.at(waiting) },
		GotFirstResponseByte: func() { x.at(reading) },
	})))
	if err != nil {
		x.unsent = err
		return nil, err
	}
	x.left.Store(x.limit)
	response.Body = &boundedBody{response.Body, x}
	return response, nil
}

// errTooLarge is the error of a response with more than this number of bytes.
type errTooLarge int64

func (e errTooLarge) Error() string {
	return fmt.Sprintf("the response has more than %d bytes", int64(e))
}

// boundedBody limits the body of a response. At the limit, the body of a watch ends without an error.
type boundedBody struct {
	io.ReadCloser

	of *exchange
}

func (b *boundedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if b.of.left.Add(int64(-n)) < 0 {
		n, err = 0, errTooLarge(b.of.limit)
	}
	switch {
	case b.of.received != nil:
		b.of.received()
		if err != nil {
			err = io.EOF
		}
	case err != nil && !errors.Is(err, io.EOF):
		b.of.broken = err
	}
	return n, err
}

func (b *boundedBody) Close() error {
	if b.of.done != nil {
		b.of.done()
	}
	return b.ReadCloser.Close()
}
