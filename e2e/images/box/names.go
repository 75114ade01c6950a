package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// stubAnswer is the A record of every name.
var stubAnswer = netip.MustParseAddr("240.240.0.1")

// serveDNS answers DNS queries at the proxy's DNS port over UDP and TCP.
func serveDNS(failed chan<- error) error {
	for _, host := range []string{"127.0.0.1", "::1"} {
		address := netip.AddrPortFrom(netip.MustParseAddr(host), dnsPort).String()
		packets, err := (&net.ListenConfig{}).ListenPacket(context.Background(), "udp", address)
		if err != nil && host == "::1" {
			return nil // a pod without IPv6
		}
		if err != nil {
			return err
		}
		listener, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", address)
		if err != nil {
			return err
		}
		go func() { failed <- serveDNSUDP(packets) }()
		go func() { failed <- serveDNSTCP(listener) }()
	}
	return nil
}

const longestMessage = 4096

func serveDNSUDP(packets net.PacketConn) error {
	buffer := make([]byte, longestMessage)
	for {
		n, peer, err := packets.ReadFrom(buffer)
		if err != nil {
			return err
		}
		if reply, err := answer(buffer[:n]); err == nil {
			_, _ = packets.WriteTo(reply, peer)
		}
	}
}

func serveDNSTCP(listener net.Listener) error {
	for {
		connection, err := listener.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer connection.Close() //nolint:errcheck // the reply was written
			_ = connection.SetDeadline(time.Now().Add(timeout))
			head := make([]byte, 2)
			if _, err := io.ReadFull(connection, head); err != nil {
				return
			}
			question := make([]byte, int(head[0])<<8|int(head[1]))
			if _, err := io.ReadFull(connection, question); err != nil {
				return
			}
			if reply, err := answer(question); err == nil {
				_, _ = connection.Write(append([]byte{byte(len(reply) >> 8), byte(len(reply))}, reply...))
			}
		}()
	}
}

func answer(question []byte) ([]byte, error) {
	var m dnsmessage.Message
	if err := m.Unpack(question); err != nil || len(m.Questions) == 0 {
		return nil, errors.New("no question")
	}
	q := m.Questions[0]
	reply := dnsmessage.Message{Header: dnsmessage.Header{ID: m.ID, Response: true, RecursionAvailable: true}, Questions: m.Questions}
	if q.Type == dnsmessage.TypeA {
		reply.Answers = []dnsmessage.Resource{{
			Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class},
			Body:   &dnsmessage.AResource{A: stubAnswer.As4()},
		}}
	}
	return reply.Pack()
}

// lookup resolves a name with an unreachable DNS server, so that only a redirected query is answered. BOX_RESOLVER is
// another server.
func lookup(name string) error {
	server := "192.0.2.53:53"
	if given := os.Getenv("BOX_RESOLVER"); given != "" {
		server = given
	}
	for _, network := range []string{"udp", "tcp"} {
		resolver := net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{Timeout: timeout}).DialContext(ctx, network, server)
		}}
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		all, err := resolver.LookupNetIP(ctx, "ip4", name)
		cancel()
		if err != nil {
			return fmt.Errorf("by %s: %w", network, err)
		}
		fmt.Println(network, all)
	}
	return nil
}
