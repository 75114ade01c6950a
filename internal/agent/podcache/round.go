package podcache

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/kube"
)

// round is one run of the watches with the same selectors. Others begin a new round because the cache has only the labels that the
// selectors name.
type round struct {
	// selectors are nil while ambient mode is off. Then namespaces are not watched.
	selectors *selector.Ambient
	end       context.CancelFunc
	// namespaces has the labels of all namespaces.
	namespaces map[string]map[string]string
	// waiting has the pods whose namespace is not known yet: the watches of pods and namespaces have no common order. unseen has the pods of
	// the last round that the watch has not delivered in this one.
	waiting map[types.NamespacedName]kube.Pod
	unseen  map[types.NamespacedName]bool
	// listed and labelled report that the lists of pods and of namespaces are complete. due is set from a list of pods until the listeners
	// are notified that it is complete; synced is set once they were.
	listed, labelled, due, synced bool
	// podsErr and namespacesErr are the errors of the watches, nil while they work.
	podsErr, namespacesErr error
}

func (r *round) err() error { return cmp.Or(r.podsErr, r.namespacesErr) }

// selected evaluates Selected. It returns false while the labels of the pod's namespace are unknown. last is the pod as the listeners know
// it: a pod whose namespace has vanished is about to vanish, too, and stays as it was.
func (r *round) selected(p *kube.Pod, last kube.Pod) bool {
	if r.selectors == nil || !p.Facts.Eligible() {
		return true
	}
	labels, known := r.namespaces[p.Facts.Namespace]
	switch {
	case known:
		p.Facts.Selected = r.selectors.Select(p.Facts.Labels, labels)
	case r.labelled && last.Facts.UID == p.Facts.UID:
		p.Facts.Selected = last.Facts.Selected
	case r.labelled && p.Facts.Annotations[ambient.RedirectionKey] == ambient.RedirectionEnabled: // by the agent before this one
		p.Facts.Selected = true
	default:
		return false
	}
	return true
}

// begin replaces the round. end ends the watches of the new one.
func (s *Store) begin(end context.CancelFunc) *round {
	s.mu.Lock()
	defer s.mu.Unlock()
	failing := s.round.err()
	s.round = &round{
		selectors: s.options.Ambient(), end: end, namespaces: map[string]map[string]string{}, waiting: map[types.NamespacedName]kube.Pod{},
		unseen: map[types.NamespacedName]bool{},
	}
	for key := range s.pods {
		s.round.unseen[key] = true
	}
	if failing != nil { // the new watches report their own errors
		s.notify(func(l *kube.Listener[kube.Pod]) { l.OnError(nil) })
	}
	return s.round
}

// Reselect takes over changed selectors. Both lists are read again. Until then listeners have the selection as it was, and Facts and Pod
// do not return it.
func (s *Store) Reselect() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.round.end()
}

// Run watches the pods, and the namespaces in ambient mode, until ctx ends.
func (s *Store) Run(ctx context.Context) {
	for ctx.Err() == nil {
		s.watch(ctx)
	}
}

// watch is one round.
func (s *Store) watch(ctx context.Context) {
	ctx, end := context.WithCancel(ctx)
	defer end()
	r, keep := s.begin(end), slices.Concat(s.options.Keep, []string{ambient.RedirectionKey})
	var watches sync.WaitGroup
	if r.selectors != nil {
		pods, namespaces := r.selectors.Keys()
		keep = append(keep, append(pods, ambient.ZtunnelLabel)...)
		watches.Go(func() {
			s.options.API.WatchNamespaces(ctx, namespaces, kube.Listener[kube.Namespace]{
				OnUpdate: s.putNamespace, OnDelete: s.removeNamespace, OnSync: s.syncNamespaces,
				OnError: s.failure(ctx, &r.namespacesErr, "namespaces", "pods wait for theirs, and the plugin requests them from the API server itself"),
			})
		})
	}
	s.options.API.WatchPods(ctx, kube.PodScope{Node: s.options.Node, Transform: Trim(keep, s.options.KeepMessage)}, kube.Listener[kube.Pod]{
		OnUpdate: s.put, OnDelete: s.remove, OnSync: func() { s.sync(ctx) },
		OnError: s.failure(ctx, &r.podsErr, "the node's pods", "the plugin requests pods from the API server itself, and no pod is repaired"),
	})
	watches.Wait()
	<-ctx.Done() // for a node's name that cannot be watched
}

