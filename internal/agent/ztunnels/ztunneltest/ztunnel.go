// Package ztunneltest has a ztunnel for tests: the other side of ZDS, with or without ztunnel's sockets in the pods.
//
// It promises to behave as the real one does by default, and to break any rule of the protocol that a test asks it to break. It records
// what the agent does wrong: a descriptor that is missing or too many, Keep or the end of the snapshot after the end of the snapshot,
// a request before the previous one's answer. It holds no namespace open unless it binds sockets.
//
// Start reading at Start.
package ztunneltest

import (
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/zds"
	"github.com/meshcni/istio-cni/internal/core/zds/zdstest"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/zdsock"
)

// Request is a message of the agent. Inode is the namespace of its descriptor, or zero.
type Request struct {
	zds.Request

	Inode netns.Inode
	ns    *netns.Namespace // nil without a descriptor
}

// String returns a short text for comparisons: the kind and the UID.
func (r Request) String() string { return fmt.Sprintf("%s %s", r.Kind, r.UID) }

// Options configure a Ztunnel.
type Options struct {
	// Answer answers a request with the methods of the Ztunnel, or does not; nil: Ztunnel.Serve. Nothing is read meanwhile.
	Answer func(z *Ztunnel, r Request)
	// Mute says no hello.
	Mute bool
	// Reconnect connects again when the agent closes the connection, with the pods that it has.
	Reconnect bool
	// Bind opens ztunnel's sockets in the pods. Handle, which may be nil, gets the connections that they accept, and closes them.
	Bind   bool
	Handle Handler
}

// Ztunnel is a ztunnel. Its methods may be called by any goroutine.
type Ztunnel struct {
	o    Options
	path string
	done chan struct{} // closed when it has ended

	mu       sync.Mutex
	conn     *zdsock.Conn // nil before the first connection
	closed   bool
	complete bool // the current connection's snapshot
	owes     int  // answers
	requests []Request
	faults   []string
	named    map[string]bool   // in the current snapshot
	pods     map[string]*proxy // what it serves
}

// Start connects to the agent's socket, and goes on until the test ends. Then the test fails if the agent has broken the protocol.
func Start(tb testing.TB, path string, o Options) *Ztunnel {
	tb.Helper()
	z := New(path, o)
	tb.Cleanup(func() {
		z.Close()
		for _, fault := range z.Faults() {
			tb.Errorf("the agent breaks the protocol: %s", fault)
		}
	})
	return z
}

// New is Start without a test. The caller closes it.
func New(path string, o Options) *Ztunnel {
	if o.Answer == nil {
		o.Answer = (*Ztunnel).Serve
	}
	z := &Ztunnel{o: o, path: path, done: make(chan struct{}), pods: map[string]*proxy{}}
	go z.run()
	return z
}

// Close ends it: its connection and its sockets are closed.
func (z *Ztunnel) Close() {
	z.mu.Lock()
	z.closed = true
	if z.conn != nil {
		_ = z.conn.Close()
	}
	z.mu.Unlock()
	<-z.done
}

// Disconnect closes the connection alone.
func (z *Ztunnel) Disconnect() {
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.conn != nil {
		_ = z.conn.Close()
	}
}

// Ended reports whether the connection is closed and no other one follows.
func (z *Ztunnel) Ended() bool {
	select {
	case <-z.done:
		return true
	default:
		return false
	}
}

// Behave changes what it does from the next request on.
func (z *Ztunnel) Behave(answer func(z *Ztunnel, r Request)) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.o.Answer = answer
}

// Hello says hello.
func (z *Ztunnel) Hello() {
	_ = z.Say(zdstest.Hello()) // the agent may have closed the connection
}

// Ack answers a request, with the text of an error or "".
func (z *Ztunnel) Ack(text string) {
	z.mu.Lock()
	z.owes--
	z.mu.Unlock()
	_ = z.Say(zdstest.Ack(text)) // the agent may have closed the connection
}

// Say sends any packet, with any descriptors.
func (z *Ztunnel) Say(packet []byte, descriptors ...int) error {
	z.mu.Lock()
	conn := z.conn
	z.mu.Unlock()
	var rights []byte
	if len(descriptors) > 0 {
		rights = unix.UnixRights(descriptors...)
	}
	if conn == nil {
		return net.ErrClosed
	}
	_, _, err := conn.WriteMsgUnix(packet, rights, nil)
	return err
}

