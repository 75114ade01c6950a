package kube

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	utilruntime "k8s.io/apimachinery/pkg/util/runtime"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

const mapPath = "/api/v1/namespaces/istio-system/configmaps/istio-cni-config"

func config(mode string) []byte {
	return kubetest.ConfigMap("istio-system", "istio-cni-config", map[string]string{"mode": mode})
}

// calls records the calls of a listener in order: "absent", "mode=x", "error: CLASS", "works".
type calls struct {
	t     *testing.T
	mu    sync.Mutex
	lines []string
}

func (c *calls) add(line string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lines = append(c.lines, line)
}

func (c *calls) all() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.lines)
}

func (c *calls) onError(err error) {
	if err == nil {
		c.add("works")
		return
	}
	c.add("error: " + string(ClassOf(err)))
}

// configMap watches the ConfigMap.
func (c *calls) configMap(ctx context.Context, api *Client) {
	api.WatchConfigMap(ctx, "istio-system", "istio-cni-config", func(data map[string]string) {
		if data == nil {
			c.add("absent")
			return
		}
		c.add("mode=" + data["mode"])
	}, c.onError)
}

// wants waits for exactly these calls.
func (c *calls) wants(lines ...string) {
	c.t.Helper()
	agenttest.Until(c.t, func() string { return fmt.Sprintf("calls %q, want %q", c.all(), lines) }, func() bool {
		got := c.all()
		if len(got) > len(lines) || !slices.Equal(got, lines[:len(got)]) {
			c.t.Fatalf("calls %q, want %q", got, lines)
		}
		return len(got) == len(lines)
	})
}

// ignoring returns a listener that does nothing.
func ignoring[T any]() Listener[T] {
	return Listener[T]{OnUpdate: func(T) {}, OnDelete: func(T) {}, OnSync: func() {}, OnError: func(error) {}}
}

func watched(t *testing.T, server *kubetest.Server) {
	t.Helper()
	agenttest.Eventually(t, "no watch was opened", func() bool { return server.Watches() == 1 })
}

// lists and watches return the requests of each kind. A watch that streams a list belongs to lists.
func lists(server *kubetest.Server) []string {
	return slices.DeleteFunc(server.Requests(), func(r string) bool { return !isList(r) })
}

func watches(server *kubetest.Server) []string { return slices.DeleteFunc(server.Requests(), isList) }

func isList(request string) bool {
	return !strings.Contains(request, "watch=true") || strings.Contains(request, "sendInitialEvents=true")
}

// newFixture returns a server with the ConfigMap in mode a, and the calls of a listener. Before the watch, given changes the
// server and change the client; both may be nil.
func newFixture(t *testing.T, given func(*kubetest.Server), change func(*Config)) (*kubetest.Server, *calls) {
	t.Helper()
	server, h := kubetest.NewServer(t), &calls{t: t}
	server.Set(config("a"))
	if given != nil {
		given(server)
	}
	api := connected(t, server, change)
	agenttest.Go(t, func(ctx context.Context) { h.configMap(ctx, api.Client) })
	return server, h
}

func TestWatchConfigMap(t *testing.T) {
	server, h := newFixture(t, func(s *kubetest.Server) {
		s.Set(kubetest.ConfigMap("istio-system", "another", map[string]string{"mode": "z"}))
		s.Set(kubetest.ConfigMap("elsewhere", "istio-cni-config", map[string]string{"mode": "z"}))
	}, nil)
	h.wants("mode=a")
	watched(t, server)
	server.Set(config("b"))
	h.wants("mode=a", "mode=b")
	server.Set(config("b")) // a new version of the same data
	server.Set(kubetest.ConfigMap("istio-system", "another", map[string]string{"mode": "y"}))
	server.Delete(mapPath)
	h.wants("mode=a", "mode=b", "absent")
	server.Set(config("b"))
	h.wants("mode=a", "mode=b", "absent", "mode=b")

	if all := server.Requests(); len(all) != 1 {
		t.Fatalf("%d requests, want 1: %q", len(all), all)
	}
	query := queryOf(t, server.Requests()[0])
	wantsTimeout(t, query)
	const want = "allowWatchBookmarks=true&fieldSelector=metadata.name%3Distio-cni-config&" +
		"resourceVersionMatch=NotOlderThan&sendInitialEvents=true&watch=true"
	check.Equal(t, query.Encode(), want, "the query is")
}