// put takes a pod of the watch.
func (s *Store) put(p kube.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key, event := p.Key(), metrics.PodUpdated
	last, known := s.pods[key]
	if _, waits := s.round.waiting[key]; !known && !waits {
		event = metrics.PodAdded
	}
	s.options.Count(event)
	delete(s.round.unseen, key)
	if known && last.Facts.UID != p.Facts.UID { // between two rounds
		s.forget(last)
	}
	s.settlePod(p)
	s.settle()
}

// settlePod notifies the listeners of a pod, or makes it wait for its namespace.
func (s *Store) settlePod(p kube.Pod) {
	key := p.Key()
	if !s.round.selected(&p, s.pods[key]) {
		s.round.waiting[key] = p
		return
	}
	delete(s.round.waiting, key)
	s.pods[key] = p
	s.notify(func(l *kube.Listener[kube.Pod]) { l.OnUpdate(p) })
	close(s.changed)
	s.changed = make(chan struct{})
}

// remove takes the end of a pod from the watch, whether or not its namespace is known.
func (s *Store) remove(p kube.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.options.Count(metrics.PodDeleted)
	delete(s.round.waiting, p.Key())
	delete(s.round.unseen, p.Key())
	s.forget(p)
	s.settle()
}

// forget notifies the listeners of the deletion of a pod that they know.
func (s *Store) forget(p kube.Pod) {
	if last, known := s.pods[p.Key()]; known {
		p.Facts.Selected = last.Facts.Selected
		delete(s.pods, p.Key())
		s.notify(func(l *kube.Listener[kube.Pod]) { l.OnDelete(p) })
	}
}

// sync takes the end of a list of pods.
func (s *Store) sync(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key := range s.round.unseen {
		s.options.Count(metrics.PodDeleted)
		s.forget(s.pods[key])
	}
	clear(s.round.unseen)
	if !s.round.listed {
		s.options.Log.InfoContext(ctx, "the node's pods are synced", slog.Int("pods", len(s.pods)+len(s.round.waiting)))
	}
	s.round.listed, s.round.due = true, true
	s.settle()
}

// settle calls OnSync once both lists are complete. A new pod whose namespace is not known even then comes
// with its namespace; it must not hold the others.
func (s *Store) settle() {
	r := s.round
	if r.due && (r.labelled || r.selectors == nil) {
		r.due, r.synced = false, true
		s.notify(func(l *kube.Listener[kube.Pod]) { l.OnSync() })
	}
}

func (s *Store) putNamespace(n kube.Namespace) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if last, known := s.round.namespaces[n.Name]; known && maps.Equal(last, n.Labels) {
		return
	}
	s.round.namespaces[n.Name] = n.Labels
	for key, p := range s.pods {
		again := p
		_, waits := s.round.waiting[key]
		if key.Namespace == n.Name && !waits && !s.round.unseen[key] && s.round.selected(&again, p) && again.Facts.Selected != p.Facts.Selected {
			s.settlePod(again)
		}
	}
	s.settleWaiting(n.Name)
}

// settleWaiting settles the waiting pods of a namespace, or of all.
func (s *Store) settleWaiting(namespace string) {
	for key, p := range s.round.waiting {
		if key.Namespace == cmp.Or(namespace, key.Namespace) {
			s.settlePod(p)
		}
	}
	s.settle()
}

// removeNamespace keeps what is known of its pods, see round.selected.
func (s *Store) removeNamespace(n kube.Namespace) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.round.namespaces, n.Name)
}

func (s *Store) syncNamespaces() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.round.labelled = true
	s.settleWaiting("")
}

// failure takes the errors of a watch. is has the last one, effect describes what follows.
func (s *Store) failure(ctx context.Context, is *error, of, effect string) func(error) {
	return func(err error) {
		if err == nil {
			s.options.Log.InfoContext(ctx, "a watch works again", slog.String("of", of))
		} else {
			s.options.Log.WarnContext(ctx, "a watch fails", slog.String("of", of), slog.String("effect", effect), slog.String("error", err.Error()))
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		*is = err
		s.notify(func(l *kube.Listener[kube.Pod]) { l.OnError(s.round.err()) })
	}
}

// current returns the cached pod with the namespace and name of ref, unless its selection is in doubt.
func (s *Store) current(ref kube.PodRef) (kube.Pod, bool) {
	key := types.NamespacedName{Namespace: ref.Namespace, Name: ref.Name}
	p, found := s.pods[key]
	_, waits := s.round.waiting[key]
	return p, found && !waits && !s.round.unseen[key]
}
