package kube

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
)

const mapPath = "/api/v1/namespaces/istio-system/configmaps/istio-cni-config"

func config(mode string) []byte {
	return kubetest.ConfigMap("istio-system", "istio-cni-config", map[string]string{"mode": mode})
}

// heard is what a listener was told, in order: "absent", "mode=x", "trouble: CLASS", "well".
type heard struct {
	t *testing.T

	mu    sync.Mutex
	lines []string
	news  chan struct{}
}

func newHeard(t *testing.T) *heard { return &heard{t: t, news: make(chan struct{}, 1)} }

func (h *heard) say(line string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lines = append(h.lines, line)
	select {
	case h.news <- struct{}{}:
	default:
	}
}

func (h *heard) all() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.lines)
}

func (h *heard) trouble(err error) {
	if err == nil {
		h.say("well")
		return
	}
	h.say("trouble: " + string(ClassOf(err)))
}

// configMap watches the ConfigMap.
func (h *heard) configMap(ctx context.Context, api *Client) {
	api.WatchConfigMap(ctx, "istio-system", "istio-cni-config", func(data map[string]string) {
		if data == nil {
			h.say("absent")
			return
		}
		h.say("mode=" + data["mode"])
	}, h.trouble)
}

// wants waits until all that was told is what is wanted.
func (h *heard) wants(lines ...string) {
	h.t.Helper()
	deadline := time.NewTimer(2 * time.Minute)
	defer deadline.Stop()
	for {
		got := h.all()
		if slices.Equal(got, lines) {
			return
		}
		if len(got) > len(lines) || !slices.Equal(got, lines[:len(got)]) {
			h.t.Fatalf("was told %q, want %q", got, lines)
		}
		select {
		case <-h.news:
		case <-deadline.C:
			h.t.Fatalf("was told no more than %q, want %q", h.all(), lines)
		}
	}
}

// until waits for a condition of the server.
func until(t *testing.T, what string, holds func() bool) {
	t.Helper()
	deadline := time.NewTimer(2 * time.Minute)
	defer deadline.Stop()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("gave up waiting: %s", what)
		}
	}
}

// background follows something until the test ends or it is stopped.
func background(t *testing.T, follow func(context.Context)) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var over sync.WaitGroup
	over.Go(func() { follow(ctx) })
	stop = func() {
		cancel()
		over.Wait()
	}
	t.Cleanup(stop)
	return stop
}

// ignoring is a listener that nothing is told to yet.
func ignoring[T any]() Listener[T] {
	return Listener[T]{OnUpdate: func(T) {}, OnDelete: func(T) {}, OnSync: func() {}, OnError: func(error) {}}
}

func watched(t *testing.T, server *kubetest.Server) {
	t.Helper()
	until(t, "no watch was opened", func() bool { return server.Watches() == 1 })
}

// lists and watches are the requests of either sort: one that streams a list is a list.
func lists(server *kubetest.Server) []string {
	return slices.DeleteFunc(server.Requests(), func(r string) bool { return !isList(r) })
}

func watches(server *kubetest.Server) []string { return slices.DeleteFunc(server.Requests(), isList) }

func isList(request string) bool {
	return !strings.Contains(request, "watch=true") || strings.Contains(request, "sendInitialEvents=true")
}

// following follows the ConfigMap until the test ends.
func following(t *testing.T, server *kubetest.Server, change func(*Config)) *heard {
	t.Helper()
	h := newHeard(t)
	api := connected(t, server, change)
	background(t, func(ctx context.Context) { h.configMap(ctx, api.Client) })
	return h
}

func TestWatchConfigMap(t *testing.T) {
	server := kubetest.NewServer(t)
	server.Set(config("a"))
	server.Set(kubetest.ConfigMap("istio-system", "another", map[string]string{"mode": "z"}))
	server.Set(kubetest.ConfigMap("elsewhere", "istio-cni-config", map[string]string{"mode": "z"}))
	h := following(t, server, nil)
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
	if got := query.Encode(); got != want {
		t.Errorf("the query is %q, want %q", got, want)
	}
}

