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
	"strings"
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

// Listener has callbacks for a collection of objects. All are called from one goroutine, one after the other, and the reflector
// waits for them; none may be nil. They must not change their arguments.
type Listener[T any] struct {
	// OnUpdate gets an object that is new or has changed, OnDelete the last known state of a deleted one. An object that was
	// deleted and created anew under its name between two events is deleted before it is updated.
	OnUpdate, OnDelete func(T)
	// OnSync is called after a list: the objects of OnUpdate are all that there are then.
	OnSync func()
	// OnError gets why the watch fails: once when it begins to, once more when the class of the failure changes, and nil when it
	// works again. A watch that ends and can be opened again is no failure.
	OnError func(error)
}

// PodScope selects pods. The API server selects: no other pod is ever sent.
type PodScope struct {
	// Namespace is empty for all of them.
	Namespace string
	// Node selects the pods of one node; empty means those of all nodes and those of none.
	Node string
	// LabelSelector and FieldSelector are as kubectl takes them, empty for no restriction.
	LabelSelector, FieldSelector string
	// Transform may drop what the caller does not need of a pod before it is stored, unless nil.
	Transform func(*Pod)
}

// fields is the field selector of a scope. "spec.nodeName=" without a name would select the pods that have no node.
func (s PodScope) fields() string {
	if s.Node == "" {
		return s.FieldSelector
	}
	return strings.TrimPrefix(s.FieldSelector+",spec.nodeName="+s.Node, ",")
}

// WatchPods runs a reflector of the pods of a scope until ctx ends. A node name that no node can have is reported to OnError at
// once, and ends it.
func (c *Client) WatchPods(ctx context.Context, scope PodScope, listener Listener[Pod]) {
	if scope.Node != "" && len(validation.IsDNS1123Subdomain(scope.Node)) > 0 {
		listener.OnError(c.invalid(&call{verb: "watch", resource: pods(), name: scope.Node}, errors.New("the name cannot be a node's")))
		return
	}
	reflect(ctx, c, collection{
		resource: pods(), namespace: scope.Namespace, labels: scope.LabelSelector, fields: scope.fields(),
	}, func(p *corev1.Pod) Pod {
		pod := podOf(p)
		if scope.Transform != nil {
			scope.Transform(&pod)
		}
		return pod
	}, listener)
}

// WatchNodes runs a reflector of all nodes until ctx ends. condition is the type of the condition that is kept, or empty.
func (c *Client) WatchNodes(ctx context.Context, condition string, listener Listener[NodeState]) {
	reflect(ctx, c, collection{resource: nodes()}, func(n *corev1.Node) NodeState { return nodeOf(n, condition) }, listener)
}

// ConfigMapState is a ConfigMap as it is now.
type ConfigMapState struct {
	// Present is false when there is none of that name.
	Present bool
	// Data is its text; binary data is left out. It must not be changed.
	Data map[string]string
}

// ConfigMapListener has callbacks for one ConfigMap, with the rules of a [Listener].
type ConfigMapListener struct {
	// OnUpdate gets the state once it is known and whenever presence or data have changed.
	OnUpdate func(ConfigMapState)
	// OnError is that of a [Listener]. The last state remains the best that is known.
	OnError func(error)
}

// WatchConfigMap runs a reflector of one ConfigMap until ctx ends, by list and watch of that one object, which a Role with
// resourceNames allows. A namespace or name that no ConfigMap can have is reported to OnError at once, and ends it.
func (c *Client) WatchConfigMap(ctx context.Context, namespace, name string, listener ConfigMapListener) {
	if !validName(namespace) || !validName(name) {
		listener.OnError(c.invalid(&call{verb: "watch", resource: configMaps(), namespace: namespace, name: name}, errNoSegment))
		return
	}
	var now, reported ConfigMapState
	synced := false
	report := func() {
		if !synced || now.Present != reported.Present || !maps.Equal(now.Data, reported.Data) {
			synced, reported = true, now
			listener.OnUpdate(now)
		}
	}
	set := func(state ConfigMapState, present bool) {
		if state.Present { // else it is of another name
			now = ConfigMapState{Present: present}
			if present {
				now.Data = state.Data
			}
			report()
		}
	}
	reflect(ctx, c, collection{resource: configMaps(), namespace: namespace, fields: "metadata.name=" + name},
		func(m *corev1.ConfigMap) ConfigMapState { return ConfigMapState{Present: m.Name == name, Data: m.Data} },
		Listener[ConfigMapState]{
			OnUpdate: func(m ConfigMapState) { set(m, true) }, OnDelete: func(m ConfigMapState) { set(m, false) },
			OnSync: report, OnError: listener.OnError,
		})
}

