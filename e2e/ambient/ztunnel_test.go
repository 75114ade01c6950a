package ambient

import (
	"encoding/binary"
	"net"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// ztunnel is a stand-in for ztunnel at the agent's socket: it acknowledges all and reconnects, but serves no traffic.
type ztunnel struct {
	path string

	mu       sync.Mutex
	pods     map[string]bool
	snapshot bool
	changed  time.Time     // the last Add or snapshot
	news     chan struct{} // holds one after a change
}

// Messages of the protocol in protobuf: the hello with version 1, and the acknowledgement without an error.
func hello() []byte { return []byte{0x08, 0x01} }
func ack() []byte   { return []byte{0x0a, 0x00} }

// Field numbers of WorkloadRequest.
const (
	fieldAdd      = 1
	fieldDel      = 2
	fieldSnapshot = 3
)

// run connects again and again until the test ends.
func (z *ztunnel) run(ended <-chan struct{}) {
	const pause = 20 * time.Millisecond
	for {
		if conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: z.path, Net: "unixpacket"}); err == nil {
			go func() {
				<-ended
				_ = conn.Close()
			}()
			z.serve(conn)
			_ = conn.Close()
		}
		select {
		case <-ended:
			return
		case <-time.After(pause):
		}
	}
}

// serve answers the requests of a connection until it ends.
func (z *ztunnel) serve(conn *net.UnixConn) {
	if _, err := conn.Write(hello()); err != nil {
		return
	}
	const largest = 1024
	packet, control := make([]byte, largest), make([]byte, unix.CmsgSpace(4))
	for {
		size, rights, _, _, err := conn.ReadMsgUnix(packet, control)
		if err != nil || size == 0 {
			return
		}
		closeFiles(control[:rights])
		z.apply(packet[:size], rights > 0)
		if _, err = conn.Write(ack()); err != nil {
			return
		}
	}
}

// closeFiles closes the files that came with a request.
func closeFiles(control []byte) {
	messages, _ := unix.ParseSocketControlMessage(control)
	for i := range messages {
		files, _ := unix.ParseUnixRights(&messages[i])
		for _, file := range files {
			_ = unix.Close(file)
		}
	}
}

func (z *ztunnel) apply(request []byte, withFile bool) {
	z.mu.Lock()
	defer z.mu.Unlock()
	field, body := next(request)
	_, uid := next(body) // the first field of Add, and the only one of Del
	switch {
	case field == fieldAdd && withFile:
		z.pods[string(uid)] = true
	case field == fieldDel:
		delete(z.pods, string(uid))
	case field == fieldSnapshot:
		z.snapshot = true
	}
	z.changed = time.Now()
	announce(z.news)
}

// announce fills a channel for one value.
func announce(news chan<- struct{}) {
	select {
	case news <- struct{}{}:
	default:
	}
}

// next returns the number and the content of the first field, which has a length.
func next(message []byte) (field uint64, content []byte) {
	tag, n := binary.Uvarint(message)
	if n <= 0 {
		return 0, nil
	}
	length, m := binary.Uvarint(message[n:])
	if m <= 0 || length > uint64(len(message)-n-m) {
		return 0, nil
	}
	return tag >> 3, message[n+m:][:length]
}

// forget forgets all, as if ztunnel were new.
func (z *ztunnel) forget() {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.pods, z.snapshot = map[string]bool{}, false
}

// has reports whether a snapshot is complete and has all pods, with their namespaces, and since when.
func (z *ztunnel) has(want []string) (bool, time.Time) {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.snapshot && !slices.ContainsFunc(want, func(uid string) bool { return !z.pods[uid] }), z.changed
}