// TestWatchAsksForAListOfTheWatchCache is about API servers that do not stream lists.
func TestWatchAsksForAListOfTheWatchCache(t *testing.T) {
	server := kubetest.NewServer(t)
	server.ListsOnly()
	server.Set(config("a"))
	h := following(t, server, nil)
	h.wants("mode=a")
	watched(t, server)
	server.Set(config("b"))
	h.wants("mode=a", "mode=b")
	all := server.Requests()
	if len(all) != 3 {
		t.Fatalf("%d requests, want 3: %q", len(all), all)
	}
	const selector = "fieldSelector=metadata.name%3Distio-cni-config"
	if got, want := queryOf(t, all[1]).Encode(), selector+"&limit=500&resourceVersion=0"; got != want {
		t.Errorf("the list's query is %q, want %q", got, want)
	}
	query := queryOf(t, all[2])
	wantsTimeout(t, query)
	if got, want := query.Encode(), "allowWatchBookmarks=true&"+selector+"&resourceVersion=2&watch=true"; got != want {
		t.Errorf("the watch's query is %q, want %q", got, want)
	}
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
	if err != nil {
		t.Fatal(err)
	}
	return values
}

// TestWatchGoesOnWhereItWas ends watches: nothing that happens meanwhile is missed, and no list is asked for.
func TestWatchGoesOnWhereItWas(t *testing.T) {
	for name, end := range map[string]func(*kubetest.Server){
		"after a proper end":                                (*kubetest.Server).CloseWatches,
		"after an end in the middle of an event":            (*kubetest.Server).BreakWatches,
		"after an end, before which nothing is known later": func(s *kubetest.Server) { s.Compact(); s.CloseWatches() },
	} {
		t.Run(name, func(t *testing.T) {
			server := kubetest.NewServer(t)
			server.Set(config("a"))
			h := following(t, server, nil)
			watched(t, server)
			server.Set(config("b"))
			h.wants("mode=a", "mode=b")
			end(server)
			server.Set(config("c"))
			h.wants("mode=a", "mode=b", "mode=c")
			watched(t, server)
			if got := len(lists(server)); got != 1 {
				t.Errorf("%d lists, want 1", got)
			}
			if all := watches(server); len(all) < 1 || queryOf(t, all[0]).Get("resourceVersion") != "3" {
				t.Errorf("watches: %q, want the first from version 3", all)
			}
		})
	}
}

// elsewhere lets something happen that no watch is about.
func elsewhere(s *kubetest.Server) { s.Set(kubetest.ConfigMap("elsewhere", "other", nil)) }

func TestWatchHeedsBookmarks(t *testing.T) {
	server := kubetest.NewServer(t)
	server.Set(config("a"))
	h := following(t, server, nil)
	watched(t, server)
	elsewhere(server)
	server.Bookmark()
	server.Compact()
	server.CloseWatches()
	server.Set(config("b"))
	h.wants("mode=a", "mode=b")
	if got := len(lists(server)); got != 1 {
		t.Errorf("%d lists, want 1: the bookmark was newer than what was forgotten", got)
	}
}

func TestWatchListsAgainWhenItsPlaceIsForgotten(t *testing.T) {
	for name, forget := range map[string]func(*kubetest.Server){
		"as an event of the watch": func(s *kubetest.Server) {
			elsewhere(s)
			s.Compact()
			s.CloseWatches()
		},
		"as the answer": func(s *kubetest.Server) {
			s.FailOn("watch=true", kubetest.Gone, 1)
			s.CloseWatches()
		},
		"as a refusal of another kind": func(s *kubetest.Server) {
			s.FailOn("watch=true", kubetest.BadRequest, 1)
			s.CloseWatches()
		},
	} {
		t.Run(name, func(t *testing.T) {
			server := kubetest.NewServer(t)
			server.Set(config("a"))
			h := following(t, server, nil)
			watched(t, server)
			server.Set(config("b")) // a watch without events that ends soon is followed by a list
			h.wants("mode=a", "mode=b")
			forget(server)
			until(t, "no second list", func() bool { return len(lists(server)) >= 2 })
			watched(t, server)
			server.Set(config("c"))
			want := []string{"mode=a", "mode=b", "mode=c"}
			if name == "as a refusal of another kind" {
				want = []string{"mode=a", "mode=b", "trouble: " + string(Rejected), "well", "mode=c"}
			}
			h.wants(want...)
		})
	}
}

