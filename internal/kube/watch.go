package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"mime"
	"net/http"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/watch"
	restwatch "k8s.io/client-go/rest/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// Listener is called about a collection of objects. All functions are called from one goroutine, one after the other, and
// the reflector waits for them; none may be nil. What they get must not be changed.
type Listener[T any] struct {
	// OnUpdate gets an object that is new or has changed, OnDelete one that is no more, as it was known last. One that was
	// deleted and created anew under its name unnoticed is deleted before it is updated.
	OnUpdate, OnDelete func(T)
	// OnSync is called after a list: the objects of OnUpdate are all that there are then.
	OnSync func()
	// OnError gets why the watch fails: once when it begins to, once more when it fails in another way, and nil when it
	// works again. A watch that ends and can be opened again is no failure.
	OnError func(error)
}

// PodScope says which pods are followed, of all namespaces. It is the API server that selects: no other pod is ever sent.
type PodScope struct {
	// Namespace is empty for all of them.
	Namespace string
	// Node is the node whose pods they are; empty means those of all nodes and those of none.
	Node string
	// LabelSelector and FieldSelector are as kubectl takes them, empty for no restriction.
	LabelSelector, FieldSelector string
	// Transform may drop what the caller does not need of a pod before it is remembered, unless nil.
	Transform func(*Pod)
}

// fields is the field selector of a scope. "spec.nodeName=" without a name would pick the pods that no node has.
func (s PodScope) fields() string {
	fields := s.FieldSelector
	if s.Node != "" {
		if fields != "" {
			fields += ","
		}
		fields += "spec.nodeName=" + s.Node
	}
	return fields
}

// WatchPods runs a reflector of the pods of a scope until ctx ends. A node whose name cannot be one is an error of the
// watch at once.
func (c *Client) WatchPods(ctx context.Context, scope PodScope, tell Listener[Pod]) {
	if scope.Node != "" && len(validation.IsDNS1123Subdomain(scope.Node)) > 0 {
		what := call{verb: "watch", resource: pods(), name: scope.Node}
		tell.OnError(c.failed(&what, nil, &failure{class: InvalidKey, err: errNoNode}))
		return
	}
	follow(ctx, c, collection{
		resource: pods(), namespace: scope.Namespace, labels: scope.LabelSelector, fields: scope.fields(),
	}, func(p *corev1.Pod) Pod {
		pod := podOf(p)
		if scope.Transform != nil {
			scope.Transform(&pod)
		}
		return pod
	}, tell)
}

var errNoNode = errors.New("the name cannot be a node's")

// WatchNodes runs a reflector of all nodes until ctx ends. condition is the type of the condition that is kept, or empty.
func (c *Client) WatchNodes(ctx context.Context, condition string, tell Listener[NodeState]) {
	follow(ctx, c, collection{resource: nodes()}, func(n *corev1.Node) NodeState { return nodeOf(n, condition) }, tell)
}

// ConfigMapState is a ConfigMap as it is now.
type ConfigMapState struct {
	// Present is false when there is none of that name.
	Present bool
	// Data is its text; binary data is left out. It must not be changed.
	Data map[string]string
}

// ConfigMapListener is called about one ConfigMap, as a [Listener] is.
type ConfigMapListener struct {
	// OnUpdate gets the state once it is known and whenever presence or data have changed.
	OnUpdate func(ConfigMapState)
	// OnError is that of a [Listener]. The last state stays the best that is known.
	OnError func(error)
}

// WatchConfigMap runs a reflector of one ConfigMap until ctx ends, by list and watch of that one object, which is what a
// Role with resourceNames allows. A namespace or name that no ConfigMap can have is an error of the watch at once.
func (c *Client) WatchConfigMap(ctx context.Context, namespace, name string, tell ConfigMapListener) {
	if !validSegment(namespace) || !validSegment(name) {
		what := call{verb: "watch", resource: configMaps(), namespace: namespace, name: name}
		tell.OnError(c.failed(&what, nil, &failure{class: InvalidKey, err: errNoSegment}))
		return
	}
	var last *ConfigMapState
	now := func(state ConfigMapState) {
		if last == nil || last.Present != state.Present || !maps.Equal(last.Data, state.Data) {
			last = &state
			tell.OnUpdate(state)
		}
	}
	present := false
	follow(ctx, c, collection{resource: configMaps(), namespace: namespace, fields: "metadata.name=" + name},
		func(m *corev1.ConfigMap) *corev1.ConfigMap {
			return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: m.Name}, Data: m.Data}
		},
		Listener[*corev1.ConfigMap]{
			OnUpdate: func(m *corev1.ConfigMap) {
				if m.Name == name {
					present = true
					now(ConfigMapState{Present: true, Data: m.Data})
				}
			},
			OnDelete: func(m *corev1.ConfigMap) {
				if m.Name == name {
					present = false
					now(ConfigMapState{})
				}
			},
			OnSync: func() {
				if !present {
					now(ConfigMapState{})
				}
			},
			OnError: tell.OnError,
		})
}

