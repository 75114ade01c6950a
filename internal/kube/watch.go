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
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// Listener has callbacks for a collection of objects. The reflector calls them one at a time and waits for them. No callback
// may be nil or change its arguments.
type Listener[T any] struct {
	// OnUpdate receives a new or changed object, OnDelete the last known state of a deleted object. If an object was deleted
	// and recreated under its name between two events, the reflector calls OnDelete before OnUpdate.
	OnUpdate, OnDelete func(T)
	// OnSync is called after a list: OnUpdate has then received all present objects.
	OnSync func()
	// OnError receives the error of a failing watch: once at the first failure, again when the class of the failure changes,
	// and nil when the watch works again. The end of a watch that can be opened again is not a failure.
	OnError func(error)
}

// PodScope selects pods. The API server sends no other pods.
type PodScope struct {
	// Namespace is empty for all namespaces.
	Namespace string
	// Node selects the pods of one node; empty selects the pods of all nodes and unscheduled pods.
	Node string
	// LabelSelector and FieldSelector have kubectl's syntax, empty for no restriction.
	LabelSelector, FieldSelector string
	// Transform, unless nil, drops the fields that the caller does not need before the reflector stores a pod.
	Transform func(*Pod)
}

// fields returns the field selector of a scope. It omits an empty Node: "spec.nodeName=" would select unscheduled pods.
func (s PodScope) fields() string {
	if s.Node == "" {
		return s.FieldSelector
	}
	return strings.TrimPrefix(s.FieldSelector+",spec.nodeName="+s.Node, ",")
}

// WatchPods runs a reflector of the pods of a scope until ctx ends. If the node name is invalid, it reports that to OnError and
// returns at once.
func (c *Client) WatchPods(ctx context.Context, scope PodScope, listener Listener[Pod]) {
	if scope.Node != "" && !validName(scope.Node) {
		listener.OnError(c.invalid(&call{verb: "watch", resource: pods(), name: scope.Node}, errors.New("it is not the name of a node")))
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

// WatchNodes runs a reflector of all nodes until ctx ends. condition is the type of the condition to keep, or empty.
func (c *Client) WatchNodes(ctx context.Context, condition string, listener Listener[NodeState]) {
	reflect(ctx, c, collection{resource: nodes()}, func(n *corev1.Node) NodeState { return nodeOf(n, condition) }, listener)
}

// WatchNamespaces runs a reflector of all namespaces until ctx ends. It keeps the labels with the keys alone: a cluster can have
// thousands of namespaces.
func (c *Client) WatchNamespaces(ctx context.Context, keys []string, listener Listener[Namespace]) {
	reflect(ctx, c, collection{resource: namespaces()}, func(n *corev1.Namespace) Namespace {
		kept := Namespace{Name: n.Name}
		for _, key := range keys {
			if value, has := n.Labels[key]; has {
				if kept.Labels == nil {
					kept.Labels = map[string]string{}
				}
				kept.Labels[key] = value
			}
		}
		return kept
	}, listener)
}

// WatchConfigMap runs a reflector of one ConfigMap until ctx ends. It lists and watches only this object, so a Role with
// resourceNames suffices. onUpdate receives the data after the first list and after each change, nil only while the ConfigMap
// does not exist, and must not change the map. onError is the OnError of a [Listener]. If the namespace or name is invalid,
// WatchConfigMap reports that to onError and returns at once.
func (c *Client) WatchConfigMap(
	ctx context.Context, namespace, name string, onUpdate func(data map[string]string), onError func(error),
) {
	if !validName(namespace) || !validName(name) {
		onError(c.invalid(&call{verb: "watch", resource: configMaps(), namespace: namespace, name: name}, errNoSegment))
		return
	}
	var last map[string]string
	reported := false
	report := func(data map[string]string) {
		if !reported || (data == nil) != (last == nil) || !maps.Equal(data, last) {
			last, reported = data, true
			onUpdate(data)
		}
	}
	textOf := func(m *corev1.ConfigMap) map[string]string {
		if m.Data == nil {
			return map[string]string{}
		}
		return m.Data
	}
	reflect(ctx, c, collection{resource: configMaps(), namespace: namespace, fields: "metadata.name=" + name}, textOf,
		Listener[map[string]string]{
			OnUpdate: report, OnDelete: func(map[string]string) { report(nil) }, OnSync: func() { report(last) }, OnError: onError,
		})
}

// collection selects objects of one resource by selectors, in one namespace or, if that is empty, in all.
type collection struct {
	resource       apiResource
	namespace      string
	labels, fields string
}

// item is a reduced object in the form that client-go's reflector needs.
type item[T any] struct {
	metav1.PartialObjectMetadata

	kept T
}

func (i *item[T]) key() types.NamespacedName {
	return types.NamespacedName{Namespace: i.Namespace, Name: i.Name}
}

const (
	// burst is the number of lists and watches without a pause, interval the pause between later ones. client-go reopens a
	// watch that ended properly without a pause.
	burst    = 10
	interval = 3 * time.Second
	// pageSize is the number of objects in a page of a list that does not come from the API server's watch cache.
	pageSize = 500
	// maxListed bounds the objects of a list: twice the number of pods that a cluster can have.
	maxListed = 300_000
	// maxRetryAfter bounds the Retry-After of a server.
	maxRetryAfter = 5 * time.Minute
)

// reflect runs client-go's reflector on a collection until ctx ends. transform reduces an object before it is stored.
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
	r.ended = true // a stream that still runs must not call the listener
	r.mu.Unlock()
}

// reflector implements the list and watch functions and the store of client-go's reflector.
type reflector[O metav1.Object, T any] struct {
	client    *Client
	of        collection
	transform func(O) T
	listener  Listener[T]
	pace      *rate.Limiter

	// mu is held during calls of the listener because client-go reads a stream in a separate goroutine.
	mu      sync.Mutex
	ended   bool
	known   map[types.NamespacedName]*item[T]
	failing Class

	// maxPage bounds the objects in a page of a list, listed counts the objects of the list so far.
	maxPage int64
	listed  int
}

// delay reports an error if its class differs from the last one, and returns it after the server's Retry-After so that client-go
// does not retry earlier.
func (r *reflector[O, T]) delay(ctx context.Context, err error) error {
	failed, ok := errors.AsType[*Error](err)
	if !ok || ctx.Err() != nil {
		return err
	}
	r.state(failed.Class, err)
	sleep(ctx, RetryAfter(err))
	return err
}

// state reports a change of the watch's failure class.
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

// list returns one page. client-go lists only if the API server does not stream the list (sendInitialEvents), and then from the
// server's watch cache. If a page is too large, list requests smaller pages.
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
		return nil, r.delay(ctx, err)
	}
	return page, nil
}