func TestWatchNoticesWhatHappenedBetweenTwoLists(t *testing.T) {
	server := kubetest.NewServer(t)
	server.Set(config("a"))
	h := following(t, server, nil)
	watched(t, server)
	server.Delete(mapPath)
	h.wants("mode=a", "absent")
	server.Set(config("a"))
	h.wants("mode=a", "absent", "mode=a")
	// Nobody hears of this one but by the next list.
	server.FailOn("watch=true", kubetest.Unavailable, kubetest.Forever)
	server.CloseWatches()
	h.wants("mode=a", "absent", "mode=a", "trouble: "+string(ServerError))
	server.Delete(mapPath)
	server.Compact()
	server.Heal()
	h.wants("mode=a", "absent", "mode=a", "trouble: "+string(ServerError), "well", "absent")
}

// TestWatchSaysWhatIsWrongOnce lets tries fail many times.
func TestWatchSaysWhatIsWrongOnce(t *testing.T) {
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
		{kubetest.Truncated, ConnectionLost}, // of HTTP/2, a stream that was reset
	} {
		t.Run(string(test.fault), func(t *testing.T) {
			server := kubetest.NewServer(t)
			server.Set(config("a"))
			server.Fail(test.fault, kubetest.Forever)
			h := following(t, server, nil)
			until(t, "too few tries", func() bool { return len(server.Requests()) > 5 })
			h.wants("trouble: " + string(test.class))
			server.HealFrom("sendInitialEvents=true") // client-go asks for a list after a stream that failed
			h.wants("trouble: "+string(test.class), "well", "mode=a")
			watched(t, server)
			server.FailOn("watch=true", kubetest.TooMany, kubetest.Forever)
			server.SetRetryAfter(0)
			server.CloseWatches()
			h.wants("trouble: "+string(test.class), "well", "mode=a", "trouble: "+string(TooManyRequests))
			server.Heal()
			h.wants("trouble: "+string(test.class), "well", "mode=a", "trouble: "+string(TooManyRequests), "well")
		})
	}
}

func TestWatchTellsATroubleInTheWatch(t *testing.T) {
	for name, tell := range map[string]struct {
		kind, object string
		class        Class
	}{
		"an error of the server":     {"ERROR", `{"kind": "Status", "apiVersion": "v1", "code": 500, "message": "etcd"}`, ServerError},
		"an error that makes none":   {"ERROR", `"?"`, Undecodable},
		"an object that makes none":  {"MODIFIED", `{"kind": "ConfigMap"}`, Undecodable},
		"data that makes none":       {"MODIFIED", `{"metadata": {"name": "x", "resourceVersion": "9"}, "data": 7}`, Undecodable},
		"a bookmark that makes none": {"BOOKMARK", `7`, Undecodable},
		"an event of the future":     {"MOVED", string(config("x")), Undecodable},
	} {
		t.Run(name, func(t *testing.T) {
			server := kubetest.NewServer(t)
			server.Set(config("a"))
			h := following(t, server, nil)
			h.wants("mode=a") // the stream is read ahead of it
			server.Tell(tell.kind, []byte(tell.object))
			h.wants("mode=a", "trouble: "+string(tell.class), "well")
			if got := len(lists(server)); got != 2 {
				t.Errorf("%d lists, want 2", got)
			}
		})
	}
}