// collection is the objects of one resource in one namespace (empty: in all) that selectors select.
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

func (i *item[T]) key() types.NamespacedName {
	return types.NamespacedName{Namespace: i.Namespace, Name: i.Name}
}

const (
	// burst is how many lists and watches may follow each other without a pause, interval the pause between further ones.
	// client-go opens a watch that ended properly at once.
	burst    = 10
	interval = 3 * time.Second
	// pageSize is of the pages of a list that the API server does not answer from its watch cache.
	pageSize = 500
	// maxListed is how many objects a list may have: twice as many as a cluster can have pods.
	maxListed = 300_000
	// maxRetryAfter is for how long a server can make the watch wait.
	maxRetryAfter = 5 * time.Minute
)

// reflect runs client-go's reflector on a collection until ctx ends. transform reduces an object to what is kept of it, before
// anything is stored.
func reflect[O metav1.Object, T any](ctx context.Context, c *Client, of collection, transform func(O) T, listener Listener[T]) {
	r := &reflector[O, T]{
		client: c, of: of, transform: transform, listener: listener, known: map[types.NamespacedName]*item[T]{}, maxPage: pageSize,
		pace: rate.NewLimiter(rate.Every(interval), burst),
	}
	if c.config.Backoff != nil {
		r.pace.SetLimit(rate.Every(c.config.Backoff.Duration))
	}
	silent := logr.Discard()
	options := cache.ReflectorOptions{
		Name: of.resource.plural, TypeDescription: of.resource.kind, Backoff: c.config.Backoff, Logger: &silent,
	}
	cache.NewReflectorWithOptions(&cache.ListWatch{ListWithContextFunc: r.list, WatchFuncWithContext: r.watch},
		&item[T]{}, r, options).RunWithContext(klog.NewContext(ctx, silent))
	r.mu.Lock()
	r.ended = true // a stream that is just being left calls the listener no more
	r.mu.Unlock()
}

// reflector is what client-go's reflector lists and watches with, and the store that it fills.
type reflector[O metav1.Object, T any] struct {
	client    *Client
	of        collection
	transform func(O) T
	listener  Listener[T]
	pace      *rate.Limiter

	// mu is held while the listener is called: client-go reads a stream in a goroutine of its own.
	mu      sync.Mutex
	ended   bool
	known   map[types.NamespacedName]*item[T]
	failing Class

	// maxPage is how many objects a page of a list may have, listed how many the list had so far.
	maxPage int64
	listed  int
}

// fails reports an error of another class than the last one, waits for as long as the server asks for, and gives the error to
// client-go.
func (r *reflector[O, T]) fails(ctx context.Context, err error) error {
	failed, ok := errors.AsType[*Error](err)
	if !ok || ctx.Err() != nil {
		return err
	}
	r.state(failed.Class, err)
	sleep(ctx, min(failed.RetryAfter, maxRetryAfter))
	return err
}

// state reports whether the watch fails, as far as that is new.
func (r *reflector[O, T]) state(class Class, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if class != r.failing && !r.ended {
		r.failing = class
		r.listener.OnError(err)
	}
}

func (r *reflector[O, T]) works() { r.state("", nil) }

func (r *reflector[O, T]) call(verb string, options metav1.ListOptions) *call {
	options.LabelSelector, options.FieldSelector = r.of.labels, r.of.fields
	return &call{verb: verb, resource: r.of.resource, namespace: r.of.namespace, options: &options}
}

// list gives one page. client-go asks for lists only where the API server does not stream them (sendInitialEvents), and
// then from the server's watch cache. A page that is too large is asked for again in smaller pages.
func (r *reflector[O, T]) list(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
	if options.Continue == "" {
		r.listed = 0
		if err := r.pace.Wait(ctx); err != nil {
			return nil, err
		}
	}
	for {
		if options.Limit == 0 && r.maxPage < pageSize || options.Limit > r.maxPage {
			options.Limit = r.maxPage
			if options.Continue == "" { // only a consistent read has pages
				options.ResourceVersion, options.ResourceVersionMatch = "", ""
			}
		}
		page, err := r.page(ctx, r.call("list", options))
		if ClassOf(err) == TooLarge && r.maxPage > 1 {
			r.maxPage = max(r.maxPage/10, 1)
			continue
		}
		if err != nil {
			return nil, r.fails(ctx, err)
		}
		return page, nil
	}
}

