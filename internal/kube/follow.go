package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// Pace is how a watch is kept up. Zero fields take the defaults.
type Pace struct {
	// First is the pause before a watch that ended is opened again, 1 s by default. It doubles up to Max, 30 s by default,
	// while nothing comes of it. Pauses are shortened at random by up to a half, so that the nodes of a cluster do not
	// come in step after the API server was away.
	First, Max time.Duration
	// Watch is the time after which the server ends a watch by itself, up to twice that at random; 5 min by default.
	Watch time.Duration
	// Idle is for how long a watch may be silent before its server counts as hanging; 150 s by default. The API server
	// sends a bookmark each minute.
	Idle time.Duration
}

func (p Pace) withDefaults() Pace {
	for _, setting := range []struct {
		is *time.Duration
		by time.Duration
	}{{&p.First, time.Second}, {&p.Max, 30 * time.Second}, {&p.Watch, 5 * time.Minute}, {&p.Idle, 150 * time.Second}} {
		if *setting.is <= 0 {
			*setting.is = setting.by
		}
	}
	p.Max = max(p.Max, p.First)
	return p
}

// collection is what a follower follows: the objects of one resource in one namespace (empty: in all) that a selection
// picks (fieldSelector, labelSelector).
type collection struct {
	resource  apiResource
	namespace string
	selection url.Values
}

// objectKey names an object within a collection.
type objectKey struct{ namespace, name string }

// changes is what becomes of a collection. All functions are called from one goroutine, one after the other, and none
// may be nil.
type changes[T any] struct {
	// set is told of an object that is new or has changed.
	set func(objectKey, T)
	// gone is told of an object that is no more, as it was known last. One that was deleted and created anew under its
	// name while nobody looked is gone before it is set.
	gone func(objectKey, T)
	// listed is told after set and gone have told all that a list says: what they told is the whole of it then.
	listed func()
	// trouble is told once when following has begun to fail, once more when it fails in another way, and nil when it
	// goes well again. A watch that ends and can be opened again is no trouble.
	trouble func(error)
}

// follow keeps the collection in sight until ctx ends: it lists, then watches from there, and lists again only when the
// server no longer knows that point. decode reduces an object to what is kept of it.
func follow[T any](ctx context.Context, a *API, from collection, decode func([]byte) (T, error), tell changes[T]) {
	f := follower[T]{
		api: a, from: from, decode: decode, tell: tell, known: map[objectKey]seen[T]{}, backoff: a.access.Pace.First,
	}
	for {
		err := f.round(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			f.fails(err)
		}
		if !sleep(ctx, f.pause(err)) {
			return
		}
	}
}

type follower[T any] struct {
	api    *API
	from   collection
	decode func([]byte) (T, error)
	tell   changes[T]

	known   map[objectKey]seen[T]
	version string // where to watch from; empty when a list is due
	backoff time.Duration
	fruit   bool // whether the last watch was of use
	failing Class
}

type seen[T any] struct {
	uid, version string
	object       T
}

// round is one list, if that is due, and one watch. No error means that the watch was opened and has ended.
func (f *follower[T]) round(ctx context.Context) error {
	f.fruit = false
	if f.version == "" {
		if err := f.list(ctx); err != nil {
			return err
		}
	}
	return f.watch(ctx)
}

// fails tells of a trouble that is new.
func (f *follower[T]) fails(err error) {
	if class := ClassOf(err); class != f.failing {
		f.failing = class
		f.tell.trouble(err)
	}
}

func (f *follower[T]) works() {
	if f.failing != "" {
		f.failing = ""
		f.tell.trouble(nil)
	}
}

// pause is the time until the next round.
func (f *follower[T]) pause(err error) time.Duration {
	if f.fruit {
		f.backoff = f.api.access.Pace.First
	}
	wait := f.backoff/2 + rand.N(f.backoff/2+1) //nolint:gosec // spreading load needs no secrecy
	f.backoff = min(2*f.backoff, f.api.access.Pace.Max)
	if failed, ok := errors.AsType[*CallError](err); ok {
		wait += min(failed.RetryAfter, maxRetryAfter)
	}
	return wait
}

