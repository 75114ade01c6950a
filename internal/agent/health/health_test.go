package health

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// bench is a state with a clock that stands until it is moved, with its log and its changes.
type bench struct {
	*State

	now     time.Time
	log     bytes.Buffer
	changes []bool
}

func newBench(parts ...string) *bench {
	b := &bench{now: time.Date(2026, 5, 4, 3, 2, 1, 0, time.UTC)}
	b.State = NewState(Options{
		Log:      slog.New(slog.NewTextHandler(&b.log, nil)),
		Now:      func() time.Time { return b.now },
		OnChange: func(ready bool) { b.changes = append(b.changes, ready) },
	}, parts...)
	return b
}

func get(t *testing.T, h http.Handler, method, path string) (int, string) {
	t.Helper()
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), method, path, nil))
	if rec.Code < 400 || rec.Code == http.StatusServiceUnavailable {
		if got := rec.Header().Get("Content-Type"); got != "application/json" {
			t.Errorf("content type is %q", got)
		}
	}
	return rec.Code, strings.TrimSpace(rec.Body.String())
}

func TestReadyzSaysWhichPartIsNotReadyAndWhy(t *testing.T) {
	b := newBench("binaries", "cni-config")
	expect := func(code int, body string) {
		t.Helper()
		gotCode, got := get(t, b.Handler(), http.MethodGet, "/readyz")
		if diff := cmp.Diff(fmt.Sprint(code, " ", body), fmt.Sprint(gotCode, " ", got)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
	expect(503, `{"ready":false,"parts":[`+
		`{"name":"binaries","ready":false,"reason":"starting","since":"2026-05-04T03:02:01Z"},`+
		`{"name":"cni-config","ready":false,"reason":"starting","since":"2026-05-04T03:02:01Z"}]}`)

	b.now = b.now.Add(time.Second)
	b.Ready("binaries")
	b.NotReady("cni-config", "waiting for a CNI configuration in /host/etc/cni/net.d")
	expect(503, `{"ready":false,"parts":[`+
		`{"name":"binaries","ready":true,"since":"2026-05-04T03:02:02Z","checked":"2026-05-04T03:02:02Z"},`+
		`{"name":"cni-config","ready":false,"reason":"waiting for a CNI configuration in /host/etc/cni/net.d",`+
		`"since":"2026-05-04T03:02:02Z","checked":"2026-05-04T03:02:02Z"}]}`)

	b.now = b.now.Add(time.Second)
	b.Ready("binaries") // once more changes nothing
	b.Ready("cni-config")
	expect(200, `{"ready":true,"parts":[`+
		`{"name":"binaries","ready":true,"since":"2026-05-04T03:02:02Z","checked":"2026-05-04T03:02:03Z"},`+
		`{"name":"cni-config","ready":true,"since":"2026-05-04T03:02:03Z","checked":"2026-05-04T03:02:03Z"}]}`)
}

// A part that has to report and does not is not ready.
func TestAPartThatIsDueIsNotReady(t *testing.T) {
	b := newBench("config", "other")
	b.Ready("config")
	b.Ready("other")
	b.Expect("config", 10*time.Second, "nothing was compared")
	step := func(after time.Duration, ready bool, reason string) {
		t.Helper()
		b.now = b.now.Add(after)
		s := b.Snapshot()
		if p := s.Parts[0]; s.Ready != ready || p.Ready != ready || p.Reason != reason || !s.Parts[1].Ready {
			t.Errorf("after %v: %+v, want ready %v because of %q", after, s, ready, reason)
		}
	}
	step(10*time.Second, true, "")
	step(time.Millisecond, false, "nothing was compared")
	if diff := cmp.Diff([]bool{true, false}, b.changes); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
	if checked := b.Snapshot().Parts[0].Checked; !checked.Equal(b.now.Add(-10*time.Second - time.Millisecond)) {
		t.Errorf("last checked %v, now %v", checked, b.now)
	}
	b.Ready("config")
	step(time.Hour, true, "")
	b.Expect("config", time.Minute, "nothing was compared")
	b.Ready("config") // reported, so not due any more
	step(time.Hour, true, "")
	b.NotReady("config", "its own reason")
	b.Expect("config", time.Second, "nothing was compared")
	step(time.Hour, false, "its own reason")
}

func TestEachChangeIsReportedOnce(t *testing.T) {
	b := newBench("config")
	for range 3 {
		b.NotReady("config", "waiting")
	}
	for range 3 {
		b.Ready("config")
	}
	for range 3 {
		b.NotReady("config", "")
	}
	b.NotReady("config", "fighting with cilium")
	// Two changes of readiness, and four of the part of which each has its reason.
	if got := strings.Count(b.log.String(), "\n"); got != 6 {
		t.Errorf("%d records: %s", got, b.log.String())
	}
	for want, times := range map[string]int{"part=config": 4, "reason=waiting": 1, "reason=unknown": 1, `reason="fighting with cilium"`: 1} {
		if got := strings.Count(b.log.String(), want); got != times {
			t.Errorf("%d records with %s: %s", got, want, b.log.String())
		}
	}
	if diff := cmp.Diff([]bool{true, false}, b.changes); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
}

func TestReadyNeedsEveryPart(t *testing.T) {
	b := newBench("a", "b")
	b.Ready("a")
	if b.Snapshot().Ready || b.changes != nil {
		t.Error("ready by half of the parts")
	}
	b.Ready("b")
	b.NotReady("late", "a part of its own")
	if diff := cmp.Diff([]bool{true, false}, b.changes); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
	if s := b.Snapshot(); s.Ready || len(s.Parts) != 3 {
		t.Errorf("with the late part it is %+v", s)
	}
	b.Ready("late")
	if !b.Snapshot().Ready {
		t.Error("not ready when all parts are")
	}
}

func TestWithoutPartsItIsReady(t *testing.T) {
	b := newBench()
	code, body := get(t, b.Handler(), http.MethodGet, "/readyz")
	if code != 200 || body != `{"ready":true,"parts":[]}` || len(b.changes) != 1 {
		t.Errorf("%d %s, changes %v", code, body, b.changes)
	}
}

func TestASnapshotDoesNotChange(t *testing.T) {
	b := newBench("a")
	before := b.Snapshot()
	b.Ready("a")
	if before.Ready || before.Parts[0].Ready {
		t.Errorf("the snapshot became %+v", before)
	}
}

func TestHealthzIsAboutBeatsOnly(t *testing.T) {
	b := newBench("never-ready")
	expect := func(name string, code int, body string) {
		t.Helper()
		gotCode, got := get(t, b.Handler(), http.MethodGet, "/healthz")
		if diff := cmp.Diff(fmt.Sprint(code, " ", body), fmt.Sprint(gotCode, " ", got)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	expect("not ready and no loop", 200, `{"live":true}`)
	b.Beat("watch", 10*time.Second)
	b.Beat("api", time.Minute)
	b.now = b.now.Add(30 * time.Second)
	expect("three intervals", 200, `{"live":true}`)
	b.now = b.now.Add(time.Millisecond)
	expect("more than three", 503,
		`{"live":false,"silent":[{"name":"watch","last":"2026-05-04T03:02:01Z","every":"10s"}]}`)
	b.now = b.now.Add(10 * time.Minute)
	expect("both, by name", 503, `{"live":false,"silent":[`+
		`{"name":"api","last":"2026-05-04T03:02:01Z","every":"1m0s"},`+
		`{"name":"watch","last":"2026-05-04T03:02:01Z","every":"10s"}]}`)
	b.Beat("watch", 10*time.Second)
	b.Rest("api")
	expect("beats again, and the other rests", 200, `{"live":true}`)
}

func TestEndpointsOnlyAnswerReaders(t *testing.T) {
	b := newBench()
	for _, c := range []struct {
		method, path string
		want         int
	}{
		{http.MethodHead, "/healthz", 200},
		{http.MethodHead, "/readyz", 200},
		{http.MethodPost, "/readyz", 405},
		{http.MethodGet, "/", 404},
		{http.MethodGet, "/debug/pprof/", 404},
	} {
		if got, _ := get(t, b.Handler(), c.method, c.path); got != c.want {
			t.Errorf("%s %s is answered with %d, want %d", c.method, c.path, got, c.want)
		}
	}
}

func TestReportsAndProbesAtTheSameTime(t *testing.T) {
	s := NewState(Options{}, "a", "b")
	var all sync.WaitGroup
	for _, part := range []string{"a", "b"} {
		all.Go(func() {
			for range 100 {
				s.NotReady(part, "x")
				s.Ready(part)
				s.Beat(part, time.Hour)
			}
		})
		all.Go(func() {
			for range 100 {
				if code, body := get(t, s.Handler(), http.MethodGet, "/healthz"); code != http.StatusOK {
					t.Error(body)
				}
				if _, err := json.Marshal(s.Snapshot()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	if !s.Snapshot().Ready {
		t.Error("not ready in the end")
	}
}