// collection is the objects of one resource in one namespace (empty: in all) that selectors pick.
type collection struct {
	resource       apiResource
	namespace      string
	labels, fields string
}

// item is what is kept of an object, in the form that client-go's reflector works with.
type item[T any] struct {
	metav1.TypeMeta
	metav1.ObjectMeta

	kept T
}

// DeepCopyObject copies what client-go could change.
func (i *item[T]) DeepCopyObject() runtime.Object {
	other := *i
	return &other
}

// follow runs client-go's reflector on a collection until ctx ends. transform reduces an object to what is kept of it,
// before anything is remembered.
func follow[O metav1.Object, T any](ctx context.Context, c *Client, of collection, transform func(O) T, tell Listener[T]) {
	f := &reflector[O, T]{
		client: c, of: of, transform: transform, tell: tell, known: map[types.NamespacedName]*item[T]{}, maxPage: pageSize,
	}
	options := cache.ReflectorOptions{Name: of.resource.plural, TypeDescription: of.resource.kind, Backoff: c.config.Backoff}
	// More than that is no sensible pace, whatever makes watches end. client-go opens one that ended properly at once.
	f.pace = rate.NewLimiter(rate.Every(3*time.Second), maxHurry)
	if c.config.Backoff != nil {
		f.pace.SetLimit(rate.Every(c.config.Backoff.Duration))
	}
	ctx = klog.NewContext(ctx, logr.Discard())
	options.Logger = new(logr.Logger)
	*options.Logger = logr.Discard()
	cache.NewReflectorWithOptions(&cache.ListWatch{ListWithContextFunc: f.list, WatchFuncWithContext: f.watch},
		&item[T]{}, f, options).RunWithContext(ctx)
	f.mu.Lock()
	f.ended = true // a stream that is just being left calls nobody any more
	f.mu.Unlock()
}

// maxHurry is how many lists and watches may follow each other without a pause.
const maxHurry = 10

// reflector gives client-go's reflector what it asks for, and is the store that it fills.
type reflector[O metav1.Object, T any] struct {
	client    *Client
	of        collection
	transform func(O) T
	tell      Listener[T]
	pace      *rate.Limiter

	// mu is held while the listener is called: client-go reads a stream in a goroutine of its own.
	mu      sync.Mutex
	ended   bool
	known   map[types.NamespacedName]*item[T]
	failing Class
	// notBefore is when the server wants to be asked again.
	notBefore time.Time

	// maxPage is how many objects a page of a list may have; listed is what the list had so far.
	maxPage int64
	listed  map[types.NamespacedName]bool
}

const (
	// pageSize is of the pages of a list that the API server does not answer from its watch cache.
	pageSize = 500

	// maxListed is how many objects a list may have: twice as many as a cluster can have pods.
	maxListed = 300_000
	// maxRetryAfter is for how long a server can make the watch wait.
	maxRetryAfter = 5 * time.Minute
)

// wait paces requests.
func (f *reflector[O, T]) wait(ctx context.Context) error {
	if err := f.pace.Wait(ctx); err != nil {
		return err
	}
	f.mu.Lock()
	pause := time.Until(f.notBefore)
	f.mu.Unlock()
	if !sleep(ctx, pause) {
		return ctx.Err()
	}
	return nil
}

// fails reports an error that is new, and gives it to client-go.
func (f *reflector[O, T]) fails(ctx context.Context, err error) error {
	failed, ok := errors.AsType[*Error](err)
	f.mu.Lock()
	defer f.mu.Unlock()
	if !ok || ctx.Err() != nil || f.ended {
		return err
	}
	if failed.RetryAfter > 0 {
		f.notBefore = time.Now().Add(min(failed.RetryAfter, maxRetryAfter)) //nolint:forbidigo // a pause
	}
	if failed.Class != f.failing {
		f.failing = failed.Class
		f.tell.OnError(err)
	}
	return err
}