func wantsTimeout(t *testing.T, query url.Values) {
	t.Helper()
	var seconds int
	if _, err := fmt.Sscan(query.Get("timeoutSeconds"), &seconds); err != nil || seconds < 300 || seconds > 600 {
		t.Errorf("timeoutSeconds=%q, want 300 to 600", query.Get("timeoutSeconds"))
	}
	query.Del("timeoutSeconds")
}

func queryOf(t *testing.T, request string) url.Values {
	t.Helper()
	_, query, _ := strings.Cut(request, "?")
	values, err := url.ParseQuery(query)
	check.OK(t, err)
	return values
}

// TestWatch_Continues: after the end of a watch, the client misses no change and requests no list. The next watch begins after the
// last event or bookmark.
func TestWatch_Continues(t *testing.T) {
	for name, test := range map[string]struct {
		end  func(*kubetest.Server)
		from string
	}{
		"after a proper end":                           {(*kubetest.Server).CloseWatches, "3"},
		"after an end in the middle of an event":       {(*kubetest.Server).BreakWatches, "3"},
		"after an end and a compaction of the history": {func(s *kubetest.Server) { s.Compact(); s.CloseWatches() }, "3"},
		"after a bookmark":                             {func(s *kubetest.Server) { elsewhere(s); s.Bookmark(); s.Compact(); s.CloseWatches() }, "4"},
	} {
		t.Run(name, func(t *testing.T) {
			server, h := newFixture(t, nil, nil)
			watched(t, server)
			server.Set(config("b"))
			h.wants("mode=a", "mode=b")
			test.end(server)
			server.Set(config("c"))
			h.wants("mode=a", "mode=b", "mode=c")
			watched(t, server)
			check.Equal(t, len(lists(server)), 1, "lists")
			if all := watches(server); len(all) < 1 || queryOf(t, all[0]).Get("resourceVersion") != test.from {
				t.Errorf("watches: %q, want the first from version %s", all, test.from)
			}
		})
	}
}

// elsewhere changes an object that no watch selects.
func elsewhere(s *kubetest.Server) { s.Set(kubetest.ConfigMap("elsewhere", "other", nil)) }

func TestWatch_ExpiredVersion(t *testing.T) {
	for name, forget := range map[string]func(*kubetest.Server){
		"as an event of the watch": func(s *kubetest.Server) {
			elsewhere(s)
			s.Compact()
			s.CloseWatches()
		},
		"as the response": func(s *kubetest.Server) {
			s.FailOn("watch=true", kubetest.Gone, 1)
			s.CloseWatches()
		},
		"as a refusal of another kind": func(s *kubetest.Server) {
			s.FailOn("watch=true", kubetest.BadRequest, 1)
			s.CloseWatches()
		},
	} {
		t.Run(name, func(t *testing.T) {
			server, h := newFixture(t, nil, nil)
			watched(t, server)
			server.Set(config("b")) // client-go lists after a short watch without events
			h.wants("mode=a", "mode=b")
			forget(server)
			agenttest.Eventually(t, "no second list", func() bool { return len(lists(server)) >= 2 })
			watched(t, server)
			server.Set(config("c"))
			want := []string{"mode=a", "mode=b", "mode=c"}
			if name == "as a refusal of another kind" {
				want = []string{"mode=a", "mode=b", "error: " + string(Rejected), "works", "mode=c"}
			}
			h.wants(want...)
		})
	}
}