// maxRetryAfter is for how long a server can make us wait.
const maxRetryAfter = 5 * time.Minute

func (f *follower[T]) call(verb string, more url.Values) *call {
	query := url.Values{}
	maps.Copy(query, f.from.selection)
	maps.Copy(query, more)
	return &call{verb: verb, resource: f.from.resource, namespace: f.from.namespace, query: query}
}

// wireList is one page of a list. Its items have neither kind nor apiVersion.
type wireList struct {
	Kind     string            `json:"kind"`
	Metadata wireListMeta      `json:"metadata"`
	Items    []json.RawMessage `json:"items"`
}

type wireListMeta struct {
	ResourceVersion string `json:"resourceVersion"`
	Continue        string `json:"continue"`
}

// list asks for all there is, page by page, and tells what is new about it. It says nothing before it has the whole.
func (f *follower[T]) list(ctx context.Context) error {
	fresh := map[objectKey]seen[T]{}
	query := url.Values{"limit": {"500"}}
	for {
		at, err := f.page(ctx, query, fresh)
		if err != nil {
			return err
		}
		if at.Continue == "" {
			f.works()
			f.replace(fresh)
			f.version = at.ResourceVersion
			return nil
		}
		query.Set("continue", at.Continue)
	}
}

// page asks for one page and adds its objects.
func (f *follower[T]) page(ctx context.Context, query url.Values, to map[objectKey]seen[T]) (wireListMeta, error) {
	c := f.call("list", query)
	body, err := f.api.send(ctx, c)
	if err != nil {
		return wireListMeta{}, err
	}
	var page wireList
	if err := json.Unmarshal(body, &page); err != nil {
		return wireListMeta{}, f.misunderstood(c, err)
	}
	if page.Kind != f.from.resource.kind+"List" || page.Metadata.ResourceVersion == "" {
		return wireListMeta{}, f.misunderstood(c, fmt.Errorf("not a list of %s: kind %q, resourceVersion %q",
			f.from.resource.plural, page.Kind, page.Metadata.ResourceVersion))
	}
	for _, item := range page.Items {
		key, one, err := f.read(item)
		if err != nil {
			return wireListMeta{}, f.misunderstood(c, err)
		}
		to[key] = one
	}
	return page.Metadata, nil
}

func (f *follower[T]) misunderstood(c *call, err error) *CallError {
	return f.api.failed(c, "", &failure{class: Undecodable, status: http.StatusOK, err: err})
}

func (f *follower[T]) read(item []byte) (objectKey, seen[T], error) {
	var head wireObject
	if err := json.Unmarshal(item, &head); err != nil {
		return objectKey{}, seen[T]{}, err
	}
	if head.Metadata.Name == "" || head.Metadata.ResourceVersion == "" {
		return objectKey{}, seen[T]{}, errors.New("an object without name or resourceVersion")
	}
	object, err := f.decode(item)
	key := objectKey{head.Metadata.Namespace, head.Metadata.Name}
	return key, seen[T]{uid: head.Metadata.UID, version: head.Metadata.ResourceVersion, object: object}, err
}

// replace makes a list the whole of what is known.
func (f *follower[T]) replace(fresh map[objectKey]seen[T]) {
	for key := range f.known {
		if _, found := fresh[key]; !found {
			f.remove(key)
		}
	}
	for key, one := range fresh {
		f.put(key, one)
	}
	f.tell.listed()
}

func (f *follower[T]) put(key objectKey, one seen[T]) {
	was, found := f.known[key]
	if found && was.uid == one.uid && was.version == one.version {
		return
	}
	if found && was.uid != one.uid {
		f.remove(key)
	}
	f.known[key] = one
	f.tell.set(key, one.object)
}

func (f *follower[T]) remove(key objectKey) {
	if was, found := f.known[key]; found {
		delete(f.known, key)
		f.tell.gone(key, was.object)
	}
}

// errSilent is the cause of a watch that was given up.
var errSilent = errors.New("the watch was silent for too long")

