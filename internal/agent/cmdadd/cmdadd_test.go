package cmdadd_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/cmdadd"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/unixsock"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// server serves events on its socket, with the agent's metrics.
type server struct {
	*agenttest.Socket

	metrics *metrics.Metrics
}

// counted returns the numbers of answers 200, 400 and 500.
func (s *server) counted(t *testing.T) string {
	t.Helper()
	var counts []int
	for _, status := range []int{200, 400, 500} {
		counts = append(counts, agenttest.Metric(t, s.metrics.Text(), fmt.Sprintf("istio_cni_plugin_requests_total{response_code=\"%d\"}", status)))
	}
	return fmt.Sprint(counts)
}

func serve(t *testing.T, add func(context.Context, agentapi.Event) error) *server {
	t.Helper()
	s := &server{metrics: metrics.New("")}
	s.Socket = agenttest.Serve(t, cmdadd.Handler(cmdadd.Options{Add: add, Count: s.metrics.EventAnswered}), func(o *unixsock.Options) {
		*o = cmdadd.Socket(filepath.Join(filepath.Dir(o.Path), agentapi.EventSocketName), 0o755, o.Log)
	})
	return s
}

// send sends a request as the reference's plugin does, and returns the answer.
func (s *server) send(t *testing.T, method, at string, body io.Reader) (status int, text string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, "http://unix"+at, body)
	check.OK(t, err)
	request.Header.Set("Content-Type", "application/json")
	response, err := agenttest.Client(s.Path).Do(request)
	check.OK(t, err)
	defer response.Body.Close() //nolint:errcheck // only read from
	answer, err := io.ReadAll(response.Body)
	check.OK(t, err)
	return response.StatusCode, string(answer)
}

const event = `{"Netns":"/var/run/netns/cni-1","PodName":"p","PodNamespace":"ns",` +
	`"IPs":[{"Interface":0,"Address":{"IP":"10.42.0.7","Mask":"////AA=="},"Gateway":"10.42.0.1"}]}`

func TestHandler_Answers(t *testing.T) {
	for name, tc := range map[string]struct {
		method, at, body string
		fails            error
		status           int
		text, counted    string
	}{
		"enrolled":       {"POST", "/cmdadd", event, nil, 200, "", "[1 0 0]"},
		"another method": {"PUT", "/cmdadd", event, nil, 200, "", "[1 0 0]"},
		"keys in another case, and unknown ones": {
			"POST", "/cmdadd", `{"netns":"/var/run/netns/cni-1","podname":"p","podnamespace":"ns","more":1,"ips":[{"address":{"ip":"10.42.0.7"}}]}`,
			nil, 200, "", "[1 0 0]",
		},
		"not enrolled":  {"POST", "/cmdadd", event, errors.New("no ztunnel\x07"), 500, `no ztunnel\u0007` + "\n", "[0 0 1]"},
		"a long error":  {"POST", "/cmdadd", event, errors.New(strings.Repeat("x", 1<<20)), 500, strings.Repeat("x", 4000), "[0 0 1]"},
		"no JSON":       {"POST", "/cmdadd", "{", nil, 400, "unexpected end of JSON input", "[0 1 0]"},
		"no body":       {"GET", "/cmdadd", "", nil, 400, "unexpected end of JSON input", "[0 1 0]"},
		"a wrong type":  {"POST", "/cmdadd", `{"Netns":1}`, nil, 400, "Netns", "[0 1 0]"},
		"too large":     {"POST", "/cmdadd", `{"Netns":"` + strings.Repeat("x", agentapi.MaxEvent) + `"}`, nil, 400, "too large", "[0 1 0]"},
		"another path":  {"POST", "/", event, nil, 404, "not found", "[0 0 0]"},
		"a longer path": {"POST", "/cmdadd/x", event, nil, 404, "not found", "[0 0 0]"},
		"ours is counted by its report": {
			"POST", "/cmdadd", strings.TrimSuffix(event, "}") + `,"PodUID":"u"}`, errors.New("x"), 500, "x\n", "[0 0 0]",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := serve(t, func(_ context.Context, e agentapi.Event) error {
				if e.Netns != "/var/run/netns/cni-1" || e.PodName != "p" || e.PodNamespace != "ns" || fmt.Sprint(e.Addresses()) != "[10.42.0.7]" {
					t.Errorf("got %+v", e)
				}
				return tc.fails
			})
			status, text := s.send(t, tc.method, tc.at, strings.NewReader(tc.body))
			if status != tc.status || !strings.Contains(text, tc.text) || tc.text == "" && text != "" || len(text) > 5<<10 {
				t.Errorf("%d %.500q", status, text)
			}
			check.Equal(t, s.counted(t), tc.counted, "counted")
		})
	}
}

// TestHandler_ClientHangsUp: the work for a pod ends with the plugin that waits for it.
func TestHandler_ClientHangsUp(t *testing.T) {
	started, ended := make(chan struct{}), make(chan error, 1)
	s := serve(t, func(ctx context.Context, _ agentapi.Event) error {
		close(started)
		<-ctx.Done()
		ended <- context.Cause(ctx)
		return ctx.Err()
	})
	conn := s.Dial(t)
	_, err := fmt.Fprintf(conn, "POST /cmdadd HTTP/1.1\r\nHost: unix\r\nContent-Length: %d\r\n\r\n%s", len(event), event)
	check.OK(t, err)
	<-started
	check.OK(t, conn.Close())
	check.Is(t, <-ended, context.Canceled)
	agenttest.Eventually(t, "the answer is not counted", func() bool { return s.counted(t) == "[0 0 1]" })
}

func TestHandler_TimeBounded(t *testing.T) {
	var within bool
	handler := cmdadd.Handler(cmdadd.Options{Count: func(int) {}, Add: func(ctx context.Context, _ agentapi.Event) error {
		_, within = ctx.Deadline()
		return nil
	}})
	handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/cmdadd", strings.NewReader(event)))
	check.Equal(t, within, true, "the work has a deadline")
	if o := cmdadd.Socket("x", 0, slog.New(slog.DiscardHandler)); o.Timeout <= agentapi.EventTimeout {
		t.Errorf("the socket ends requests after %s, before the plugin does", o.Timeout)
	}
}

// TestHandler_Concurrent: no pod waits for the enrolment of another one.
func TestHandler_Concurrent(t *testing.T) {
	const pods = 30
	var together, clients sync.WaitGroup
	together.Add(pods)
	s := serve(t, func(context.Context, agentapi.Event) error {
		together.Done()
		together.Wait() // all are in Add at once
		return nil
	})
	for range pods {
		clients.Go(func() {
			if err := agentapi.PostEvent(t.Context(), s.Dir, agentapi.Event{PodName: "p"}); err != nil {
				t.Error(err)
			}
		})
	}
	clients.Wait()
}

func TestSocket_OnlyRoot(t *testing.T) {
	s := serve(t, func(context.Context, agentapi.Event) error { return nil })
	info, err := os.Stat(s.Path)
	check.OK(t, err)
	check.Equal(t, info.Mode().Perm(), 0o600)
}