func (f *reflector[O, T]) works() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.failing != "" && !f.ended {
		f.failing = ""
		f.tell.OnError(nil)
	}
}

func (f *reflector[O, T]) call(verb string, options metav1.ListOptions) *call {
	options.LabelSelector, options.FieldSelector = f.of.labels, f.of.fields
	return &call{verb: verb, resource: f.of.resource, namespace: f.of.namespace, options: &options}
}

// list gives one page. client-go asks for lists only where the API server does not stream them (sendInitialEvents), and
// then from the server's watch cache.
func (f *reflector[O, T]) list(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
	if options.Continue == "" {
		f.listed = map[types.NamespacedName]bool{}
		if err := f.wait(ctx); err != nil {
			return nil, err
		}
	}
	for {
		page, err := f.page(ctx, f.call("list", f.limited(options)))
		if ClassOf(err) == TooLarge && f.maxPage > 1 {
			f.maxPage /= 10
			f.maxPage = max(f.maxPage, 1)
			continue
		}
		if err != nil {
			return nil, f.fails(ctx, err)
		}
		return page, nil
	}
}

// limited asks for no larger pages than came through.
func (f *reflector[O, T]) limited(options metav1.ListOptions) metav1.ListOptions {
	if options.Limit == 0 && f.maxPage < pageSize || options.Limit > f.maxPage {
		// Only a consistent read has pages.
		options.Limit = f.maxPage
		if options.Continue == "" {
			options.ResourceVersion, options.ResourceVersionMatch = "", ""
		}
	}
	return options
}

func (f *reflector[O, T]) page(ctx context.Context, what *call) (*internalversion.List, error) {
	object, reached, err := f.client.send(ctx, what)
	if err != nil {
		return nil, err
	}
	undecodable := func(err error) error {
		return f.client.failed(what, reached, &failure{class: Undecodable, status: http.StatusOK, err: err})
	}
	of, err := meta.ListAccessor(object)
	if kind := object.GetObjectKind().GroupVersionKind().Kind; err != nil || kind != f.of.resource.kind+"List" || of.GetResourceVersion() == "" {
		return nil, undecodable(fmt.Errorf("not a list of %s: kind %q", f.of.resource.plural, kind))
	}
	page := &internalversion.List{ListMeta: metav1.ListMeta{ResourceVersion: of.GetResourceVersion(), Continue: of.GetContinue()}}
	fresh := false
	err = meta.EachListItem(object, func(one runtime.Object) error {
		kept, problem := f.keep(one)
		if problem != nil {
			return problem
		}
		page.Items = append(page.Items, kept)
		key := types.NamespacedName{Namespace: kept.Namespace, Name: kept.Name}
		fresh = fresh || !f.listed[key]
		f.listed[key] = true
		return nil
	})
	longest := cmp.Or(f.client.longest, maxListed)
	switch {
	case err != nil || page.Continue == "":
	case !fresh:
		err = fmt.Errorf("the list does not end: a page after %d objects has no new one", len(f.listed))
	case len(f.listed) >= longest:
		err = fmt.Errorf("the list does not end: it has more than %d objects", longest)
	}
	if err != nil {
		return nil, undecodable(err)
	}
	return page, nil
}

// keep is the transform: nothing of an object but what is kept of it lives longer than this call.
func (f *reflector[O, T]) keep(object runtime.Object) (*item[T], error) {
	is, ok := object.(O)
	if !ok {
		return nil, fmt.Errorf("not a %s: kind %q", f.of.resource.kind, object.GetObjectKind().GroupVersionKind().Kind)
	}
	if is.GetName() == "" || is.GetResourceVersion() == "" {
		return nil, errors.New("an object without name or resourceVersion")
	}
	return &item[T]{ObjectMeta: metav1.ObjectMeta{
		Namespace: is.GetNamespace(), Name: is.GetName(), UID: is.GetUID(), ResourceVersion: is.GetResourceVersion(),
	}, kept: f.transform(is)}, nil
}

// errSilent is the cause of a watch that was given up.
var errSilent = errors.New("the watch was silent for too long")

