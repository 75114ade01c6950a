package serve

import (
	"errors"
	"net"
	"testing"
	"time"
)

func TestLimitedListenerHasPlaces(t *testing.T) {
	t.Parallel()
	var config net.ListenConfig
	inner, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = inner.Close() })
	l := limited{inner, make(chan struct{}, 1)}
	accepted := make(chan net.Conn)
	go func() {
		for {
			conn, err := l.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			accepted <- conn
		}
	}()
	var dialer net.Dialer
	for range 2 {
		conn, err := dialer.DialContext(t.Context(), "tcp", inner.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = conn.Close() })
	}
	first := <-accepted
	select {
	case <-accepted:
		t.Fatal("two connections at one place")
	case <-time.After(50 * time.Millisecond): // that nothing happens cannot be waited for otherwise
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	_ = first.Close() // a second time frees no second place
	second := <-accepted
	if len(l.places) != 1 {
		t.Errorf("%d places are taken, want 1", len(l.places))
	}
	_ = second.Close()
}