func TestWatchLeavesAServerThatHangs(t *testing.T) {
	t.Run("in a watch", func(t *testing.T) {
		server := kubetest.NewServer(t)
		server.Set(config("a"))
		h := following(t, server, func(a *Config) { a.IdleTimeout = 50 * time.Millisecond })
		until(t, "no further watch", func() bool { return len(server.Requests()) > 2 })
		h.wants("mode=a")
	})
	t.Run("before a watch is open", func(t *testing.T) {
		server := kubetest.NewServer(t)
		server.Set(config("a"))
		server.FailOn("watch=true", kubetest.Hang, kubetest.Forever)
		h := following(t, server, func(a *Config) { a.Timeout = time.Second })
		h.wants("trouble: "+string(Timeout), "mode=a")
		server.Heal()
		h.wants("trouble: "+string(Timeout), "mode=a", "well")
	})
	t.Run("in a list", func(t *testing.T) {
		server := kubetest.NewServer(t)
		server.Set(config("a"))
		server.Fail(kubetest.HangMidBody, 1)
		h := following(t, server, func(a *Config) { a.Timeout = time.Second })
		h.wants("trouble: "+string(Timeout), "well", "mode=a")
	})
}

func TestWatchSurvivesARotation(t *testing.T) {
	server := kubetest.NewServer(t)
	server.Set(config("a"))
	token := ""
	h := following(t, server, func(c *Config) { token = c.TokenFile })
	watched(t, server)
	kubetest.Write(t, token, "the-next-one")
	server.SetToken("the-next-one")
	server.CloseWatches()
	watched(t, server)
	server.Set(config("b"))
	h.wants("mode=a", "trouble: "+string(Unauthorized), "well", "mode=b") // client-go reads the file again within a minute
}

func TestWatchEndsWithItsContext(t *testing.T) {
	for name, given := range map[string]func(*kubetest.Server){
		"in a watch": nil,
		"in a list":  func(s *kubetest.Server) { s.Fail(kubetest.Hang, kubetest.Forever) },
		"in a pause": func(s *kubetest.Server) { s.SetRetryAfter(3600); s.Fail(kubetest.TooMany, kubetest.Forever) },
	} {
		t.Run(name, func(t *testing.T) {
			server := kubetest.NewServer(t)
			if given != nil {
				given(server)
			}
			api, h := connected(t, server, nil), newHeard(t)
			stop := background(t, func(ctx context.Context) { h.configMap(ctx, api.Client) })
			until(t, "nothing was asked", func() bool { return len(server.Requests()) > 0 })
			stop()
			if got := h.all(); slices.Contains(got, "trouble: "+string(Canceled)) {
				t.Errorf("the end was told as a trouble: %q", got)
			}
		})
	}
}

