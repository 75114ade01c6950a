package serve

import (
	"net"
	"sync"
)

// maxConnections is how many connections a port has at a time. Whoever reaches the port can open them, and each costs the
// agent a file descriptor that it may need for the node. The others wait in the kernel.
const maxConnections = 128

// limited is a listener with places; a connection takes one until it is closed.
type limited struct {
	net.Listener

	places chan struct{}
}

func (l limited) Accept() (net.Conn, error) {
	l.places <- struct{}{}
	conn, err := l.Listener.Accept()
	if err != nil {
		<-l.places
		return nil, err
	}
	return &placed{Conn: conn, leave: sync.OnceFunc(func() { <-l.places })}, nil
}

type placed struct {
	net.Conn

	leave func()
}

func (p *placed) Close() error {
	defer p.leave()
	return p.Conn.Close()
}