// TestWatch_FailureReportedOnce: many requests fail, and the listener receives one error.
func TestWatch_FailureReportedOnce(t *testing.T) {
	for _, test := range []struct {
		fault kubetest.Fault
		class Class
	}{
		{kubetest.Forbidden, Forbidden},
		{kubetest.Unauthorized, Unauthorized},
		{kubetest.ServerError, ServerError},
		{kubetest.UnknownPath, Rejected},
		{kubetest.NotFoundPage, Undecodable},
		{kubetest.Garbage, Undecodable},
		{kubetest.WrongKind, Undecodable},
		{kubetest.Truncated, ConnectionLost}, // in HTTP/2, a reset stream
	} {
		t.Run(string(test.fault), func(t *testing.T) {
			server, h := newFixture(t, func(s *kubetest.Server) { s.ListsOnly(); s.Fail(test.fault, kubetest.Forever) }, nil)
			agenttest.Eventually(t, "too few requests", func() bool { return len(server.Requests()) > 5 })
			h.wants("error: " + string(test.class))
			server.Heal()
			want := []string{"error: " + string(test.class), "mode=a", "works"}
			h.wants(want...)
			watched(t, server)
			server.FailOn("watch=true", kubetest.TooMany, kubetest.Forever)
			server.SetRetryAfter(0)
			server.CloseWatches()
			want = append(want, "error: "+string(TooManyRequests))
			h.wants(want...)
			server.Heal()
			h.wants(append(want, "works")...)
		})
	}
}

func TestWatch_BadEvent(t *testing.T) {
	for name, event := range map[string]struct {
		kind, object string
		class        Class
	}{
		"an error of the server":       {"ERROR", `{"kind": "Status", "apiVersion": "v1", "code": 500, "message": "etcd"}`, ServerError},
		"an error without a Status":    {"ERROR", `"?"`, Undecodable},
		"an object without a name":     {"MODIFIED", `{"kind": "ConfigMap"}`, Undecodable},
		"data of another type":         {"MODIFIED", `{"metadata": {"name": "x", "resourceVersion": "9"}, "data": 7}`, Undecodable},
		"a bookmark without an object": {"BOOKMARK", `7`, Undecodable},
		"an event of unknown type":     {"MOVED", string(config("x")), Undecodable},
	} {
		t.Run(name, func(t *testing.T) {
			server, h := newFixture(t, nil, nil)
			h.wants("mode=a") // the stream is read ahead of it
			server.Send(event.kind, []byte(event.object))
			h.wants("mode=a", "error: "+string(event.class), "works")
			check.Equal(t, len(lists(server)), 2, "lists")
		})
	}
}

// TestWatch_HangingServer hangs in a list; TestWatch_EndsLater has watches.
func TestWatch_HangingServer(t *testing.T) {
	_, h := newFixture(t, func(s *kubetest.Server) { s.Fail(kubetest.HangMidBody, 1) }, func(a *Config) { a.Timeout = time.Second })
	h.wants("error: "+string(Timeout), "works", "mode=a")
}

func TestWatch_ContextEnds(t *testing.T) {
	for name, given := range map[string]func(*kubetest.Server){
		"in a watch": func(*kubetest.Server) {},
		"in a list":  func(s *kubetest.Server) { s.Fail(kubetest.Hang, kubetest.Forever) },
		"in a pause": func(s *kubetest.Server) { s.SetRetryAfter(3600); s.Fail(kubetest.TooMany, kubetest.Forever) },
	} {
		t.Run(name, func(t *testing.T) {
			server := kubetest.NewServer(t)
			given(server)
			api, h := connected(t, server, nil), &calls{t: t}
			stop := agenttest.Go(t, func(ctx context.Context) { h.configMap(ctx, api.Client) })
			agenttest.Eventually(t, "no request", func() bool { return len(server.Requests()) > 0 })
			stop()
			if got := h.all(); slices.Contains(got, "error: "+string(Canceled)) {
				t.Errorf("the end was reported as an error: %q", got)
			}
		})
	}
}