func (r *reflector[O, T]) page(ctx context.Context, what *call) (*internalversion.List, error) {
	object, x, err := r.client.send(ctx, what)
	if err != nil {
		return nil, err
	}
	of, err := meta.ListAccessor(object)
	if kind := object.GetObjectKind().GroupVersionKind().Kind; err != nil || kind != r.of.resource.kind+"List" || of.GetResourceVersion() == "" {
		return nil, x.fail(Undecodable, fmt.Errorf("not a list of %s: kind %q", r.of.resource.plural, kind))
	}
	page := &internalversion.List{ListMeta: metav1.ListMeta{ResourceVersion: of.GetResourceVersion(), Continue: of.GetContinue()}}
	err = meta.EachListItem(object, func(one runtime.Object) error {
		kept, problem := r.keep(one)
		page.Items = append(page.Items, kept)
		return problem
	})
	// An empty page counts as a full one: it is an error of the server, and the list has to end.
	if r.listed += len(page.Items); len(page.Items) == 0 {
		r.listed += pageSize
	}
	if longest := cmp.Or(r.client.longest, maxListed); err == nil && page.Continue != "" && r.listed >= longest {
		err = fmt.Errorf("the list does not end: it has more than %d objects", longest)
	}
	if err != nil {
		return nil, x.fail(Undecodable, err)
	}
	return page, nil
}

// keep is the transform: nothing of an object but what is kept of it lives longer than this call.
func (r *reflector[O, T]) keep(object runtime.Object) (*item[T], error) {
	is, ok := object.(O)
	if !ok {
		return nil, fmt.Errorf("not a %s: kind %q", r.of.resource.kind, object.GetObjectKind().GroupVersionKind().Kind)
	}
	if is.GetName() == "" || is.GetResourceVersion() == "" {
		return nil, errors.New("an object without name or resourceVersion")
	}
	return &item[T]{ObjectMeta: metav1.ObjectMeta{
		Namespace: is.GetNamespace(), Name: is.GetName(), UID: is.GetUID(), ResourceVersion: is.GetResourceVersion(),
	}, kept: r.transform(is)}, nil
}

// errSilent is the cause of a watch that was given up.
var errSilent = errors.New("the watch was silent for too long")

// watch opens a stream of events. A server that hangs before it answers is given up as soon as with any request, later on after
// Config.IdleTimeout.
func (r *reflector[O, T]) watch(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
	if err := r.pace.Wait(ctx); err != nil {
		return nil, err
	}
	options.Watch = true
	s := &stream[O, T]{reflector: r, parent: ctx, listing: options.SendInitialEvents != nil}
	ctx, s.cancel = context.WithCancelCause(ctx)
	s.silence = time.AfterFunc(r.client.config.Timeout, func() { s.cancel(errSilent) })
	given, request, x, err := r.client.begin(ctx, r.call("watch", options))
	s.ctx, s.exchange, x.heard = given, x, s.heard
	var body io.ReadCloser
	if err == nil {
		body, err = request.Stream(given)
		if err != nil {
			err = x.failure(given, err)
		} else if s.Decoder, err = decoderOf(x.contentType, body); err != nil {
			err = x.fail(Undecodable, err)
		}
	}
	if err != nil {
		s.close()
		failed, _ := errors.AsType[*Error](err)
		if failed.Class == Rejected && (failed.Status == http.StatusGone || s.listing) {
			return nil, err // the server has forgotten the version, or does not stream lists: client-go asks for a list
		}
		return nil, r.fails(s.parent, err)
	}
	s.heard()
	if !s.listing {
		r.works()
	}
	return watch.NewStreamWatcherWithLogger(logr.Discard(), s,
		apierrors.NewClientErrorReporter(http.StatusInternalServerError, "watch", "ClientWatchDecoding")), nil
}

