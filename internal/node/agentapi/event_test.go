package agentapi_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// referenceEvent is what the reference's plugin sends.
const referenceEvent = `{"Netns":"/var/run/netns/cni-1","PodName":"p","PodNamespace":"ns",` +
	`"IPs":[{"Interface":0,"Address":{"IP":"10.42.0.7","Mask":"////AA=="},"Gateway":"10.42.0.1"},` +
	`{"Interface":null,"Address":{"IP":"fd00::7","Mask":"//////////8AAAAAAAAAAA=="},"Gateway":""}]}`

func event(t *testing.T) agentapi.Event {
	t.Helper()
	e, err := agentapi.ParseEvent([]byte(referenceEvent))
	check.OK(t, err)
	return e
}

func TestParseEvent_Payloads(t *testing.T) {
	want := []netip.Addr{netip.MustParseAddr("10.42.0.7"), netip.MustParseAddr("fd00::7")}
	e := event(t)
	if e.Netns != "/var/run/netns/cni-1" || e.PodName != "p" || e.PodNamespace != "ns" || e.PodUID != "" || !slices.Equal(e.Addresses(), want) {
		t.Errorf("got %+v", e)
	}
	for name, tc := range map[string]struct {
		text string
		want agentapi.Event
	}{
		"keys in another case, and an unknown one": {
			`{"netns":"/n","podname":"p","PODNAMESPACE":"s","poduid":"u","Extra":{"a":[1]}}`,
			agentapi.Event{Netns: "/n", PodName: "p", PodNamespace: "s", PodUID: "u"},
		},
		"no addresses": {`{"PodName":"p","IPs":null}`, agentapi.Event{PodName: "p"}},
	} {
		if got, err := agentapi.ParseEvent([]byte(tc.text)); err != nil || !reflect.DeepEqual(got, tc.want) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	e, err := agentapi.ParseEvent([]byte(`{"IPs":[{"Address":{"IP":""}},{"Address":{"IP":"::ffff:10.0.0.1"}},{}]}`))
	check.OK(t, err)
	check.Diff(t, "IPv4-mapped address", "[10.0.0.1]", fmt.Sprint(e.Addresses()))
	for _, text := range []string{
		"", "{", "[]", `"x"`, referenceEvent + "x", `{"Netns":7}`, `{"IPs":[{"Address":{"IP":"10.0.0"}}]}`, `{"IPs":[{"Address":{"Mask":"?"}}]}`,
	} {
		if got, err := agentapi.ParseEvent([]byte(text)); err == nil {
			t.Errorf("%q is accepted: %+v", text, got)
		}
	}
}

// postTo posts to an agent with the handler.
func postTo(ctx context.Context, t *testing.T, e agentapi.Event, handler http.HandlerFunc) error {
	t.Helper()
	dir := agenttest.SocketDir(t)
	server := &http.Server{Handler: handler, ReadHeaderTimeout: time.Minute}
	listener := agenttest.Listen(t, filepath.Join(dir, agentapi.EventSocketName))
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	return agentapi.PostEvent(ctx, dir, e)
}

func TestPostEvent_Request(t *testing.T) {
	for uid, want := range map[string]string{"": referenceEvent, "u-1": strings.TrimSuffix(referenceEvent, "}") + `,"PodUID":"u-1"}`} {
		e := event(t)
		e.PodUID = uid
		var got []string
		check.OK(t, postTo(t.Context(), t, e, func(_ http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			got = []string{r.Proto, r.Method, r.Host, r.URL.String(), r.Header.Get("Content-Type"), string(body)}
		}))
		if want := []string{"HTTP/1.1", http.MethodPost, "unix", "/cmdadd", "application/json", want}; !slices.Equal(got, want) {
			t.Errorf("got  %q\nwant %q", got, want)
		}
	}
	var body []byte
	check.OK(t, postTo(t.Context(), t, agentapi.Event{}, func(_ http.ResponseWriter, r *http.Request) { body, _ = io.ReadAll(r.Body) }))
	check.Equal(t, string(body), `{"Netns":"","PodName":"","PodNamespace":"","IPs":null}`)
}

// endlessly writes until the client has gone.
func endlessly(w io.Writer, piece string) {
	for {
		if _, err := io.WriteString(w, piece); err != nil {
			return
		}
	}
}

func TestPostEvent_Answers(t *testing.T) {
	for name, tc := range map[string]struct {
		answer func(w http.ResponseWriter)
		want   string // "" for success
	}{
		"200":                 {func(w http.ResponseWriter) { w.WriteHeader(http.StatusOK) }, ""},
		"200 and a huge body": {func(w http.ResponseWriter) { endlessly(w, "xxxxxxxx") }, ""},
		"500":                 {func(w http.ResponseWriter) { http.Error(w, "no ztunnel\x1b[2J", 500) }, `unable to push CNI event (status code 500): no ztunnel\u001b[2J`},
		"400":                 {func(w http.ResponseWriter) { http.Error(w, "bad", 400) }, "unable to push CNI event (status code 400): bad"},
		"another success":     {func(w http.ResponseWriter) { w.WriteHeader(http.StatusAccepted) }, "status code 202"},
		"an endless refusal":  {func(w http.ResponseWriter) { w.WriteHeader(500); endlessly(w, "xxxxxxxx") }, "unable to push CNI event (status code 500): xxx"},
		"an endless header":   {func(w http.ResponseWriter) { hijack(w, "HTTP/1.1 200 OK\r\nX: ", "xxxxxxxx") }, "failed to send event request: "},
		"no HTTP":             {func(w http.ResponseWriter) { hijack(w, "\x16\x03\x01\x00\n\n", "") }, "failed to send event request: "},
		"a hang-up":           {func(w http.ResponseWriter) { hijack(w, "", "") }, "failed to send event request: "},
		"half a status":       {func(w http.ResponseWriter) { hijack(w, "HTTP/1.1 20", "") }, "failed to send event request: "},
		"a body cut short":    {func(w http.ResponseWriter) { hijack(w, "HTTP/1.1 503 No\r\nContent-Length: 9\r\n\r\nhalf", "") }, "(status code 503): half"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := postTo(t.Context(), t, event(t), func(w http.ResponseWriter, _ *http.Request) { tc.answer(w) })
			switch {
			case tc.want == "" && err != nil, tc.want != "" && err == nil:
				t.Errorf("got %v", err)
			case err != nil && (!strings.Contains(err.Error(), tc.want) || len(err.Error()) > 1<<10):
				t.Errorf("got %.2000v", err)
			}
		})
	}
}