// watch opens a stream of events.
func (f *reflector[O, T]) watch(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	if err := f.wait(ctx); err != nil {
		return nil, err
	}
	parent := ctx
	ctx, cancel := context.WithCancelCause(parent)
	// A server that hangs before it answers is given up as soon as with any request, later on after the time of silence.
	silence := time.AfterFunc(f.client.config.Timeout, func() { cancel(errSilent) })
	what := f.call("watch", options)
	what.options.Watch = true
	ctx, request, reached, err := f.client.exchange(ctx, what)
	if err != nil {
		silence.Stop()
		cancel(nil)
		return nil, f.fails(parent, err)
	}
	stream := &stream[O, T]{
		reflector: f, ctx: parent, what: what, reached: reached, listing: options.SendInitialEvents != nil,
		silence: silence, cancel: cancel,
	}
	reached.heard = stream.heard
	body, err := request.Stream(ctx)
	if err != nil {
		silence.Stop()
		err = f.unopened(parent, what, reached, asFailure(err), errors.Is(context.Cause(ctx), errSilent))
		cancel(nil)
		return nil, err
	}
	stream.heard()
	stream.given = ctx
	if stream.Decoder, err = decoderOf(reached, body); err != nil {
		stream.close()
		return nil, f.fails(parent, f.client.failed(what, reached, &failure{class: Undecodable, status: http.StatusOK, err: err}))
	}
	if !stream.listing {
		f.works()
	}
	return watch.NewStreamWatcherWithLogger(logr.Discard(), stream,
		apierrors.NewClientErrorReporter(http.StatusInternalServerError, what.verb, "ClientWatchDecoding")), nil
}

// unopened is the error of a watch that was not opened.
func (f *reflector[O, T]) unopened(ctx context.Context, what *call, reached *exchange, failed *failure, silent bool) error {
	what.doubt(failed)
	if silent {
		failed = &failure{class: Timeout, err: errSilent}
	}
	streams, begins := what.options.SendInitialEvents != nil, what.options.ResourceVersion == ""
	if failed.status == http.StatusGone && streams && begins {
		failed.err = errors.New("the server knows no beginning") // client-go would ask again at once, for ever
	}
	err := f.client.failed(what, reached, failed)
	if failed.class == Rejected && (failed.status == http.StatusGone || streams) {
		// The server no longer knows where to begin, or does not stream lists: client-go asks for a list.
		return err
	}
	return f.fails(ctx, err)
}

// decoderOf reads events in protobuf or, from any server that does not say so, in JSON.
func decoderOf(reached *exchange, body io.ReadCloser) (*restwatch.Decoder, error) {
	mediaType, _, err := mime.ParseMediaType(reached.contentType)
	if err != nil || mediaType != runtime.ContentTypeProtobuf {
		mediaType = runtime.ContentTypeJSON
	}
	negotiator := runtime.NewClientNegotiator(codecs().WithoutConversion(), corev1.SchemeGroupVersion)
	objects, serializer, framer, err := negotiator.StreamDecoder(mediaType, nil)
	if err != nil {
		return nil, err
	}
	return restwatch.NewDecoder(streaming.NewDecoder(framer.NewFrameReader(body), serializer), objects), nil
}

// stream reads the events of one watch.
type stream[O metav1.Object, T any] struct {
	*restwatch.Decoder

	reflector *reflector[O, T]
	ctx       context.Context //nolint:containedctx // it is the reflector's
	given     context.Context //nolint:containedctx // the request's
	what      *call
	reached   *exchange
	// listing says that what there is has not been sent to its end.
	listing bool
	silence *time.Timer
	cancel  context.CancelCauseFunc
}

// heard puts off the end of a stream for silence. In a list a server does not rest.
func (s *stream[O, T]) heard() {
	if s.listing {
		s.silence.Reset(s.reflector.client.config.Timeout)
	} else {
		s.silence.Reset(s.reflector.client.config.IdleTimeout)
	}
}

func (s *stream[O, T]) close() {
	s.silence.Stop()
	s.cancel(nil)
}

// Close ends the watch.
func (s *stream[O, T]) Close() {
	s.close()
	s.Decoder.Close()
}

