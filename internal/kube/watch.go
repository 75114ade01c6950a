package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
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
	"k8s.io/client-go/rest"
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
	var now ConfigMapState
	var reported *ConfigMapState
	report := func() {
		if state := now; reported == nil || state.Present != reported.Present || !maps.Equal(state.Data, reported.Data) {
			reported = &state
			listener.OnUpdate(state)
		}
	}
	reflect(ctx, c, collection{resource: configMaps(), namespace: namespace, fields: "metadata.name=" + name},
		func(m *corev1.ConfigMap) ConfigMapState { return ConfigMapState{Present: true, Data: m.Data} },
		Listener[ConfigMapState]{
			OnUpdate: func(m ConfigMapState) { now = m; report() }, OnDelete: func(ConfigMapState) { now = ConfigMapState{}; report() },
			OnSync: report, OnError: listener.OnError,
		})
}

// collection is the objects of one resource in one namespace (empty: in all) that selectors select.
type collection struct {
	resource       apiResource
	namespace      string
	labels, fields string
}

// item is a reduced object, in the form that client-go's reflector works with.
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

// reflect runs client-go's reflector on a collection until ctx ends. transform reduces an object before
// it is stored.
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
	page, err := r.page(ctx, r.call("list", r.limited(options)))
	for ClassOf(err) == TooLarge && r.maxPage > 1 {
		r.maxPage = max(r.maxPage/10, 1)
		page, err = r.page(ctx, r.call("list", r.limited(options)))
	}
	if err != nil {
		return nil, r.fails(ctx, err)
	}
	return page, nil
}

// limited asks for no larger pages than came through.
func (r *reflector[O, T]) limited(options metav1.ListOptions) metav1.ListOptions {
	if options.Limit == 0 && r.maxPage < pageSize || options.Limit > r.maxPage {
		options.Limit = r.maxPage
		if options.Continue == "" { // only a consistent read has pages
			options.ResourceVersion, options.ResourceVersionMatch = "", ""
		}
	}
	return options
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

// keep applies the transform: the decoded object does not outlive this call.
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

// watch opens a stream of events. It ends after Config.Timeout without an answer, or without the next part of an initial list, and
// later on after Config.IdleTimeout without an event. A stream that breaks just ends: the next watch begins after the last event.
func (r *reflector[O, T]) watch(parent context.Context, options metav1.ListOptions) (watch.Interface, error) {
	if err := r.pace.Wait(parent); err != nil {
		return nil, err
	}
	options.Watch = true
	streams := options.SendInitialEvents != nil
	var listing atomic.Bool // the stream is open, and its initial list has not been sent to its end
	ctx, cancel := context.WithCancelCause(parent)
	ctx, request, x, err := r.client.begin(ctx, r.call("watch", options))
	silence := time.AfterFunc(r.client.config.Timeout, func() {
		cancel(errSilent)
		if listing.Load() {
			_ = r.fails(parent, x.fail(Timeout, errSilent))
		}
	})
	x.heard = func() {
		limit := r.client.config.IdleTimeout
		if listing.Load() {
			limit = r.client.config.Timeout
		}
		silence.Reset(limit)
	}
	x.done = func() {
		silence.Stop()
		cancel(nil)
	}
	var events watch.Interface
	if err == nil {
		events, err = x.open(ctx, request)
	}
	if failed, ok := errors.AsType[*Error](err); ok {
		x.done()
		if failed.Class == Rejected && (failed.Status == http.StatusGone || streams) {
			return nil, err // the server has forgotten the version, or does not stream lists: client-go asks for a list
		}
		return nil, r.fails(parent, err)
	}
	listing.Store(streams)
	x.heard()
	if !streams {
		r.works()
	}
	return watch.Filter(events, func(event watch.Event) (watch.Event, bool) {
		if is, err := meta.Accessor(event.Object); err == nil && is.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true" {
			listing.Store(false)
			x.heard()
		}
		return r.reduce(parent, x, event), true
	}), nil
}

// open sends the request of a watch.
func (x *exchange) open(ctx context.Context, request *rest.Request) (watch.Interface, error) {
	events, err := request.Watch(ctx)
	if err = errors.Join(x.unsent, err); err != nil { // client-go takes a connection that was reset for an empty watch
		return nil, x.failure(ctx, err)
	}
	return events, nil
}

// reduce gives an event with its object reduced. An event that cannot be decoded becomes an ERROR, after which client-go lists
// anew. An ERROR is reported unless the server has forgotten the version where the watch began.
func (r *reflector[O, T]) reduce(ctx context.Context, x *exchange, event watch.Event) watch.Event {
	var err error
	x.left.Store(x.limit)
	switch event.Type { //nolint:exhaustive // the others have an object of the collection
	case watch.Error:
		verdict, ok := event.Object.(*metav1.Status)
		if !ok {
			err = errors.New("the watch ended with something else than a Status")
			break
		}
		failed := x.refused(*verdict)
		if apierrors.HasStatusCause(failed, decodingCause) {
			failed.Class = Undecodable
			if strings.Contains(failed.Message, streaming.ErrObjectTooLarge.Error()) {
				failed.Class = TooLarge // the list has the object
			}
		}
		err = failed
	case watch.Bookmark:
		var is metav1.Object
		if is, err = meta.Accessor(event.Object); err == nil {
			event.Object = &item[T]{ObjectMeta: metav1.ObjectMeta{ResourceVersion: is.GetResourceVersion(), Annotations: is.GetAnnotations()}}
		}
	default:
		event.Object, err = r.keep(event.Object)
	}
	if err == nil {
		r.works()
		return event
	}
	if ClassOf(err) == "" {
		err = x.fail(Undecodable, err)
	}
	if !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
		_ = r.fails(ctx, err)
	}
	status := apierrors.NewInternalError(err)
	if answer, ok := errors.AsType[*apierrors.StatusError](err); ok {
		status = answer
	}
	return watch.Event{Type: watch.Error, Object: &status.ErrStatus}
}

// decodingCause is client-go's cause of an event that it cannot decode.
const decodingCause = "ClientWatchDecoding"

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

// Replace makes a list the content of the store.
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
