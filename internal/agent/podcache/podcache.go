// Package podcache caches the pods of the node, and answers the plugin's requests for them, so that a pod's start needs no
// request to the API server and no credential on the node. In ambient mode it also decides which pods the enablement selectors select.
//
// It promises that an answer is about the requested pod, by its UID; that a pod which the watch has not delivered is fetched
// once, however many plugins request it; that listeners never get a pod whose selection is not known, and get each deletion; and that
// only the fields that decisions need are kept. If the cache cannot answer with certainty it returns an error, and the plugin requests
// the pod from the API server.
//
// Start reading at Store. round.go has the watches and the selection, trim.go the kept fields, serve.go the socket's answers.
package podcache

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
)

// Options are the dependencies of a Store. All but Keep and KeepMessage are required.
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
	// Ambient returns the enablement selectors, nil while ambient mode is off. See [Store.Reselect]. It must not call the store.
	Ambient func() *selector.Ambient
}

// Store caches the pods of the node.
type Store struct {
	options Options

	mu sync.Mutex
	// pods are those that the listeners know.
	pods map[types.NamespacedName]kube.Pod
	// round is the current run of the watches.
	round *round
	// changed is closed at the next change of pods.
	changed chan struct{}
	// listeners are called under mu, so that each sees the changes in order.
	listeners map[*kube.Listener[kube.Pod]]struct{}
	fetches   map[kube.PodRef]*fetch
}

// NewStore returns an empty store.
func NewStore(o Options) *Store {
	s := &Store{
		options: o, pods: map[types.NamespacedName]kube.Pod{}, listeners: map[*kube.Listener[kube.Pod]]struct{}{},
		fetches: map[kube.PodRef]*fetch{}, changed: make(chan struct{}), round: &round{},
	}
	s.begin(func() {})
	return s
}

// notify calls each listener. It needs the lock, as do all methods in lower case without an own lock.
func (s *Store) notify(of func(*kube.Listener[kube.Pod])) {
	for l := range s.listeners {
		of(l)
	}
}

// Follow notifies a listener of the cached pods and of all changes, until ctx ends. The listener must not call the store.
func (s *Store) Follow(ctx context.Context, l kube.Listener[kube.Pod]) {
	s.mu.Lock()
	for _, p := range s.pods {
		l.OnUpdate(p)
	}
	if s.round.synced {
		l.OnSync()
	}
	if err := s.round.err(); err != nil {
		l.OnError(err)
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

var (
	// errNoUID is the error for a request without a UID, which any pod with the name would match.
	errNoUID = errors.New("the runtime did not pass the pod's UID")
	// errNoAmbient is the error for a plugin with another configuration.
	errNoAmbient = errors.New("ambient mode is not enabled in the node agent")
	errDeleting  = errors.New("the pod is being deleted")
)

// Facts returns the facts of a pod, with [sidecar.Facts.Selected] if ambient is set. It fetches a pod that the watch has not delivered,
// or has delivered with another UID, with its namespace in ambient mode.
func (s *Store) Facts(ctx context.Context, key kube.PodRef, ambient bool) (sidecar.Facts, error) {
	if key.UID == "" {
		return sidecar.Facts{}, errNoUID
	}
	s.mu.Lock()
	if ambient && s.round.selectors == nil {
		s.mu.Unlock()
		return sidecar.Facts{}, errNoAmbient
	}
	if p, found := s.current(key); found && p.Is(key.UID) {
		s.mu.Unlock()
		return p.Facts, nil
	}
	f, fetching := s.fetches[key]
	if !fetching {
		f = &fetch{done: make(chan struct{})}
		s.fetches[key] = f
		go s.fetch(context.WithoutCancel(ctx), key, f, s.round.selectors)
	}
	s.mu.Unlock()
	select {
	case <-f.done:
		return f.facts, f.err
	case <-ctx.Done():
		return sidecar.Facts{}, ctx.Err()
	}
}

func (s *Store) fetch(ctx context.Context, key kube.PodRef, f *fetch, by *selector.Ambient) {
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	var selects func(pod, namespace map[string]string) bool
	if by != nil {
		selects = by.Select
	}
	pod, err := s.options.API.PodSelected(ctx, key, selects)
	f.facts, f.err = pod.Facts.Trim(), err
	s.mu.Lock()
	delete(s.fetches, key)
	s.mu.Unlock()
	close(f.done)
}

// Pod returns the pod with a UID once all listeners have been told of it. Without a UID it is the present pod of the name, by a request
// to the API server. It waits until ctx ends for the watch to deliver the pod. A pod that does not exist, has another UID or is being
// deleted is an error.
func (s *Store) Pod(ctx context.Context, ref kube.PodRef) (kube.Pod, error) {
	s.mu.Lock()
	p, found := s.current(ref)
	s.mu.Unlock()
	var err error
	if !found || ref.UID == "" || !p.Is(ref.UID) {
		if p, err = s.options.API.Pod(ctx, ref); err != nil {
			return kube.Pod{}, err
		}
		ref.UID = p.Facts.UID
	}
	if !p.Deleting {
		p, err = s.delivered(ctx, ref)
	}
	if err == nil && p.Deleting {
		err = fmt.Errorf("pod %s: %w", p.Key(), errDeleting)
	}
	return p, err
}

// delivered waits until the listeners know the pod with a UID.
func (s *Store) delivered(ctx context.Context, ref kube.PodRef) (kube.Pod, error) {
	for {
		s.mu.Lock()
		p, found := s.current(ref)
		changed, failing := s.changed, s.round.err()
		s.mu.Unlock()
		if found && p.Is(ref.UID) {
			return p, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			err := ctx.Err()
			if failing != nil {
				err = fmt.Errorf("%w: %w", err, failing)
			}
			return kube.Pod{}, fmt.Errorf("waiting for the watch of the node's pods to deliver %s/%s: %w", ref.Namespace, ref.Name, err)
		}
	}
}