// Decode gives the next event. One that is larger than client-go reads is reported and skipped. A stream that breaks just
// ends: the next watch begins after the last event. One that makes no sense ends with an error, after which client-go
// lists anew.
func (s *stream[O, T]) Decode() (watch.EventType, runtime.Object, error) {
	f := s.reflector
	for {
		s.reached.left = s.reached.limit
		kind, object, err := s.Decoder.Decode()
		switch {
		case errors.Is(err, streaming.ErrObjectTooLarge):
			_ = f.fails(s.ctx, s.failed(&failure{class: TooLarge, err: errSkipped}))
			continue
		case err != nil && s.listing && errors.Is(context.Cause(s.given), errSilent):
			return "", nil, f.fails(s.ctx, s.failed(&failure{class: Timeout, err: errSilent}))
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF),
			s.reached.broken != nil && s.reached.broken.class != TooLarge:
			return "", nil, io.EOF
		case err != nil && s.reached.broken != nil:
			return "", nil, f.fails(s.ctx, s.failed(s.reached.broken))
		case err != nil:
			return "", nil, f.fails(s.ctx, s.failed(&failure{class: Undecodable, status: http.StatusOK, err: err}))
		case kind == watch.Error:
			return kind, s.refused(object), nil
		}
		kept, err := s.event(kind, object)
		if err != nil {
			return "", nil, f.fails(s.ctx, s.failed(&failure{class: Undecodable, status: http.StatusOK, err: err}))
		}
		f.works()
		return kind, kept, nil
	}
}

// errSkipped is the cause of an event that was left out.
var errSkipped = errors.New("an event is larger than a watch can have: its object is skipped, all others are seen")

func (s *stream[O, T]) failed(f *failure) *Error {
	return s.reflector.client.failed(s.what, s.reached, f)
}

// event reduces the object of an event.
func (s *stream[O, T]) event(kind watch.EventType, object runtime.Object) (runtime.Object, error) {
	if kind != watch.Bookmark {
		return s.reflector.keep(object)
	}
	is, err := meta.Accessor(object)
	if err != nil {
		return nil, err
	}
	if is.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true" {
		s.listing = false
		s.heard()
	}
	return &item[T]{ObjectMeta: metav1.ObjectMeta{
		ResourceVersion: is.GetResourceVersion(), Annotations: is.GetAnnotations(),
	}}, nil
}

// refused is how a server ends a watch that it cannot go on with. It is reported unless the server no longer knows where
// the watch began, after which client-go lists anew.
func (s *stream[O, T]) refused(object runtime.Object) runtime.Object {
	verdict, ok := object.(*metav1.Status)
	if !ok {
		verdict = &metav1.Status{Code: http.StatusInternalServerError, Message: "the watch ended with something else than a Status"}
	}
	secrets := s.reached.endpoint.secrets
	refusal := &failure{
		class: classOf(int(verdict.Code)), status: int(verdict.Code), message: clean(secrets.Replace(verdict.Message)), verdict: verdict,
	}
	refusal.err = refusal.statusError(secrets)
	if !apierrors.IsResourceExpired(refusal.err) && !apierrors.IsGone(refusal.err) {
		_ = s.reflector.fails(s.ctx, s.failed(refusal))
	}
	status := refusal.statusError(secrets).Status()
	return &status
}

// Add is of the store that client-go's reflector fills, as the four below are.
func (f *reflector[O, T]) Add(object any) error { return f.Update(object) }

// Update keeps an object that is new or has changed.
func (f *reflector[O, T]) Update(object any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.put(object)
	return nil
}

func (f *reflector[O, T]) put(object any) {
	fresh := object.(*item[T]) //nolint:forcetypeassert // client-go has checked it
	key := types.NamespacedName{Namespace: fresh.Namespace, Name: fresh.Name}
	was, found := f.known[key]
	if found && was.UID == fresh.UID && was.ResourceVersion == fresh.ResourceVersion {
		return
	}
	if found && was.UID != fresh.UID {
		f.remove(key)
	}
	f.known[key] = fresh
	f.tell.OnUpdate(fresh.kept)
}

// Delete forgets an object.
func (f *reflector[O, T]) Delete(object any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	last := object.(*item[T]) //nolint:forcetypeassert // client-go has checked it
	f.remove(types.NamespacedName{Namespace: last.Namespace, Name: last.Name})
	return nil
}

func (f *reflector[O, T]) remove(key types.NamespacedName) {
	if was, found := f.known[key]; found {
		delete(f.known, key)
		f.tell.OnDelete(was.kept)
	}
}

// Replace makes a list the whole of what is known.
func (f *reflector[O, T]) Replace(list []any, _ string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	fresh := map[types.NamespacedName]bool{}
	for _, object := range list {
		one := object.(*item[T]) //nolint:forcetypeassert // client-go has checked it
		fresh[types.NamespacedName{Namespace: one.Namespace, Name: one.Name}] = true
	}
	for key := range f.known {
		if !fresh[key] {
			f.remove(key)
		}
	}
	for _, object := range list {
		f.put(object)
	}
	f.tell.OnSync()
	return nil
}

// Resync has nothing to do: no period is set.
func (f *reflector[O, T]) Resync() error { return nil }