// TestWatch_ManyObjects: the client watches pods on a server that does not stream lists.
func TestWatch_ManyObjects(t *testing.T) {
	server := kubetest.NewServer(t)
	server.ListsOnly()
	set := func(name string) { server.Set(kubetest.Pod{Namespace: "shop", Name: name}.JSON(t)) }
	remove := func(name string) { server.Delete("/api/v1/namespaces/shop/pods/" + name) }
	for _, name := range []string{"a", "b", "c", "d"} {
		set(name)
	}
	h, api := &calls{t: t}, connected(t, server, nil)
	agenttest.Go(t, func(ctx context.Context) {
		api.WatchPods(ctx, PodScope{Node: "node-1"}, Listener[Pod]{
			OnUpdate: func(p Pod) { h.add("set " + p.Facts.Name + " " + p.Facts.UID) },
			OnDelete: func(p Pod) { h.add("gone " + p.Facts.Name + " " + p.Facts.UID) },
			OnSync:   func() { h.add("synced") }, OnError: h.onError,
		})
	})
	want := []string{"set a uid-2", "set b uid-3", "set c uid-4", "set d uid-5", "synced"}
	h.wants(want...)
	watched(t, server)
	all := server.Requests()
	if len(all) != 3 {
		t.Fatalf("%d requests, want 3: %q", len(all), all)
	}
	const selector = "fieldSelector=spec.nodeName%3Dnode-1"
	check.Equal(t, queryOf(t, all[1]).Encode(), selector+"&limit=500&resourceVersion=0", "the list's query")
	query := queryOf(t, all[2])
	wantsTimeout(t, query)
	check.Equal(t, query.Encode(), "allowWatchBookmarks=true&"+selector+"&resourceVersion=5&watch=true", "the watch's query")
	set("e")
	remove("a")
	want = append(want, "set e uid-6", "gone a uid-2")
	h.wants(want...)

	// During an outage, one pod is deleted, one deleted and created again, one changed, and one created.
	server.Fail(kubetest.Unavailable, kubetest.Forever)
	server.CloseWatches()
	h.wants(append(want, "error: "+string(ServerError))...)
	remove("b")
	remove("c")
	set("c")
	set("d")
	set("f")
	server.Compact()
	server.Heal()
	agenttest.Eventually(t, "no second list", func() bool { return len(h.all()) == len(want)+8 })
	got := h.all()[len(want)+1:]
	if slices.Index(got, "gone c uid-4") > slices.Index(got, "set c uid-10") {
		t.Errorf("the new pod was reported before the deletion of the old one: %q", got)
	}
	slices.Sort(got[:5])
	check.Diff(t, "the second list", []string{"gone b uid-3", "gone c uid-4", "set c uid-10", "set d uid-5", "set f uid-12", "synced", "works"}, got)
}

// client-go delays an error by the time of the last error in the process, which in a bubble can lie in the future.
func init() { utilruntime.ErrorHandlers = nil } //nolint:reassign,gochecknoinits // for all tests of the package

// pauses returns the times between the requests of a watch within a time. The watch ends a second later because a goroutine of
// client-go would leak if the watch ended during an event (k8s.io/apimachinery/pkg/watch.Filter).
func pauses(t *testing.T, within time.Duration, next exchangeFunc) (between []time.Duration, reported []string) {
	t.Helper()
	var last time.Time
	over := time.Now().Add(within)
	api := clientOf(func(r *http.Request) (*http.Response, error) {
		if !time.Now().Before(over) {
			return hang()(r)
		}
		if !last.IsZero() {
			between = append(between, time.Since(last))
		}
		last = time.Now()
		return next(r)
	}, Config{Kubeconfig: "/no/such/istio-cni-kubeconfig"})
	h := &calls{t: t}
	ctx, cancel := context.WithTimeout(t.Context(), within+time.Second)
	defer cancel()
	h.configMap(ctx, api)
	return between, h.all()
}

func TestWatch_BackOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		between, reported := pauses(t, 10*time.Minute, reply(http.StatusInternalServerError, nil))
		for i, pause := range between {
			// A list follows a refused streaming list at once.
			if i%2 == 1 && (pause < 800*time.Millisecond || pause > time.Minute) {
				t.Errorf("pause %d is %v, want 800ms to 1m", i, pause)
			}
		}
		if len(between) < 20 || len(between) > 120 {
			t.Errorf("%d requests in 10 minutes", len(between))
		}
		check.Diff(t, "calls", []string{"error: " + string(ServerError)}, reported)
	})
}

func TestWatch_RetryAfter(t *testing.T) {
	for seconds, want := range map[int]time.Duration{7: 7 * time.Second, 1 << 30: maxRetryAfter} {
		synctest.Test(t, func(t *testing.T) {
			between, _ := pauses(t, time.Hour, retryAfter(seconds))
			for i, pause := range between {
				if pause < want || pause > want+time.Minute {
					t.Errorf("pause %d is %v, want at least %v", i, pause, want)
				}
			}
			if len(between) == 0 {
				t.Error("no further request")
			}
		})
	}
}