// Requests returns what the agent has sent so far, over all connections.
func (z *Ztunnel) Requests() []Request {
	z.mu.Lock()
	defer z.mu.Unlock()
	return slices.Clone(z.requests)
}

// Faults returns what the agent has done wrong.
func (z *Ztunnel) Faults() []string {
	z.mu.Lock()
	defer z.mu.Unlock()
	return slices.Clone(z.faults)
}

// Pods returns the pods that it serves, with their namespaces.
func (z *Ztunnel) Pods() map[string]netns.Inode {
	z.mu.Lock()
	defer z.mu.Unlock()
	pods := map[string]netns.Inode{}
	for uid, p := range z.pods {
		pods[uid] = p.inode
	}
	return pods
}

// Ready reports whether the snapshot of its connection is complete.
func (z *Ztunnel) Ready() bool {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.complete
}

// Serve is the default Answer: it does what the request says, and acknowledges it.
func (z *Ztunnel) Serve(r Request) { z.Ack(z.Do(r)) }

// Do does what a request says, and returns the text of the error. Only an Answer calls it.
func (z *Ztunnel) Do(r Request) (text string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	switch r.Kind {
	case zds.Add:
		return z.add(r)
	case zds.Del:
		z.stop(r.UID)
	case zds.SnapshotSent:
		for _, uid := range slices.Collect(maps.Keys(z.pods)) {
			if !z.named[uid] {
				z.stop(uid)
			}
		}
	case zds.Keep:
	}
	return ""
}

// run connects and reads until the end.
func (z *Ztunnel) run() {
	defer close(z.done)
	for {
		conn, err := zdsock.Dial(z.path)
		if z.connected(conn) {
			if !z.o.Mute {
				z.Hello()
			}
			z.read(conn)
		}
		z.mu.Lock()
		again := !z.closed && (z.o.Reconnect || err != nil)
		if !again {
			for uid := range z.pods {
				z.stop(uid)
			}
		}
		z.mu.Unlock()
		if !again {
			return
		}
		time.Sleep(10 * time.Millisecond) //nolint:forbidigo // as ztunnel does, which begins with 20 ms
	}
}

// connected begins a connection, unless it is nil.
func (z *Ztunnel) connected(conn *zdsock.Conn) bool {
	z.mu.Lock()
	defer z.mu.Unlock()
	if conn == nil {
		return false
	}
	if z.closed {
		_ = conn.Close()
		return false
	}
	z.conn, z.complete, z.owes, z.named = conn, false, 0, map[string]bool{}
	return true
}

func (z *Ztunnel) read(conn *zdsock.Conn) {
	defer conn.Close() //nolint:errcheck // nothing to lose
	var buffer [zdsock.MaxPacket]byte
	for {
		packet, descriptor, err := conn.Receive(&buffer)
		if err != nil {
			return
		}
		r, err := open(packet, descriptor)
		z.mu.Lock()
		z.check(r, err)
		answer := z.o.Answer
		z.mu.Unlock()
		answer(z, r)
		if r.ns != nil {
			r.ns.Close()
		}
	}
}

// check records a request and what is wrong with it. It needs the lock.
func (z *Ztunnel) check(r Request, err error) {
	fault := func(format string, args ...any) {
		z.faults = append(z.faults, fmt.Sprintf("request %d (%s): ", len(z.requests), r)+fmt.Sprintf(format, args...))
	}
	if err != nil {
		fault("%v", err)
	}
	if z.owes++; z.owes > 1 {
		fault("the previous one is not answered yet")
	}
	if got := r.Inode != (netns.Inode{}); got != (r.Kind == zds.Add) {
		fault("with a descriptor: %t", got)
	}
	if z.complete && (r.Kind == zds.Keep || r.Kind == zds.SnapshotSent) {
		fault("after the end of the snapshot")
	}
	z.requests = append(z.requests, r)
	z.complete = z.complete || r.Kind == zds.SnapshotSent
	z.named[r.UID] = r.Kind == zds.Add || r.Kind == zds.Keep
}

// open decodes a packet.
func open(packet []byte, descriptor int) (r Request, err error) {
	defer zdsock.CloseDescriptor(descriptor)
	if r.Request, err = zdstest.DecodeRequest(packet); err != nil || descriptor == zdsock.NoDescriptor {
		return r, err
	}
	if r.ns, err = netns.Open(fmt.Sprintf("/proc/self/fd/%d", descriptor)); err == nil {
		r.Inode = r.ns.Inode()
	}
	return r, err
}