// TestWatchKeepsManyObjects follows pods of a server that does not stream lists.
func TestWatchKeepsManyObjects(t *testing.T) {
	server := kubetest.NewServer(t)
	server.ListsOnly()
	pod := func(name string) kubetest.Pod { return kubetest.Pod{Namespace: "shop", Name: name} }
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		server.Set(pod(name).JSON(t))
	}
	h := newHeard(t)
	api := connected(t, server, nil)
	background(t, func(ctx context.Context) {
		told := map[string]bool{}
		line := func(p Pod) string { return p.Facts.Namespace + "/" + p.Facts.Name + " " + p.Facts.UID }
		api.WatchPods(ctx, PodScope{Node: "node-1"}, Listener[Pod]{
			OnUpdate: func(p Pod) { told[line(p)] = true; h.say("set " + p.Facts.Name) },
			OnDelete: func(p Pod) { delete(told, line(p)); h.say("gone " + p.Facts.Name) },
			OnSync:   func() { h.say(strings.Join(slices.Sorted(maps.Keys(told)), ", ")) },
			OnError:  h.trouble,
		})
	})
	watched(t, server)
	until(t, "not all told", func() bool { return len(h.all()) == 6 })
	if got, want := h.all()[5], "shop/a uid-2, shop/b uid-3, shop/c uid-4, shop/d uid-5, shop/e uid-6"; got != want {
		t.Errorf("the list: got %q, want %q", got, want)
	}
	if got := len(lists(server)); got != 2 {
		t.Errorf("%d requests for lists, want one that is refused and one of a page", got)
	}
	server.Set(pod("f").JSON(t))
	server.Delete("/api/v1/namespaces/shop/pods/a")
	until(t, "the watch told nothing", func() bool { return len(h.all()) == 8 })
	if diff := cmp.Diff([]string{"set f", "gone a"}, h.all()[6:]); diff != "" {
		t.Errorf("the watch (-want +got):\n%s", diff)
	}

	// While nobody looks: one deleted, one deleted and created anew, one changed, one new.
	server.Fail(kubetest.Unavailable, kubetest.Forever)
	server.CloseWatches()
	until(t, "no trouble", func() bool { return len(h.all()) == 9 })
	server.Delete("/api/v1/namespaces/shop/pods/b")
	server.Delete("/api/v1/namespaces/shop/pods/c")
	server.Set(pod("c").JSON(t))
	server.Set(pod("d").JSON(t))
	server.Set(pod("g").JSON(t))
	server.Compact()
	server.Heal()
	until(t, "no second list", func() bool { return len(h.all()) == 16 })
	rest := h.all()[9:]
	slices.Sort(rest[:5])
	want := []string{
		"gone b", "gone c", "set c", "set d", "set g",
		"shop/c uid-11, shop/d uid-5, shop/e uid-6, shop/f uid-7, shop/g uid-13", "well",
	}
	if diff := cmp.Diff(want, rest); diff != "" {
		t.Errorf("the second list (-want +got):\n%s", diff)
	}
	if got := h.all(); slices.Index(got, "gone c") > slices.Index(got, "set c") && slices.Index(got, "set c") > 9 {
		t.Errorf("the new one was told before the old one was gone: %q", got)
	}
}

// client-go spreads errors by the time of the last one in the process, which for a bubble lies in the future.
func init() { utilruntime.ErrorHandlers = nil } //nolint:reassign,gochecknoinits // for all tests of the package

// pauses are the times between the requests of a follower within a while. The end comes a second later, as a goroutine of
// client-go stays for ever when it comes while an event is on its way (k8s.io/apimachinery/pkg/watch.Filter).
func pauses(t *testing.T, within time.Duration, next exchangeFunc) (between []time.Duration, told []string) {
	t.Helper()
	var last time.Time
	over := time.Now().Add(within)
	api := clientOf(func(r *http.Request) (*http.Response, error) {
		if !time.Now().Before(over) {
			return hangs()(r)
		}
		if !last.IsZero() {
			between = append(between, time.Since(last))
		}
		last = time.Now()
		return next(r)
	}, Config{Kubeconfig: "/no/such/istio-cni-kubeconfig"})
	h := newHeard(t)
	ctx, cancel := context.WithTimeout(t.Context(), within+time.Second)
	defer cancel()
	h.configMap(ctx, api)
	return between, h.all()
}

func TestWatchBacksOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		between, told := pauses(t, 10*time.Minute, answers(http.StatusInternalServerError, nil))
		for i, pause := range between {
			// A list follows a watch that is to stream one at once.
			if i%2 == 1 && (pause < 800*time.Millisecond || pause > time.Minute) {
				t.Errorf("pause %d is %v, want 800ms to 1m", i, pause)
			}
		}
		if len(between) > 120 {
			t.Errorf("%d tries in 10 minutes", len(between))
		}
		if len(between) < 20 {
			t.Errorf("%d tries in 10 minutes", len(between))
		}
		if diff := cmp.Diff([]string{"trouble: " + string(ServerError)}, told); diff != "" {
			t.Errorf("told (-want +got):\n%s", diff)
		}
	})
}

