package kube

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http/httptrace"
	"sync/atomic"
	"time"
)

// exchange is one request and its answer on the wire: how far it has come, so that a timeout can say what it waited for,
// and what bounds it.
type exchange struct {
	endpoint *endpoint
	proxy    string // URL of the proxy in between, empty when there is none
	// contentType is of a good answer.
	contentType string
	// limit bounds a good answer, or an event of a watch, in bytes; left is what may still come.
	limit, left int64
	// heard is called when something of a good answer arrives, unless nil.
	heard func()
	// broken is why the answer ended early, nil when it did not.
	broken *failure

	// stage is set by hooks that run in goroutines of net/http, some of them after the request has been given up.
	stage atomic.Int32
}

// exchangeKey is the key of a request's context for its exchange.
type exchangeKey struct{}

func exchangeOf(ctx context.Context) *exchange {
	reached, _ := ctx.Value(exchangeKey{}).(*exchange)
	return reached
}

// stage is how far an exchange has come.
type stage int32

const (
	starting stage = iota
	resolving
	connecting
	handshaking
	waiting
	reading
)

func (s stage) String() string {
	return [...]string{
		"preparing the request", "resolving the server's name", "connecting", "in the TLS handshake", "waiting for the answer",
		"reading the answer",
	}[s]
}

func (x *exchange) at(s stage) { x.stage.Store(int32(s)) }

func (x *exchange) trace(ctx context.Context) context.Context {
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		DNSStart:             func(httptrace.DNSStartInfo) { x.at(resolving) },
		ConnectStart:         func(string, string) { x.at(connecting) },
		TLSHandshakeStart:    func() { x.at(handshaking) },
		GotConn:              func(httptrace.GotConnInfo) { x.at(waiting) },
		GotFirstResponseByte: func() { x.at(reading) },
	})
}

func (x *exchange) failure(err error) *failure {
	at := stage(x.stage.Load())
	return &failure{class: classify(err, at), err: fmt.Errorf("%s: %w", at, withoutURL(err))}
}

func (x *exchange) tooLarge() *failure {
	return &failure{class: TooLarge, err: fmt.Errorf("the answer has more than %d bytes", x.limit)}
}

// boundedBody is the body of a good answer. It ends with a [failure], not with an answer cut short.
type boundedBody struct {
	io.ReadCloser

	of *exchange
}

func (b *boundedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if n > 0 && b.of.heard != nil {
		b.of.heard()
	}
	if b.of.left -= int64(n); b.of.left < 0 {
		b.of.broken = b.of.tooLarge()
		return 0, b.of.broken
	}
	if err != nil && !errors.Is(err, io.EOF) {
		b.of.broken = b.of.failure(err)
		return n, b.of.broken
	}
	return n, err
}

// sleep waits and tells whether ctx lasted that long.
func sleep(ctx context.Context, wait time.Duration) bool {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