// hijack writes the text, then the piece without end unless it is "", and closes the connection.
func hijack(w http.ResponseWriter, text, piece string) {
	conn, _, err := w.(http.Hijacker).Hijack()
	if err != nil {
		return
	}
	_, _ = io.WriteString(conn, text)
	if piece != "" {
		endlessly(conn, piece)
	}
	_ = conn.Close()
}

func TestPostEvent_AgentAbsent(t *testing.T) {
	dir := agenttest.SocketDir(t)
	absent := agentapi.PostEvent(t.Context(), dir, agentapi.Event{})
	socket := filepath.Join(dir, agentapi.EventSocketName)
	check.OK(t, agenttest.Listen(t, socket).Close()) // as a killed agent leaves it
	check.OK(t, check.Err(os.Lstat(socket)))
	for name, err := range map[string]error{"no socket": absent, "a stale socket": agentapi.PostEvent(t.Context(), dir, agentapi.Event{})} {
		if err == nil || !strings.Contains(err.Error(), "is the node agent running") || !strings.Contains(err.Error(), socket) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestPostEvent_AgentHangs: neither an agent that does not answer, nor one that does not even accept, outlasts the caller's context.
func TestPostEvent_AgentHangs(t *testing.T) {
	dir := agenttest.SocketDir(t)
	agenttest.Listen(t, filepath.Join(dir, agentapi.EventSocketName)) // never accepts
	for name, post := range map[string]func(context.Context) error{
		"not accepted": func(ctx context.Context) error { return agentapi.PostEvent(ctx, dir, event(t)) },
		"not answered": func(ctx context.Context) error {
			return postTo(ctx, t, event(t), func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
		},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		if err := post(ctx); err == nil || !strings.Contains(err.Error(), "failed to send event request: no answer in time") {
			t.Errorf("%s: %v", name, err)
		}
		cancel()
	}
}