func TestWatchHeedsRetryAfter(t *testing.T) {
	for seconds, want := range map[int]time.Duration{7: 7 * time.Second, 1 << 30: maxRetryAfter} {
		synctest.Test(t, func(t *testing.T) {
			between, _ := pauses(t, time.Hour, asksToWait(seconds))
			for i, pause := range between {
				if pause < want || pause > want+time.Minute {
					t.Errorf("pause %d is %v, want at least %v", i, pause, want)
				}
			}
			if len(between) == 0 {
				t.Error("no further try")
			}
		})
	}
}

// emptyThen answers a list with nothing in it and watches as given.
func emptyThen(watch exchangeFunc) exchangeFunc {
	list := answers(http.StatusOK, []byte(`{"kind": "ConfigMapList", "apiVersion": "v1", "metadata": {"resourceVersion": "5"}}`))
	return func(r *http.Request) (*http.Response, error) {
		if r.URL.Query().Has("sendInitialEvents") {
			return answers(http.StatusUnprocessableEntity, nil)(r)
		}
		if r.URL.Query().Get("watch") == "true" {
			return watch(r)
		}
		return list(r)
	}
}

// silent is the body of a watch in which nothing happens for a time, or until it is given up.
type silent struct {
	ctx  context.Context //nolint:containedctx // it is a request's
	span time.Duration
}

func (s silent) Read([]byte) (int, error) {
	if Sleep(s.ctx, s.span) {
		return 0, io.EOF
	}
	return 0, s.ctx.Err()
}

func (silent) Close() error { return nil }

func silentFor(d time.Duration) exchangeFunc {
	return func(r *http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: http.StatusOK, ContentLength: -1, Body: silent{r.Context(), d}}, nil
	}
}

func TestWatchDoesNotHurryAfterWatchesThatEndAtOnce(t *testing.T) {
	for name, watch := range map[string]exchangeFunc{
		"with nothing": answers(http.StatusOK, nil),
		"with a 410":   answers(http.StatusOK, []byte(`{"type": "ERROR", "object": {"kind": "Status", "apiVersion": "v1", "code": 410}}`)),
		"by a 410":     answers(http.StatusGone, nil),
	} {
		bubble(t, name, func(t *testing.T) {
			between, told := pauses(t, 10*time.Minute, emptyThen(watch))
			// client-go's own pauses are longer at times, at random; ours are one request each 3 s.
			if len(between) > burst+10*60/3 {
				t.Errorf("%d requests in 10 minutes", len(between))
			}
			if diff := cmp.Diff([]string{"absent"}, told); diff != "" {
				t.Errorf("told (-want +got):\n%s", diff)
			}
		})
	}
}

func TestWatchComesBackSoonAfterAWatchThatLasted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		between, _ := pauses(t, time.Hour, emptyThen(silentFor(time.Minute)))
		for i, pause := range between[2:] {
			if pause < time.Minute || pause > time.Minute+time.Second {
				t.Errorf("watch %d was followed after %v, want 1m to 1m1s", i, pause)
			}
		}
	})
}

func TestWatchGivesUpASilentWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		between, told := pauses(t, time.Hour, emptyThen(silentFor(24*time.Hour)))
		for i, pause := range between[2:] {
			if pause < 150*time.Second || pause > 151*time.Second {
				t.Errorf("watch %d was given up after %v, want 150s to 151s", i, pause)
			}
		}
		if diff := cmp.Diff([]string{"absent"}, told); diff != "" || len(between) < 20 {
			t.Errorf("%d requests, told (-want +got):\n%s", len(between), diff)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		between, told := pauses(t, time.Hour, emptyThen(hangs()))
		if diff := cmp.Diff([]string{"absent", "trouble: " + string(Timeout)}, told); diff != "" || len(between) < 20 {
			t.Errorf("%d requests, told (-want +got):\n%s", len(between), diff)
		}
	})
}

func TestWatchBoundsWhatItReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		endless := func(_ *http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: http.StatusOK, ContentLength: -1, Body: io.NopCloser(spaces{})}, nil
		}
		between, _ := pauses(t, 2*time.Second, emptyThen(endless))
		if len(between) < 2 {
			t.Errorf("%d requests, want that an endless event is left", len(between)+1)
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
