package kube

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptrace"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/rest"

	"github.com/meshcni/istio-cni/internal/test/check"
)

// The tests of this file run in bubbles of synctest. Their clock advances only while all goroutines wait, so pauses and time
// limits are exact and take no real time.

// exchangeFunc is the result of one attempt: it responds, or hangs until its context ends.
type exchangeFunc func(*http.Request) (*http.Response, error)

func (e exchangeFunc) RoundTrip(r *http.Request) (*http.Response, error) { return e(r) }

func hang() exchangeFunc {
	return func(r *http.Request) (*http.Response, error) {
		<-r.Context().Done()
		return nil, r.Context().Err()
	}
}

func reply(status int, body []byte) exchangeFunc {
	return func(*http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: status, ContentLength: -1, Body: io.NopCloser(strings.NewReader(string(body)))}, nil
	}
}

// missingPod is the API server's response for a pod that does not exist.
func missingPod() exchangeFunc {
	return reply(http.StatusNotFound, []byte(`{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404,
		"message":"pods \"cart\" not found","details":{"name":"cart","kind":"pods"}}`))
}

func retryAfter(seconds int) exchangeFunc {
	return func(r *http.Request) (*http.Response, error) {
		response, err := reply(http.StatusTooManyRequests, nil)(r)
		response.Header = http.Header{"Retry-After": {strconv.Itoa(seconds)}}
		return response, err
	}
}

// delayed delays an exchangeFunc.
func delayed(by time.Duration, e exchangeFunc) exchangeFunc {
	return func(r *http.Request) (*http.Response, error) {
		if !sleep(r.Context(), by) {
			return nil, r.Context().Err()
		}
		return e(r)
	}
}

// scripted is a client with a result for each attempt; the last result repeats. It records the time of each attempt.
type scripted struct {
	*Client
	began []time.Duration
}

func script(exchanges ...exchangeFunc) *scripted {
	s := &scripted{}
	start := time.Now()
	next := exchangeFunc(func(r *http.Request) (*http.Response, error) {
		s.began = append(s.began, time.Since(start))
		return exchanges[min(len(s.began), len(exchanges))-1](r)
	})
	s.Client = clientOf(next, Config{Kubeconfig: "/no/such/istio-cni-kubeconfig"})
	return s
}

// clientOf returns a client whose requests all have the result of next.
func clientOf(next exchangeFunc, config Config) *Client {
	to, err := newEndpoint(&rest.Config{Host: "https://api", Proxy: http.ProxyURL(nil), Transport: next}, nil, true)
	if err != nil {
		panic(err)
	}
	config.Timeout, config.IdleTimeout = 10*time.Second, 150*time.Second
	return &Client{config: config, current: to}
}

// bubble runs a subtest with a clock of its own.
func bubble(t *testing.T, name string, test func(*testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { synctest.Test(t, test) })
}

func TestPod_Budget(t *testing.T) {
	for name, forever := range map[string]exchangeFunc{
		"against a server that hangs":               hang(),
		"against a server without the pod":          missingPod(),
		"against a server that always fails":        delayed(700*time.Millisecond, reply(http.StatusInternalServerError, nil)),
		"against a server that is always busy":      retryAfter(1),
		"against a server that sends nonsense":      reply(http.StatusOK, []byte("<")),
		"against responses just before the timeout": delayed(2999*time.Millisecond, missingPod()),
		"against responses just after the timeout":  delayed(3001*time.Millisecond, missingPod()),
	} {
		bubble(t, name, func(t *testing.T) {
			s := script(forever)
			start := time.Now()
			_, err := s.Lookup(t.Context(), cart(), nil, 10*time.Second)
			took := time.Since(start)
			failed, ok := errors.AsType[*Error](err)
			if !ok || !failed.Exhausted {
				t.Fatalf("error is %v, want an exhausted budget", err)
			}
			// The look-up skips the last pause if no request may follow it.
			if took > 10*time.Second || took < 8*time.Second || failed.Elapsed != took {
				t.Errorf("took %v, reported %v, want the budget of 10s used", took, failed.Elapsed)
			}
			if failed.Attempts != len(s.began) || failed.Attempts < 3 || failed.Attempts > 30 {
				t.Errorf("%d attempts, reported %d", len(s.began), failed.Attempts)
			}
		})
	}
}

