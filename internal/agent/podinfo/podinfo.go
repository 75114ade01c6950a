// Package podinfo keeps the pods of the node in sight and tells the plugin about them, so that a pod's start needs no
// request of its own and no credential on the node.
//
// It promises that an answer is about the very pod that was asked for, by its UID; that a pod which is not in sight is
// asked for once, however many want to know; and that of each pod only what decides is kept. It never answers for a pod
// that it is not sure of: then the plugin asks the API server itself.
//
// Start reading at Store. serve.go has the socket's answers, ring.go what plugins reported.
package podinfo

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
)

// Options are what a Store works with; all are required but Keep.
type Options struct {
	API *kube.Client
	// Node is the one whose pods are kept.
	Node string
	Log  *slog.Logger
	// Keep gives keys of annotations and labels that are kept besides those that decide about redirection.
	Keep []string
	// KeepMessage is a termination message that is looked for; all others are dropped.
	KeepMessage string
}

// Store has the pods of the node.
type Store struct {
	options Options

	mu        sync.Mutex
	pods      map[types.NamespacedName]kube.Pod
	synced    bool
	trouble   error // nil while the pods are followed
	listeners map[*listener]struct{}
	asked     map[kube.PodKey]*question
}

// NewStore returns a store that knows nothing yet.
func NewStore(o Options) *Store {
	return &Store{
		options: o, pods: map[types.NamespacedName]kube.Pod{}, listeners: map[*listener]struct{}{}, asked: map[kube.PodKey]*question{},
	}
}

// Run keeps the pods in sight until ctx ends.
func (s *Store) Run(ctx context.Context) {
	s.options.API.WatchPods(ctx, kube.PodScope{Node: s.options.Node, Transform: s.transform}, kube.Listener[kube.Pod]{
		OnUpdate: s.update, OnDelete: s.remove, OnSync: s.sync,
		OnError: func(err error) {
			if err == nil {
				s.options.Log.InfoContext(ctx, "the node's pods are in sight again")
			} else {
				s.options.Log.WarnContext(ctx, "the node's pods are out of sight: the plugin asks the API server itself, and none is repaired",
					slog.String("error", err.Error()))
			}
			s.each(func() { s.trouble = err }, func(l kube.Listener[kube.Pod]) { l.OnError(err) })
		},
	})
}

// transform drops what nobody asks for.
func (s *Store) transform(p *kube.Pod) {
	p.Facts = p.Facts.Trim(s.options.Keep...)
	for _, statuses := range [][]repair.Container{p.Init, p.Containers} {
		for i := range statuses {
			for _, state := range []*repair.State{&statuses[i].State, &statuses[i].Last} {
				state.Message = s.message(state.Message)
			}
		}
	}
}

// message drops what a container left as its last words, of which there may be 4 KiB, unless somebody looks for it.
func (s *Store) message(text string) string {
	if text = strings.TrimSpace(text); text != "" && text == strings.TrimSpace(s.options.KeepMessage) {
		return text
	}
	return ""
}

func (s *Store) update(p kube.Pod) {
	s.each(func() { s.pods[p.Key()] = p }, func(l kube.Listener[kube.Pod]) { l.OnUpdate(p) })
}

func (s *Store) remove(p kube.Pod) {
	s.each(func() { delete(s.pods, p.Key()) }, func(l kube.Listener[kube.Pod]) { l.OnDelete(p) })
}

func (s *Store) sync() {
	s.each(func() {
		if !s.synced {
			s.options.Log.Info("the node's pods are in sight", slog.Int("pods", len(s.pods)))
		}
		s.synced = true
	}, func(l kube.Listener[kube.Pod]) { l.OnSync() })
}

// listener is told one thing after the other, whoever tells.
type listener struct {
	mu   sync.Mutex
	tell kube.Listener[kube.Pod]
}

// each notes what has changed, and tells those who follow at that moment: one who comes later is told what was noted.
func (s *Store) each(note func(), tell func(kube.Listener[kube.Pod])) {
	s.mu.Lock()
	note()
	all := make([]*listener, 0, len(s.listeners))
	for l := range s.listeners {
		all = append(all, l)
	}
	s.mu.Unlock()
	for _, l := range all {
		l.mu.Lock()
		tell(l.tell)
		l.mu.Unlock()
	}
}

// Follow tells of the pods as they are and as they change, until ctx ends.
func (s *Store) Follow(ctx context.Context, tell kube.Listener[kube.Pod]) {
	l := &listener{tell: tell}
	l.mu.Lock() // what comes meanwhile waits for what was there before
	s.mu.Lock()
	pods := make([]kube.Pod, 0, len(s.pods))
	for _, p := range s.pods {
		pods = append(pods, p)
	}
	synced, trouble := s.synced, s.trouble
	s.listeners[l] = struct{}{}
	s.mu.Unlock()
	for _, p := range pods {
		tell.OnUpdate(p)
	}
	if synced {
		tell.OnSync()
	}
	if trouble != nil {
		tell.OnError(trouble)
	}
	l.mu.Unlock()
	<-ctx.Done()
	s.mu.Lock()
	delete(s.listeners, l)
	s.mu.Unlock()
	l.mu.Lock()   // nothing is told any more
	l.mu.Unlock() //nolint:staticcheck // see above
}

// fetching bounds the question that is asked for a plugin, which does not wait for longer itself.
const fetching = 2 * time.Second

// question is one to the API server that somebody waits for.
type question struct {
	done  chan struct{}
	facts sidecar.Facts
	err   error
}

// errNoUID is a pod that could be any of its name.
var errNoUID = errors.New("the runtime did not say which pod of the name it means")

// Facts gives what decides about a pod. One that is not in sight, or another one of the name is, is asked for once.
func (s *Store) Facts(ctx context.Context, key kube.PodKey) (sidecar.Facts, error) {
	if key.UID == "" {
		return sidecar.Facts{}, errNoUID
	}
	s.mu.Lock()
	if p, found := s.pods[types.NamespacedName{Namespace: key.Namespace, Name: key.Name}]; found && p.Is(key.UID) {
		s.mu.Unlock()
		return p.Facts, nil
	}
	q, asked := s.asked[key]
	if !asked {
		q = &question{done: make(chan struct{})}
		s.asked[key] = q
		go s.ask(context.WithoutCancel(ctx), key, q)
	}
	s.mu.Unlock()
	select {
	case <-q.done:
		return q.facts, q.err
	case <-ctx.Done():
		return sidecar.Facts{}, ctx.Err()
	}
}

func (s *Store) ask(ctx context.Context, key kube.PodKey, q *question) {
	ctx, cancel := context.WithTimeout(ctx, fetching)
	defer cancel()
	pod, err := s.options.API.Pod(ctx, key)
	q.facts, q.err = pod.Facts.Trim(), err
	s.mu.Lock()
	delete(s.asked, key)
	s.mu.Unlock()
	close(q.done)
}

// Pods are the names of the pods in sight, for tests and people.
func (s *Store) Pods() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []string
	for n := range s.pods {
		all = append(all, n.String())
	}
	slices.Sort(all)
	return all
}
