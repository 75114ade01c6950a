// Package ztunnels tells the node's ztunnels which pods they serve (ZDS).
//
// It promises that each connected ztunnel converges to the wanted pods, whatever the order of events: the newest gets every pod, the
// others only deletions, and when the newest disconnects, the next gets the pods that it lacks. It promises that no caller and no connection
// waits for another ztunnel; that an answer is never taken for another request's; that a snapshot ends only after every wanted pod is
// named in it; and that a peer of root that breaks the protocol loses its connection, and costs a bounded amount of memory and time.
//
// It decides about no pod, opens no namespace and writes no rules.
//
// Start reading at Server. connection.go has one ztunnel: what it has, and the next request to it. serve.go has the sockets.
package ztunnels

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/utils/clock"

	"github.com/meshcni/istio-cni/internal/core/zds"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/zdsock"
)

// ErrNoZtunnel is the error of all pods while no ztunnel is connected.
var ErrNoZtunnel = errors.New("no ztunnel is connected to the node agent")

// Workload is a pod as ztunnel has to know it. UID is the pod's.
type Workload struct{ UID, Name, Namespace, ServiceAccount string }

// State is what the newest ztunnel has said about a pod.
type State struct {
	// Acked means that ztunnel has acknowledged the pod in its current namespace: its sockets are open there.
	Acked bool
	// Err is ErrNoZtunnel, or why ztunnel does not serve the pod, as one printable line. Then ztunnel tries again by itself, and does not
	// tell whether it succeeds: Retry asks.
	Err error
}

// Options configure a Server. Path, Log, Connected and Changed are required.
type Options struct {
	// Path is the path of the socket; 107 bytes at most. A missing directory is created.
	Path string
	Log  *slog.Logger
	// Connected gets the number of ztunnels that have said hello when it changes.
	Connected func(n int)
	// Changed is called when State or Removed of a pod may have changed otherwise than by the caller's own call. One goroutine calls both,
	// with no lock held, and once for several changes. The UID may be one that is not wanted any more.
	Changed func(uid string)
	// AcceptInterval is the least time between two accepted connections, 200 ms by default.
	AcceptInterval time.Duration
	// Clock defaults to the system's clock.
	Clock clock.WithDelayedExecution
}

// Server has the wanted pods and the connected ztunnels. Its methods never wait for a ztunnel.
type Server struct {
	o       Options
	work    sync.WaitGroup
	wake    chan struct{} // for notify
	refused rate.Sometimes

	mu       sync.Mutex
	listener zdsock.Listener
	ended    bool
	members  map[string]*member // by UID
	born     uint64             // number of members so far
	conns    []*conn            // open ones, in the order in which they were accepted
	changed  map[string]bool    // UIDs for notify
}

// member is a wanted pod.
type member struct {
	workload Workload
	age      uint64           // the lower, the older
	ns       *netns.Namespace // nil if it is not known
}

// inode returns the identity of the namespace, or the zero Inode.
func (m *member) inode() netns.Inode {
	if m.ns == nil {
		return netns.Inode{}
	}
	return m.ns.Inode()
}

// Open binds the socket. A ztunnel can connect from then on; Serve, which must follow, talks to it. The error is socketfile.ErrServed
// for a socket that another process serves.
func Open(ctx context.Context, o Options) (*Server, error) {
	o.AcceptInterval = cmp.Or(o.AcceptInterval, 200*time.Millisecond)
	o.Clock = cmp.Or[clock.WithDelayedExecution](o.Clock, clock.RealClock{})
	listener, err := zdsock.Listen(ctx, o.Path)
	if err != nil {
		return nil, err
	}
	return &Server{
		o: o, wake: make(chan struct{}, 1), refused: rate.Sometimes{Interval: logEach},
		listener: listener, members: map[string]*member{}, changed: map[string]bool{},
	}, nil
}

// Put wants a pod in a namespace, which stays open until Remove, Keep, or Put with another one has returned for the pod.
func (s *Server) Put(w Workload, ns *netns.Namespace) { s.want(w, ns) }

// Keep wants a pod whose namespace is not known. A ztunnel that serves the pod from an earlier time goes on.
func (s *Server) Keep(uid string) { s.want(Workload{UID: uid}, nil) }

func (s *Server) want(w Workload, ns *netns.Namespace) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.members[w.UID]
	if m == nil {
		s.born++
		m = &member{age: s.born}
		s.members[w.UID] = m
	}
	m.workload, m.ns = w, ns
	s.turn(w.UID)
}

// Remove no longer wants a pod.
func (s *Server) Remove(uid string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.members, uid)
	s.turn(uid)
}

// turn brings a changed pod to each ztunnel. It needs the lock.
func (s *Server) turn(uid string) {
	for _, c := range slices.Clone(s.conns) { // advance closes one that fails
		if c.hello {
			s.hurry(c, uid)
		}
	}
}

// State returns what the newest ztunnel has said about a pod.
func (s *Server) State(uid string) State {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.newest()
	if c == nil {
		return State{Err: ErrNoZtunnel}
	}
	if m, h := s.members[uid], c.has[uid]; m != nil && h != nil && h.inode == m.inode() {
		return State{Acked: h.acked, Err: h.err}
	}
	return State{}
}

// Removed reports whether no connected ztunnel has the pod. One that has not got the end of its snapshot may serve a pod of an
// earlier time until then.
func (s *Server) Removed(uid string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !slices.ContainsFunc(s.conns, func(c *conn) bool { return c.has[uid] != nil })
}

// Retry sends the Add of a pod again if the newest ztunnel has refused it.
func (s *Server) Retry(uid string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.newest()
	if c == nil {
		return
	}
	if h := c.has[uid]; h != nil && h.err != nil {
		h.inode, h.err = netns.Inode{}, nil
		s.hurry(c, uid)
	}
}

// newest returns the last accepted connection that has said hello, or nil. It needs the lock.
func (s *Server) newest() *conn {
	for _, c := range slices.Backward(s.conns) {
		if c.hello {
			return c
		}
	}
	return nil
}

// byAge returns the UIDs of all members, the oldest first. It needs the lock.
func (s *Server) byAge() []string {
	return slices.SortedFunc(maps.Keys(s.members), func(a, b string) int {
		return cmp.Compare(s.members[a].age, s.members[b].age)
	})
}

// request returns the next request about a pod that brings a connection closer to what is wanted, if any. It needs the lock.
func (s *Server) request(c *conn, uid string) (r zds.Request, descriptor int, needed bool) {
	m, h := s.members[uid], c.has[uid]
	r.UID, descriptor = uid, zdsock.NoDescriptor
	switch {
	case m == nil && h != nil && h.sent:
		r.Kind = zds.Del
	case m == nil:
		delete(c.has, uid)
		return r, descriptor, false
	case m.ns == nil:
		r.Kind = zds.Keep // only before the end of the snapshot: ztunnel ends otherwise
		return r, descriptor, h == nil && !c.complete
	case c.complete && c != s.newest(), h != nil && h.inode == m.inode():
		return r, descriptor, false
	default:
		r.Kind, descriptor = zds.Add, m.ns.FD()
		r.Workload = zds.Workload{Name: m.workload.Name, Namespace: m.workload.Namespace, ServiceAccount: m.workload.ServiceAccount}
	}
	return r, descriptor, true
}