func TestPod_AfterHang(t *testing.T) {
	for name, test := range map[string]struct {
		first         exchangeFunc
		budget, pause time.Duration
	}{
		"is retried after 3 seconds and a pause":     {hang(), 10 * time.Second, 3 * time.Second},
		"is retried after a third of a small budget": {hang(), 300 * time.Millisecond, 100 * time.Millisecond},
		"waits for a Retry-After in full":            {retryAfter(4), 10 * time.Second, 4 * time.Second},
	} {
		bubble(t, name, func(t *testing.T) {
			s := script(test.first, reply(http.StatusOK, cartPod().JSON(t)))
			check.OK(t, check.Err(s.Lookup(t.Context(), cart(), nil, test.budget)))
			if len(s.began) != 2 || s.began[1] < test.pause || s.began[1] > test.pause+50*time.Millisecond {
				t.Errorf("attempts began at %v", s.began)
			}
		})
	}
	bubble(t, "reports the last complete response rather than the attempt that the budget cut short", func(t *testing.T) {
		s := script(delayed(290*time.Millisecond, missingPod()), delayed(290*time.Millisecond, reply(http.StatusInternalServerError, nil)), hang())
		_, err := s.Lookup(t.Context(), cart(), nil, 900*time.Millisecond)
		// Attempts begin at 0, at 315 to 340 and at 655 to 730 ms: the budget ends the third at 900, before its own limit of 300 ms.
		failed := wantError(t, err, ServerError)
		if !failed.Exhausted || failed.Status != http.StatusInternalServerError {
			t.Errorf("%v", err)
		}
	})
}

func TestPod_TimeoutNamesStage(t *testing.T) {
	for _, test := range []struct {
		class   Class
		want    string
		reached func(*httptrace.ClientTrace)
	}{
		{Timeout, "preparing the request", func(*httptrace.ClientTrace) {}},
		{DNS, "resolving the server's name", func(c *httptrace.ClientTrace) { c.DNSStart(httptrace.DNSStartInfo{}) }},
		{Timeout, "connecting", func(c *httptrace.ClientTrace) { c.ConnectStart("tcp", "") }},
		{Timeout, "in the TLS handshake", func(c *httptrace.ClientTrace) { c.TLSHandshakeStart() }},
		{Timeout, "waiting for the response", func(c *httptrace.ClientTrace) { c.GotConn(httptrace.GotConnInfo{}) }},
		{Timeout, "reading the response", func(c *httptrace.ClientTrace) { c.GotFirstResponseByte() }},
	} {
		bubble(t, test.want, func(t *testing.T) {
			s := script(func(r *http.Request) (*http.Response, error) {
				test.reached(httptrace.ContextClientTrace(r.Context()))
				return hang()(r)
			})
			_, err := s.Lookup(t.Context(), cart(), nil, 10*time.Second)
			wantError(t, err, test.class)
			check.Contains(t, err.Error(), ", time budget used up: "+test.want+": context deadline exceeded")
		})
	}
}

func TestPod_Pauses(t *testing.T) {
	bubble(t, "pauses double up to the maximum, are spread below it and end with the budget", func(t *testing.T) {
		s := script(missingPod())
		wantError(t, check.Err(s.Lookup(t.Context(), cart(), nil, 10*time.Minute)), NotFound)
		full, last, seen := 50*time.Millisecond, len(s.began)-1, map[time.Duration]bool{}
		for i := 1; i < 100; i++ {
			pause := s.began[i] - s.began[i-1]
			if pause < full/2 || pause > full {
				t.Errorf("pause %d is %v, want between %v and %v", i, pause, full/2, full)
			}
			full, seen[pause] = min(2*full, time.Second), true
		}
		if len(seen) < 50 {
			t.Errorf("only %d different pauses of 99", len(seen))
		}
		if began := s.began[last]; began < 10*time.Minute-200*time.Millisecond || began >= 10*time.Minute {
			t.Errorf("the last attempt began at %v", began)
		}
	})
	bubble(t, "Retry-After beyond the budget ends the look-up at once", func(t *testing.T) {
		s := script(retryAfter(10))
		_, err := s.Lookup(t.Context(), cart(), nil, 10*time.Second)
		if failed := wantError(t, err, TooManyRequests); !failed.Exhausted || failed.Attempts != 1 || failed.Elapsed != 0 {
			t.Errorf("%v", err)
		}
	})
}

func TestPod_ContextEnds(t *testing.T) {
	for name, test := range map[string]struct {
		forever exchangeFunc
		after   time.Duration
	}{
		"in the middle of an attempt": {delayed(400*time.Millisecond, hang()), time.Second},
		"in a pause":                  {retryAfter(5), time.Second},
		"before it begins":            {hang(), 0},
	} {
		bubble(t, name, func(t *testing.T) {
			s := script(test.forever)
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(test.after, cancel)
			if test.after == 0 {
				cancel()
			}
			_, err := s.Lookup(ctx, cart(), nil, 10*time.Second)
			failed := wantError(t, err, Canceled)
			if !errors.Is(err, context.Canceled) || failed.Elapsed != test.after || failed.Exhausted {
				t.Errorf("%v", err)
			}
		})
	}
	bubble(t, "at its deadline, as at the end of a budget", func(t *testing.T) {
		s := script(hang())
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := s.Lookup(ctx, cart(), nil, 10*time.Second)
		if failed := wantError(t, err, Timeout); !failed.Exhausted || failed.Elapsed != time.Second {
			t.Errorf("%v", err)
		}
	})
}
