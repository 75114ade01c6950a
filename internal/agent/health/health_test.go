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

	"github.com/meshcni/istio-cni/internal/test/check"
)

// fixture is a state with a clock that only the test moves, its log and its changes.
type fixture struct {
	*State

	now     time.Time
	log     bytes.Buffer
	changes []bool
}

func newFixture(parts ...PartName) *fixture {
	b := &fixture{now: time.Date(2026, 5, 4, 3, 2, 1, 0, time.UTC)}
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
		check.Equal(t, rec.Header().Get("Content-Type"), "application/json", "content type is")
	}
	return rec.Code, strings.TrimSpace(rec.Body.String())
}

// expect checks the answer of a path.
func (b *fixture) expect(t *testing.T, path string, code int, body string) {
	t.Helper()
	gotCode, got := get(t, b.Handler(), http.MethodGet, path)
	check.Diff(t, "result", fmt.Sprint(code, " ", body), fmt.Sprint(gotCode, " ", got))
}

// changed checks all changes of readiness so far.
func (b *fixture) changed(t *testing.T, want ...bool) {
	t.Helper()
	check.Diff(t, "changes", want, b.changes)
}

func TestReadyz_PartsAndReasons(t *testing.T) {
	b := newFixture("binaries", "cni-config")
	b.expect(t, "/readyz", 503, `{"ready":false,"parts":[`+
		`{"name":"binaries","ready":false,"reason":"starting","since":"2026-05-04T03:02:01Z"},`+
		`{"name":"cni-config","ready":false,"reason":"starting","since":"2026-05-04T03:02:01Z"}]}`)

	b.now = b.now.Add(time.Second)
	b.Ready("binaries")
	b.NotReady("cni-config", "waiting for a CNI configuration in /host/etc/cni/net.d")
	b.expect(t, "/readyz", 503, `{"ready":false,"parts":[`+
		`{"name":"binaries","ready":true,"since":"2026-05-04T03:02:02Z","checked":"2026-05-04T03:02:02Z"},`+
		`{"name":"cni-config","ready":false,"reason":"waiting for a CNI configuration in /host/etc/cni/net.d",`+
		`"since":"2026-05-04T03:02:02Z","checked":"2026-05-04T03:02:02Z"}]}`)

	b.now = b.now.Add(time.Second)
	b.Ready("binaries") // once more changes nothing
	b.Ready("cni-config")
	b.expect(t, "/readyz", 200, `{"ready":true,"parts":[`+
		`{"name":"binaries","ready":true,"since":"2026-05-04T03:02:02Z","checked":"2026-05-04T03:02:03Z"},`+
		`{"name":"cni-config","ready":true,"since":"2026-05-04T03:02:03Z","checked":"2026-05-04T03:02:03Z"}]}`)
}

// TestReadyz_OverduePart: a part whose report is overdue is not ready.
func TestReadyz_OverduePart(t *testing.T) {
	b := newFixture("config", "other")
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
	b.changed(t, true, false)
	if checked := b.Snapshot().Parts[0].Checked; !checked.Equal(b.now.Add(-10*time.Second - time.Millisecond)) {
		t.Errorf("last checked %v, now %v", checked, b.now)
	}
	b.Ready("config")
	step(time.Hour, true, "")
	b.Expect("config", time.Minute, "nothing was compared")
	b.Ready("config") // reported, so no longer due
	step(time.Hour, true, "")
	b.NotReady("config", "its own reason")
	b.Expect("config", time.Second, "nothing was compared")
	step(time.Hour, false, "its own reason")
}

func TestReadyz_ChangesReportedOnce(t *testing.T) {
	b := newFixture("config")
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
	// Two changes of readiness, and four of the part, each with its reason.
	check.Equal(t, strings.Count(b.log.String(), "\n"), 6, "records in", b.log.String())
	for want, times := range map[string]int{"part=config": 4, "reason=waiting": 1, "reason=unknown": 1, `reason="fighting with cilium"`: 1} {
		check.Equal(t, strings.Count(b.log.String(), want), times, "records with", want, "in", b.log.String())
	}
	b.changed(t, true, false)
}

func TestReadyz_EveryPart(t *testing.T) {
	b := newFixture("a", "b")
	b.Ready("a")
	half := b.Snapshot()
	b.Ready("b")
	if half.Ready || half.Parts[1].Ready {
		t.Errorf("by half of the parts it is, or became %+v", half)
	}
	b.NotReady("late", "a part of its own")
	b.changed(t, true, false)
	if s := b.Snapshot(); s.Ready || len(s.Parts) != 3 {
		t.Errorf("with the late part it is %+v", s)
	}
	b.Ready("late")
	check.Equal(t, b.Snapshot().Ready, true, "ready when all parts are")
}

func TestReadyz_NoParts(t *testing.T) {
	b := newFixture()
	b.expect(t, "/readyz", 200, `{"ready":true,"parts":[]}`)
	b.changed(t, true)
}

func TestHealthz_MissedHeartbeats(t *testing.T) {
	b := newFixture("never-ready")
	b.expect(t, "/healthz", 200, `{"live":true}`) // not ready, and no loop
	b.Beat("watch", 10*time.Second)
	b.Beat("api", time.Minute)
	b.now = b.now.Add(30 * time.Second)
	b.expect(t, "/healthz", 200, `{"live":true}`)
	b.now = b.now.Add(time.Millisecond)
	b.expect(t, "/healthz", 503,
		`{"live":false,"silent":[{"name":"watch","last":"2026-05-04T03:02:01Z","every":"10s"}]}`)
	b.now = b.now.Add(10 * time.Minute)
	b.expect(t, "/healthz", 503, `{"live":false,"silent":[`+
		`{"name":"api","last":"2026-05-04T03:02:01Z","every":"1m0s"},`+
		`{"name":"watch","last":"2026-05-04T03:02:01Z","every":"10s"}]}`)
	b.Beat("watch", 10*time.Second)
	b.Rest("api")
	b.expect(t, "/healthz", 200, `{"live":true}`)
}

func TestEndpoints_Methods(t *testing.T) {
	b := newFixture()
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

func TestReadyz_Concurrent(t *testing.T) {
	s := NewState(Options{}, "a", "b")
	var all sync.WaitGroup
	for _, part := range []PartName{"a", "b"} {
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
	check.Equal(t, s.Snapshot().Ready, true, "ready in the end")
}
