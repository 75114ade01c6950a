package selfcheck

import (
	"fmt"
	"net/netip"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/route"
)

// scene is a pod and another place, with a wire between them. Addresses are those for documentation (RFC 5737, RFC 3849).
type scene struct {
	family    ruleset.Family
	pod, peer *netns.Namespace
	podAt     netip.Addr
	peerAt    netip.Addr
	// elsewhere is an address that nobody has.
	elsewhere netip.Addr
}

func newScene(f ruleset.Family) (*scene, error) {
	s := &scene{
		family: f, podAt: netip.MustParseAddr("192.0.2.2"), peerAt: netip.MustParseAddr("192.0.2.1"),
		elsewhere: netip.MustParseAddr("198.51.100.7"),
	}
	bits := 24
	if f == ruleset.IPv6 {
		s.podAt, s.peerAt = netip.MustParseAddr("2001:db8::2"), netip.MustParseAddr("2001:db8::1")
		s.elsewhere = netip.MustParseAddr("2001:db8:1::7")
		bits = 64
	}
	var err error
	if s.pod, err = netns.New(); err != nil {
		return nil, err
	}
	if s.peer, err = netns.New(); err != nil {
		s.pod.Close()
		return nil, err
	}
	if err := s.wire(bits); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (s *scene) wire(bits int) error {
	err := s.pod.Do(func() error {
		if err := route.Wire("eth0", "eth0", s.peer.FD()); err != nil {
			return err
		}
		if err := route.Up("lo"); err != nil {
			return err
		}
		return route.Up("eth0", netip.PrefixFrom(s.podAt, bits))
	})
	if err == nil {
		err = s.peer.Do(func() error { return route.Up("eth0", netip.PrefixFrom(s.peerAt, bits)) })
	}
	if err == nil {
		// Only now do both ends have a carrier, without which the way would not count.
		err = s.pod.Do(func() error { return route.Default(s.peerAt) })
	}
	if err != nil {
		return fmt.Errorf("wiring two namespaces: %w", err)
	}
	return nil
}

func (s *scene) close() {
	s.pod.Close()
	s.peer.Close()
}