// limited limits a page to the largest size that succeeded. Pages smaller than pageSize do not come from the watch cache.
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
	// Count an empty page, which is a server error, as a full one, so that the list ends.
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
	kept := &item[T]{kept: r.transform(is)}
	kept.Namespace, kept.Name, kept.UID, kept.ResourceVersion = is.GetNamespace(), is.GetName(), is.GetUID(), is.GetResourceVersion()
	return kept, nil
}

// errSilent is the cause of canceling a watch without events.
var errSilent = errors.New("the watch was silent for too long")

// watch opens a stream of events. It ends after Config.Timeout without a response or the next part of an initial list, and later
// after Config.IdleTimeout without an event. A broken stream ends without an error: the next watch begins after the last event.
func (r *reflector[O, T]) watch(parent context.Context, options metav1.ListOptions) (watch.Interface, error) {
	if err := r.pace.Wait(parent); err != nil {
		return nil, err
	}
	options.Watch = true
	streams := options.SendInitialEvents != nil
	var listing atomic.Bool // the initial list is incomplete
	listing.Store(streams)
	ctx, cancel := context.WithCancelCause(parent)
	ctx, request, x, err := r.client.begin(ctx, r.call("watch", options))
	silence := time.AfterFunc(r.client.config.Timeout, func() { cancel(errSilent) })
	limits := map[bool]time.Duration{true: r.client.config.Timeout, false: r.client.config.IdleTimeout}
	x.received = func() { silence.Reset(limits[listing.Load()]) }
	x.done = func() {
		silence.Stop()
		if errors.Is(context.Cause(ctx), errSilent) && listing.Load() {
			_ = r.delay(parent, x.fail(Timeout, errSilent)) // before client-go learns of the end and lists again
		}
		cancel(nil)
	}
	var events watch.Interface
	if err == nil {
		events, err = request.Watch(ctx)
		if err = errors.Join(x.unsent, err); err != nil { // client-go returns an empty watch for a reset connection
			err = x.failure(ctx, err)
		}
	}
	if failed, ok := errors.AsType[*Error](err); ok {
		listing.Store(false) // the error below is reported instead
		x.done()
		if failed.Class == Rejected && (failed.Status == http.StatusGone || streams) {
			return nil, err // the version has expired, or the server does not stream lists: client-go lists
		}
		return nil, r.delay(parent, err)
	}
	x.received()
	if !streams {
		r.works()
	}
	return watch.Filter(events, func(event watch.Event) (watch.Event, bool) {
		if endsList(event) {
			listing.Store(false)
			x.received()
		}
		return r.reduce(parent, x, event), true
	}), nil
}

// endsList reports whether an event is the bookmark at the end of an initial list.
func endsList(event watch.Event) bool {
	is, err := meta.Accessor(event.Object)
	return err == nil && is.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true"
}

// reduce returns an event with a reduced object. An event that cannot be decoded becomes an ERROR, after which client-go lists
// again. reduce reports an ERROR unless it means that the resourceVersion of the watch has expired.
func (r *reflector[O, T]) reduce(ctx context.Context, x *exchange, event watch.Event) watch.Event {
	var err error
	x.left.Store(x.limit)
	switch event.Type { //nolint:exhaustive // the others have an object of the collection
	case watch.Error:
		verdict, ok := event.Object.(*metav1.Status)
		if !ok {
			err = errors.New("the watch ended with an object other than a Status")
			break
		}
		failed := x.refused(*verdict)
		if apierrors.HasStatusCause(failed, decodingCause) {
			failed.Class = Undecodable
			if strings.Contains(failed.Message, streaming.ErrObjectTooLarge.Error()) {
				failed.Class = TooLarge // the following list has the object
			}
		}
		err = failed
	case watch.Bookmark:
		var is metav1.Object
		if is, err = meta.Accessor(event.Object); err == nil {
			bookmark := &item[T]{}
			bookmark.ResourceVersion, bookmark.Annotations = is.GetResourceVersion(), is.GetAnnotations()
			event.Object = bookmark
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
		_ = r.delay(ctx, err)
	}
	status := apierrors.NewInternalError(err)
	if answer, ok := errors.AsType[*apierrors.StatusError](err); ok {
		status = answer
	}
	return watch.Event{Type: watch.Error, Object: &status.ErrStatus}
}

// decodingCause is client-go's cause for an event that it cannot decode.
const decodingCause = "ClientWatchDecoding"

// Add and the next four methods implement the store of client-go's reflector.
func (r *reflector[O, T]) Add(object any) error { return r.Update(object) }

// Update stores a new or changed object.
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

// Replace replaces the content of the store with a list.
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

// Resync does nothing because the reflector has no resync period.
func (r *reflector[O, T]) Resync() error { return nil }