// watch follows until the stream ends. An error is one that a stream could not be opened for, or that the server put
// into it.
func (f *follower[T]) watch(parent context.Context) error {
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(nil)
	// A server that hangs before it answers is given up as soon as with any request, later on after the time of silence.
	silence := time.AfterFunc(f.api.access.Attempt, func() { cancel(errSilent) })
	defer silence.Stop()
	// A watch that stayed open for as long as the longest pause was of use even if nothing happened in it.
	lasting := time.NewTimer(f.api.access.Pace.Max)
	defer lasting.Stop()

	span := f.api.access.Pace.Watch
	span += rand.N(span) //nolint:gosec // spreading load needs no secrecy
	c := f.call("watch", url.Values{
		"watch": {"true"}, "allowWatchBookmarks": {"true"}, "resourceVersion": {f.version},
		"timeoutSeconds": {strconv.Itoa(max(1, int(span.Seconds())))},
	})
	response, _, err := f.api.connect(ctx, c)
	if err != nil {
		return f.unopened(ctx, c, err)
	}
	defer response.Body.Close() //nolint:errcheck // only read from
	f.works()
	err = f.stream(c, response.Body, func() { silence.Reset(f.api.access.Pace.Idle) })
	select {
	case <-lasting.C:
		f.fruit = true
	default:
	}
	return err
}

// unopened judges a watch that was refused.
func (f *follower[T]) unopened(ctx context.Context, c *call, err error) error {
	failed, ok := errors.AsType[*CallError](err)
	if !ok {
		return err
	}
	if failed.Class == Rejected {
		// The point to watch from may be what the server dislikes; 410 says so clearly.
		f.version = ""
		if failed.Status == http.StatusGone {
			return nil
		}
	}
	if errors.Is(context.Cause(ctx), errSilent) {
		return f.api.failed(c, failed.Proxy, &failure{class: Timeout, err: errSilent})
	}
	return err
}

// wireWatch is one event of a watch (k8s.io/apimachinery/pkg/apis/meta/v1.WatchEvent).
type wireWatch struct {
	Type   string          `json:"type"`
	Object json.RawMessage `json:"object"`
}

// maxWatchEvent bounds an event, which has one object.
const maxWatchEvent = 8 << 20

// stream takes in events until the stream ends, breaks or makes no sense, which is all the same: the next watch begins
// after the last event that was understood. heard is called at the beginning and after each event.
func (f *follower[T]) stream(c *call, body io.Reader, heard func()) error {
	limited := &io.LimitedReader{R: body}
	events := json.NewDecoder(limited)
	for {
		heard()
		limited.N = maxWatchEvent
		var event wireWatch
		if err := events.Decode(&event); err != nil {
			return nil //nolint:nilerr // see above
		}
		if event.Type == "ERROR" {
			return f.complaint(c, event.Object)
		}
		if err := f.take(event); err != nil {
			// What it was is not known, so what there is now must be asked for.
			f.version = ""
			return f.misunderstood(c, err)
		}
		f.fruit = true
	}
}

// complaint is how a server ends a watch that it cannot go on with.
func (f *follower[T]) complaint(c *call, object []byte) error {
	f.version = ""
	var verdict wireStatus
	if err := json.Unmarshal(object, &verdict); err != nil {
		return f.misunderstood(c, err)
	}
	if verdict.Code == http.StatusGone || verdict.Reason == "Expired" || verdict.Reason == "Gone" {
		return nil
	}
	failed := failure{class: classOf(verdict.Code), status: verdict.Code, message: clean(verdict.Message)}
	return f.api.failed(c, "", &failed)
}

func (f *follower[T]) take(event wireWatch) error {
	if event.Type == "BOOKMARK" {
		var head wireObject
		if err := json.Unmarshal(event.Object, &head); err != nil {
			return err
		}
		if head.Metadata.ResourceVersion != "" {
			f.version = head.Metadata.ResourceVersion
		}
		return nil
	}
	key, one, err := f.read(event.Object)
	if err != nil {
		return err
	}
	switch event.Type {
	case "ADDED", "MODIFIED":
		f.put(key, one)
	case "DELETED":
		f.remove(key)
	default:
		return fmt.Errorf("a watch event of type %q", clean(event.Type))
	}
	f.version = one.version
	return nil
}
