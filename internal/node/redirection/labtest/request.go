package labtest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// timeout is how long an actor waits for an answer. An answer or a refusal ends the wait. A busy machine can
// pause for three seconds.
const timeout = 15 * time.Second

// Protocol is the protocol of a request.
type Protocol string

// The protocols.
const (
	TCP Protocol = "tcp"
	UDP Protocol = "udp"
	// Ping is an ICMPv6 echo request.
	Ping Protocol = "ping"
	// Stray is a TCP segment that belongs to no connection: SYN and ACK at once. Connection tracking
	// classifies it as invalid; a host answers it with a reset, reported as "refused".
	Stray Protocol = "stray"
)

// Request is a packet or a connection. The answer has the name of the listener and the destination that the listener reads.
type Request struct {
	From Actor
	Via  Protocol
	To   netip.AddrPort
	// Source and SourcePort are the source; the kernel replaces zero values.
	Source     netip.Addr
	SourcePort uint16
	// Mark is for a foreign source address: it makes the socket transparent, and marks its packets.
	Mark uint32
	// Through makes proxies pass the request on and add its answer to their own.
	Through bool
}

// String is for messages.
func (a Request) String() string {
	s := fmt.Sprintf("%s: %s to %s", a.From, a.Via, a.To)
	if a.Source.IsValid() {
		s += " from source " + a.Source.String()
	}
	if a.SourcePort != 0 {
		s += fmt.Sprintf(" from port %d", a.SourcePort)
	}
	if a.Through {
		s += ", passed through"
	}
	return s
}

// Hop is one answer: the name of the listener, and the addresses of the connection there.
type Hop struct {
	By string
	// Dst is the destination: the original one for a proxy, its own address for a server. A proxy cannot read
	// the original destination of a datagram, and omits it.
	Dst netip.AddrPort
	// From is the source address.
	From netip.AddrPort
}

// String is for messages.
func (h Hop) String() string {
	s := h.By
	if h.Dst.IsValid() {
		s += " orig=" + h.Dst.String()
	}
	if h.From.IsValid() {
		s += " from=" + h.From.String()
	}
	return s
}

// Answer has the listeners that the request reached, in order, and an error or nil.
type Answer struct {
	Hops []Hop
	// Own is the source address of the request.
	Own netip.AddrPort
	Err error
}

// The expected ends of a request without an answer. ErrForbidden is the error from the sender's own kernel for a packet that
// it drops.
var (
	ErrRefused   = errors.New("refused")
	ErrSilent    = errors.New("no answer")
	ErrForbidden = errors.New("dropped by the sender")
)

// String formats the answer on one line.
func (a Answer) String() string {
	var parts []string
	for _, h := range a.Hops {
		parts = append(parts, h.String())
	}
	if a.Err != nil {
		parts = append(parts, a.Err.Error())
	}
	return strings.Join(parts, ", then ")
}

// message is the answer in its network format.
type message struct {
	Hops  []Hop
	Error string
}

// text returns the answer in the format in which a proxy passes it on.
func (a Answer) text() string {
	m := message{Hops: a.Hops}
	if a.Err != nil {
		m.Error = a.Err.Error()
	}
	text, _ := json.Marshal(m) // addresses and text cannot fail
	return string(text)
}

// The requests.
const (
	requestName    = "name"
	requestThrough = "through"
)

// Send sends the request and waits for the answer.
func (a Request) Send(ctx context.Context) Answer {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var answer Answer
	switch a.Via {
	case Ping:
		answer.Err = a.ping(ctx)
		if answer.Err == nil {
			answer.Hops = []Hop{{By: "echo"}}
		}
	case Stray:
		answer.Err = a.stray(ctx)
	case TCP, UDP:
		answer = a.talk(ctx)
	default:
		answer.Err = fmt.Errorf("unknown protocol %q", a.Via)
	}
	answer.Err = plain(answer.Err)
	return answer
}

// network returns package net's name of the protocol.
func (a Request) network() string {
	if a.To.Addr().Is6() {
		return string(a.Via) + "6"
	}
	return string(a.Via) + "4"
}

func (a Request) talk(ctx context.Context) Answer {
	conn, err := a.dial(ctx)
	if err != nil {
		return Answer{Err: err}
	}
	defer func() { _ = conn.Close() }()
	answer := Answer{Own: addrPort(conn.LocalAddr())}
	text, err := a.exchange(ctx, conn)
	if err != nil {
		answer.Err = err
		return answer
	}
	var got message
	if err := json.Unmarshal([]byte(text), &got); err != nil {
		answer.Err = fmt.Errorf("reading the answer %q: %w", text, err)
		return answer
	}
	if answer.Hops = got.Hops; got.Error != "" {
		answer.Err = errors.New(got.Error)
	}
	return answer
}

// dial opens the socket on a thread of the actor. net.Dialer opens it in the calling goroutine if there is only one
// address; Multipath TCP is off because it hides the socket from the owner match.
func (a Request) dial(ctx context.Context) (net.Conn, error) {
	d := net.Dialer{Control: socketOptions{transparent: a.Mark != 0, mark: cmp.Or(a.Mark, a.From.Mark)}.control}
	d.SetMultipathTCP(false)
	// An invalid address means any.
	source := netip.AddrPortFrom(a.Source, a.SourcePort)
	d.LocalAddr = net.TCPAddrFromAddrPort(source)
	if a.Via == UDP {
		d.LocalAddr = net.UDPAddrFromAddrPort(source)
	}
	return open(a.From, func() (net.Conn, error) {
		for {
			conn, err := d.DialContext(ctx, a.network(), a.To.String())
			// A process that is being started keeps the last closed socket open until its exec.
			taken := a.SourcePort != 0 && errors.Is(err, syscall.EADDRINUSE)
			// A new IPv6 address is usable only shortly after the kernel has acknowledged it (addrconf_dad_work
			// in net/ipv6/addrconf.c runs in a work queue, also without duplicate address detection).
			early := a.Source.Is6() && errors.Is(err, syscall.EADDRNOTAVAIL)
			if !taken && !early || ctx.Err() != nil {
				return conn, err
			}
			runtime.Gosched()
		}
	})
}

// exchange sends the request and reads the answer: to the end of the stream, or one datagram.
func (a Request) exchange(ctx context.Context, conn net.Conn) (string, error) {
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			return "", err
		}
	}
	request := requestName
	if a.Through {
		request = requestThrough
	}
	if _, err := io.WriteString(conn, request+"\n"); err != nil {
		return "", err
	}
	if a.Via == TCP {
		text, err := io.ReadAll(conn)
		return string(text), err
	}
	buf := make([]byte, 1<<12)
	n, err := conn.Read(buf)
	return string(buf[:n]), err
}

// plain turns the usual errors into their sentinels.
func plain(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, syscall.ECONNREFUSED):
		return ErrRefused
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return ErrSilent
	case errors.Is(err, syscall.EPERM):
		return ErrForbidden
	}
	return err
}

// addrPort returns the address of a TCP or UDP socket as a value.
func addrPort(a net.Addr) netip.AddrPort {
	ap, _ := netip.ParseAddrPort(a.String())
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}