// decoderOf reads events in protobuf or, from any server that does not say so, in JSON.
func decoderOf(contentType string, body io.ReadCloser) (*restwatch.Decoder, error) {
	mediaType, _, err := mime.ParseMediaType(contentType)
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

// stream decodes the events of one watch. It stands before client-go's decoder because that one ends a watch at an event that is too
// large, so that the watch would end there again and again, and because it does not reduce objects.
type stream[O metav1.Object, T any] struct {
	*restwatch.Decoder

	reflector   *reflector[O, T]
	parent, ctx context.Context //nolint:containedctx // the reflector's and the request's
	exchange    *exchange
	listing     bool // the initial list has not been sent to its end
	silence     *time.Timer
	cancel      context.CancelCauseFunc
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

// Decode gives the next event. An event that is larger than client-go reads is reported and skipped. A stream that breaks just
// ends, and the next watch begins after the last event. A stream that cannot be decoded ends with an error, after which client-go
// lists anew.
func (s *stream[O, T]) Decode() (watch.EventType, runtime.Object, error) {
	r, x := s.reflector, s.exchange
	for {
		x.left = x.limit
		kind, object, err := s.Decoder.Decode()
		if errors.Is(err, streaming.ErrObjectTooLarge) {
			_ = r.fails(s.parent, x.fail(TooLarge, errSkipped))
			continue
		}
		if err == nil {
			object, err = s.event(kind, object)
		}
		if err == nil {
			if kind != watch.Error {
				r.works()
			}
			return kind, object, nil
		}
		var failed error = x.fail(Undecodable, err)
		if x.broken != nil {
			failed = x.failure(s.ctx, err)
		}
		broken := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || x.broken != nil && ClassOf(failed) != TooLarge
		if broken && !(s.listing && ClassOf(failed) == Timeout) {
			return "", nil, io.EOF
		}
		return "", nil, r.fails(s.parent, failed)
	}
}

// errSkipped is the cause of an event that was left out.
var errSkipped = errors.New("an event is larger than a watch can have: its object is skipped, all others are seen")

// event reduces the object of an event. An ERROR is reported unless the server has forgotten the version where the watch began,
// after which client-go lists anew.
func (s *stream[O, T]) event(kind watch.EventType, object runtime.Object) (runtime.Object, error) {
	switch kind { //nolint:exhaustive // the others have an object of the collection
	case watch.Error:
		verdict, ok := object.(*metav1.Status)
		if !ok {
			return nil, errors.New("the watch ended with something else than a Status")
		}
		failed := s.exchange.refused(*verdict)
		if !apierrors.IsResourceExpired(failed) && !apierrors.IsGone(failed) {
			_ = s.reflector.fails(s.parent, failed)
		}
		status, _ := errors.AsType[*apierrors.StatusError](failed)
		return &status.ErrStatus, nil
	case watch.Bookmark:
		is, err := meta.Accessor(object)
		if err != nil {
			return nil, err
		}
		if is.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true" {
			s.listing = false
			s.heard()
		}
		return &item[T]{ObjectMeta: metav1.ObjectMeta{ResourceVersion: is.GetResourceVersion(), Annotations: is.GetAnnotations()}}, nil
	}
	return s.reflector.keep(object)
}

// Add is of the store that client-go's reflector fills, as the four below are.
func (r *reflector[O, T]) Add(object any) error { return r.Update(object) }

// Update stores an object that is new or has changed.
func (r *reflector[O, T]) Update(object any) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.put(object.(*item[T])) //nolint:forcetypeassert // client-go has checked it
	return nil
}

func (r *reflector[O, T]) put(fresh *item[T]) {
	last, found := r.known[fresh.key()]
	if found && last.UID == fresh.UID && last.ResourceVersion == fresh.ResourceVersion {
		return
	}
	if found && last.UID != fresh.UID {
		r.remove(fresh.key())
	}
	r.known[fresh.key()] = fresh
	r.listener.OnUpdate(fresh.kept)
}

// Delete removes an object.
func (r *reflector[O, T]) Delete(object any) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.remove(object.(*item[T]).key()) //nolint:forcetypeassert // client-go has checked it
	return nil
}

func (r *reflector[O, T]) remove(key types.NamespacedName) {
	if last, found := r.known[key]; found {
		delete(r.known, key)
		r.listener.OnDelete(last.kept)
	}
}

// Replace makes a list the whole of what is known.
func (r *reflector[O, T]) Replace(list []any, _ string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	fresh := map[types.NamespacedName]bool{}
	for _, object := range list {
		fresh[object.(*item[T]).key()] = true //nolint:forcetypeassert // client-go has checked it
	}
	for key := range r.known {
		if !fresh[key] {
			r.remove(key)
		}
	}
	for _, object := range list {
		r.put(object.(*item[T])) //nolint:forcetypeassert // as above
	}
	r.listener.OnSync()
	return nil
}

// Resync has nothing to do: no period is set.
func (r *reflector[O, T]) Resync() error { return nil }