// emptyThen responds to a list with an empty list, and to a watch with the result of watch.
func emptyThen(watch exchangeFunc) exchangeFunc {
	list := reply(http.StatusOK, []byte(`{"kind": "ConfigMapList", "apiVersion": "v1", "metadata": {"resourceVersion": "5"}}`))
	return func(r *http.Request) (*http.Response, error) {
		if r.URL.Query().Has("sendInitialEvents") {
			return reply(http.StatusUnprocessableEntity, nil)(r)
		}
		if r.URL.Query().Get("watch") == "true" {
			return watch(r)
		}
		return list(r)
	}
}

// silentBody is the body of a watch without an event for a time, or until the request is canceled.
type silentBody struct {
	ctx  context.Context //nolint:containedctx // of the request
	span time.Duration
}

func (s silentBody) Read([]byte) (int, error) {
	if sleep(s.ctx, s.span) {
		return 0, io.EOF
	}
	return 0, s.ctx.Err()
}

func (silentBody) Close() error { return nil }

func silentFor(d time.Duration) exchangeFunc {
	return func(r *http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: http.StatusOK, ContentLength: -1, Body: silentBody{r.Context(), d}}, nil
	}
}

func TestWatch_EndsAtOnce(t *testing.T) {
	for name, watch := range map[string]exchangeFunc{
		"with nothing": reply(http.StatusOK, nil),
		"with a 410":   reply(http.StatusOK, []byte(`{"type": "ERROR", "object": {"kind": "Status", "apiVersion": "v1", "code": 410}}`)),
		"by a 410":     reply(http.StatusGone, nil),
		"with a bookmark": reply(http.StatusOK, []byte(
			`{"type": "BOOKMARK", "object": {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"resourceVersion": "6"}}}`)),
	} {
		bubble(t, name, func(t *testing.T) {
			between, reported := pauses(t, 10*time.Minute, emptyThen(watch))
			// client-go's own random pauses are sometimes longer; ours allow one request each 3 s.
			if len(between) > burst+10*60/3 {
				t.Errorf("%d requests in 10 minutes", len(between))
			}
			check.Diff(t, "calls", []string{"absent"}, reported)
		})
	}
}

// TestWatch_EndsLater: the next watch follows at once when a watch ends, or has no event for longer than IdleTimeout.
func TestWatch_EndsLater(t *testing.T) {
	for span, want := range map[time.Duration]time.Duration{time.Minute: time.Minute, 24 * time.Hour: 150 * time.Second} {
		bubble(t, span.String(), func(t *testing.T) {
			between, reported := pauses(t, time.Hour, emptyThen(silentFor(span)))
			for i, pause := range between[2:] {
				if pause < want || pause > want+time.Second {
					t.Errorf("watch %d was followed after %v, want %v to a second more", i, pause, want)
				}
			}
			if check.Diff(t, "calls", []string{"absent"}, reported); len(between) < 20 {
				t.Errorf("%d requests", len(between))
			}
		})
	}
	bubble(t, "without a response", func(t *testing.T) {
		between, reported := pauses(t, time.Hour, emptyThen(hang()))
		if check.Diff(t, "calls", []string{"absent", "error: " + string(Timeout)}, reported); len(between) < 20 {
			t.Errorf("%d requests", len(between))
		}
	})
}

func TestWatch_EndlessEvent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		endless := func(_ *http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: http.StatusOK, ContentLength: -1, Body: io.NopCloser(spaces{})}, nil
		}
		between, _ := pauses(t, 2*time.Second, emptyThen(endless))
		if len(between) < 2 {
			t.Errorf("%d requests, want an end of the endless event", len(between)+1)
		}
	})
}

type spaces struct{}

func (spaces) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}

// TestWatch_Protobuf: protobuf, which the real API server sends, gives the same events.
func TestWatch_Protobuf(t *testing.T) {
	t.Parallel()
	server, h := newFixture(t, (*kubetest.Server).Protobuf, nil)
	h.wants("mode=a")
	watched(t, server)
	server.Set(config("b"))
	server.Delete(mapPath)
	h.wants("mode=a", "mode=b", "absent")
	server.CloseWatches()
	watched(t, server)
	server.Set(config("c"))
	h.wants("mode=a", "mode=b", "absent", "mode=c")
}
