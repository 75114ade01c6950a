// Package podcache caches the pods of the node, and answers the plugin's requests for them, so that a pod's start needs no
// request to the API server and no credential on the node.
//
// It promises that an answer is about the requested pod, by its UID; that a pod which the watch has not delivered is fetched
// once, however many plugins request it; and that only the fields that decisions need are kept. If the cache cannot answer with
// certainty it returns an error, and the plugin requests the pod from the API server.
//
// Start reading at Store. trim.go selects the kept fields, serve.go has the socket's answers.
package podcache

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
)

// Options are the dependencies of a Store. All but Count, Keep and KeepMessage are required.
type Options struct {
	API *kube.Client
	// Node is the name of the node whose pods are cached.
	Node string
	Log  *slog.Logger
	// Count counts the events of the watch.
	Count func(metrics.PodEvent)
	// Keep and KeepMessage are the arguments of [Trim].
	Keep        []string
	KeepMessage string
}

// Store caches the pods of the node.
type Store struct {
	options Options

	mu     sync.Mutex
	pods   map[types.NamespacedName]kube.Pod
	synced bool
	// watchErr is the error of the watch, nil while the watch works.
	watchErr error
	// listeners are called under mu, so that each sees the changes in order.
	listeners map[*kube.Listener[kube.Pod]]struct{}
	fetches   map[kube.PodRef]*fetch
}

// NewStore returns an empty store.
func NewStore(o Options) *Store {
	if o.Count == nil {
		o.Count = func(metrics.PodEvent) {}
	}
	return &Store{
		options: o, pods: map[types.NamespacedName]kube.Pod{}, listeners: map[*kube.Listener[kube.Pod]]struct{}{},
		fetches: map[kube.PodRef]*fetch{},
	}
}

// Run watches the pods until ctx ends.
func (s *Store) Run(ctx context.Context) {
	scope := kube.PodScope{Node: s.options.Node, Transform: Trim(s.options.Keep, s.options.KeepMessage)}
	s.options.API.WatchPods(ctx, scope, kube.Listener[kube.Pod]{
		OnUpdate: func(p kube.Pod) {
			s.change(func() {
				event := metrics.PodAdded
				if _, known := s.pods[p.Key()]; known {
					event = metrics.PodUpdated
				}
				s.pods[p.Key()] = p
				s.options.Count(event)
			}, func(l *kube.Listener[kube.Pod]) { l.OnUpdate(p) })
		},
		OnDelete: func(p kube.Pod) {
			s.options.Count(metrics.PodDeleted)
			s.change(func() { delete(s.pods, p.Key()) }, func(l *kube.Listener[kube.Pod]) { l.OnDelete(p) })
		},
		OnSync: func() {
			s.change(func() {
				if !s.synced {
					s.options.Log.InfoContext(ctx, "the node's pods are synced", slog.Int("pods", len(s.pods)))
				}
				s.synced = true
			}, func(l *kube.Listener[kube.Pod]) { l.OnSync() })
		},
		OnError: func(err error) {
			if err == nil {
				s.options.Log.InfoContext(ctx, "the watch of the node's pods works again")
			} else {
				s.options.Log.WarnContext(ctx, "the watch of the node's pods fails: the plugin requests pods from the API server itself, and no pod is repaired",
					slog.String("error", err.Error()))
			}
			s.change(func() { s.watchErr = err }, func(l *kube.Listener[kube.Pod]) { l.OnError(err) })
		},
	})
}

// change applies a change and notifies the listeners.
func (s *Store) change(apply func(), notify func(*kube.Listener[kube.Pod])) {
	s.mu.Lock()
	defer s.mu.Unlock()
	apply()
	for l := range s.listeners {
		notify(l)
	}
}

// Follow notifies a listener of the cached pods and of all changes, until ctx ends. The listener must not call the store.
func (s *Store) Follow(ctx context.Context, l kube.Listener[kube.Pod]) {
	s.mu.Lock()
	for _, p := range s.pods {
		l.OnUpdate(p)
	}
	if s.synced {
		l.OnSync()
	}
	if s.watchErr != nil {
		l.OnError(s.watchErr)
	}
	s.listeners[&l] = struct{}{}
	s.mu.Unlock()
	<-ctx.Done()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.listeners, &l)
}

// fetchTimeout bounds a request on behalf of plugins, which wait no longer.
const fetchTimeout = 2 * time.Second

// fetch is one request to the API server that plugins wait for.
type fetch struct {
	done  chan struct{}
	facts sidecar.Facts
	err   error
}

// errNoUID is the error for a request without a UID, which any pod with the name would match.
var errNoUID = errors.New("the runtime did not pass the pod's UID")

// Facts returns the facts of a pod. It fetches a pod that the watch has not delivered, or has delivered with another UID.
func (s *Store) Facts(ctx context.Context, key kube.PodRef) (sidecar.Facts, error) {
	if key.UID == "" {
		return sidecar.Facts{}, errNoUID
	}
	s.mu.Lock()
	if p, found := s.pods[types.NamespacedName{Namespace: key.Namespace, Name: key.Name}]; found && p.Is(key.UID) {
		s.mu.Unlock()
		return p.Facts, nil
	}
	f, fetching := s.fetches[key]
	if !fetching {
		f = &fetch{done: make(chan struct{})}
		s.fetches[key] = f
		go s.fetch(context.WithoutCancel(ctx), key, f)
	}
	s.mu.Unlock()
	select {
	case <-f.done:
		return f.facts, f.err
	case <-ctx.Done():
		return sidecar.Facts{}, ctx.Err()
	}
}

func (s *Store) fetch(ctx context.Context, key kube.PodRef, f *fetch) {
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	pod, err := s.options.API.Pod(ctx, key)
	f.facts, f.err = pod.Facts.Trim(), err
	s.mu.Lock()
	delete(s.fetches, key)
	s.mu.Unlock()
	close(f.done)
}
