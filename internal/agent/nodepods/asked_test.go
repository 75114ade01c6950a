package nodepods

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/agent/unixsock"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// askedFixture is a controller with pods that the schedule has inspected, and a clock that only requests and the test move.
type askedFixture struct {
	*fixture

	controller *Controller
	answer     string // the last one
	searching  *atomic.Pointer[func()]
}

// leftOut is the number of pods that the check of the last answer left out.
func (l *askedFixture) leftOut() int { return strings.Count(l.answer, `"leftOut": true`) }

const (
	askedPods = 10
	askedCost = 4 * time.Millisecond // of an inspection

	// The bounds of package auditor: the schedule's share of the time, the burst of each way, and the age of a shared result.
	duty        = 100
	burst       = 500 * time.Millisecond
	slow        = 100 * time.Millisecond
	socketBurst = 2 * time.Second
	portBurst   = time.Second
	sharedFor   = time.Second
)

func newAskedFixture(t *testing.T) *askedFixture {
	t.Helper()
	l := newFixture(t, nothing, func(o *Options) {
		o.Audit, o.Repair, o.Workers = auditor.Settings{Interval: time.Hour}, nil, 0
	})
	searching := &atomic.Pointer[func()]{}
	l.options.Find = func(context.Context, sandbox.Pod) (*sandbox.Namespace, error) {
		if do := searching.Load(); do != nil {
			(*do)()
		}
		l.searches.Add(1)
		l.clock.Step(askedCost)
		return nil, &sandbox.Error{Err: sandbox.ErrNotFound}
	}
	feed := l.feed()
	c := l.start()
	feed.crowd(askedPods)
	agenttest.Eventually(t, "some pod is not inspected at the start", func() bool {
		l.clock.Step(time.Microsecond) // ends a pause of the schedule
		return l.searches.Load() == askedPods
	})
	return &askedFixture{fixture: l, controller: c, searching: searching}
}

// ask requests a path by a way, with headers, and returns the status and the number of inspections until the answer.
func (l *askedFixture) ask(by auditor.Way, path string, headers ...string) (status int, inspections int64) {
	l.Helper()
	before := l.searches.Load()
	status, l.answer = l.controller.ask(l.Context(), by, path, headers...)
	return status, l.searches.Load() - before
}

// ask requests a path by a way, with headers, and returns the answer.
func (c *Controller) ask(ctx context.Context, by auditor.Way, path string, headers ...string) (status int, text string) {
	mux := http.NewServeMux()
	mux.Handle(agentapi.AuditPattern, c.Handler(by))
	mux.Handle(agentapi.AuditPodPattern, c.PodHandler(by))
	r := httptest.NewRequestWithContext(ctx, http.MethodGet, path, nil)
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	w := httptest.NewRecorder()
	mux.ServeHTTP(w, r)
	return w.Code, w.Body.String()
}

const (
	checkAll = "/v1/audit?check=true"
	onePod   = "/v1/audit/shop/web-0"
)

// TestRequests_Loop: inspections for endless requests take half a percent of the time, after a burst.
func TestRequests_Loop(t *testing.T) {
	t.Parallel()
	for _, by := range []auditor.Way{auditor.Port, auditor.Socket} {
		for _, path := range []string{checkAll, onePod} {
			t.Run(string(by)+path, func(t *testing.T) {
				t.Parallel()
				l := newAskedFixture(t)
				agenttest.Run(t, l.clock)
				began, before := l.clock.Now(), l.searches.Load()
				var took, elapsed time.Duration
				for elapsed < 2*time.Minute && took < 12*time.Second {
					l.ask(by, path)
					took, elapsed = time.Duration(l.searches.Load()-before)*askedCost, l.clock.Since(began)
				}
				// The schedule has one percent and a burst of its own, and the last request may take a whole round.
				if most := socketBurst + burst + askedPods*askedCost + elapsed*3/(2*duty); took > most {
					t.Errorf("the inspections took %s of %s, want at most %s", took, elapsed, most)
				}
			})
		}
	}
}

// TestRequests_BudgetUsedUp: the operator's commands inspect at once, even if the port's budget is used up.
func TestRequests_BudgetUsedUp(t *testing.T) {
	t.Parallel()
	l := newAskedFixture(t)
	c := l.controller
	for range portBurst/slow + 30 {
		c.auditor.Charge(auditor.Port, slow)
	}
	l.clock.Step(2 * sharedFor) // makes the results too old to share
	if status, inspections := l.ask(auditor.Socket, checkAll); status != http.StatusOK || inspections != askedPods {
		t.Errorf("the list at the socket: %d after %d inspections, want all pods", status, inspections)
	}
	if status, inspections := l.ask(auditor.Socket, onePod); status != http.StatusOK || inspections == 0 {
		t.Errorf("a pod at the socket: %d after %d inspections", status, inspections)
	}
	agenttest.Run(t, l.clock) // requests on the port wait
	if status, inspections := l.ask(auditor.Port, checkAll); status != http.StatusOK || inspections != 0 {
		t.Errorf("the list at the port: %d after %d inspections, want the last results", status, inspections)
	}
	if status, inspections := l.ask(auditor.Port, onePod); status != http.StatusTooManyRequests || inspections != 0 {
		t.Errorf("a pod at the port: %d after %d inspections", status, inspections)
	}
}

// TestRequests_ListThenPods: checks of all pods leave a part of the budget for single pods. Without budget a command gets recent
// results, and the answer names older ones.
func TestRequests_ListThenPods(t *testing.T) {
	t.Parallel()
	const recent = 10 * time.Second
	for _, by := range []auditor.Way{auditor.Port, auditor.Socket} {
		l := newAskedFixture(t)
		agenttest.Run(t, l.clock) // a request waits for its budget
		for inspections := int64(askedPods); inspections > 0; l.clock.Step(2 * sharedFor / askedPods) {
			var status int
			if status, inspections = l.ask(by, checkAll); status != http.StatusOK || l.leftOut() != 0 {
				t.Errorf("%s: %d after %d inspections, %d pods are left out", by, status, inspections, l.leftOut())
			}
		}
		if status, inspections := l.ask(by, onePod); status != http.StatusOK || inspections == 0 {
			t.Errorf("%s: %d after %d inspections", by, status, inspections)
		}
		for range 2 * socketBurst / slow {
			l.controller.auditor.Charge(by, slow)
		}
		l.clock.Step(recent)
		if status, inspections := l.ask(by, checkAll); status != http.StatusOK || inspections != 0 || l.leftOut() != askedPods {
			t.Errorf("%s: %d after %d inspections for old results, %d pods are left out", by, status, inspections, l.leftOut())
		}
	}
}

// TestRequests_TimeUsedUp: a check whose time is over answers, and names each pod that it did not reach.
func TestRequests_TimeUsedUp(t *testing.T) {
	t.Parallel()
	l := newAskedFixture(t)
	l.clock.Step(time.Second)
	ctx, end := context.WithCancel(t.Context())
	over := func() { end() }
	l.searching.Store(&over)
	const atOnce = 2
	left := l.controller.auditor.CheckAll(ctx, auditor.Socket)
	if got := len(left); got < askedPods-atOnce || got > askedPods {
		t.Errorf("%d pods are left out: %v", got, left)
	}
}

// TestRequests_SlowCheck: a check may take longer than the other requests to the server, and reaches all pods.
func TestRequests_SlowCheck(t *testing.T) {
	t.Parallel()
	l := newAskedFixture(t)
	l.clock.Step(time.Second)
	const limit = 20 * time.Millisecond
	slowly := func() { time.Sleep(limit) } // in all longer than the server's time to read and to write
	l.searching.Store(&slowly)
	s := agenttest.Serve(t, l.controller.Handler(auditor.Socket), func(o *unixsock.Options) { o.Timeout = limit })
	agent, err := agentapi.Dial(t.Context(), s.Path)
	check.OK(t, err)
	all, err := agent.Audit(t.Context(), true, "")
	if err != nil || len(all) != askedPods || slices.ContainsFunc(all, func(s audit.Status) bool { return s.LeftOut }) {
		t.Errorf("%v: %+v", err, all)
	}
}

// TestRequests_Labels: a selector selects the pods of the answer, and one that cannot be read is refused.
func TestRequests_Labels(t *testing.T) {
	t.Parallel()
	l := newAskedFixture(t)
	for selector, want := range map[string]int{"": askedPods, "n=1": 0, "n notin (x)": askedPods, "!n": askedPods, "=": -1, "a b": -1} {
		status, _ := l.ask(auditor.Socket, "/v1/audit?labelSelector="+url.QueryEscape(selector))
		if got := strings.Count(l.answer, `"state"`) / 2; want < 0 && status != http.StatusBadRequest || want >= 0 && (status != http.StatusOK || got != want) {
			t.Errorf("%q: %d, %d pods", selector, status, got)
		}
	}
}

// TestRequests_SharedResults: requests on the port get results of the last second, commands always new ones.
func TestRequests_SharedResults(t *testing.T) {
	t.Parallel()
	l := newAskedFixture(t)
	for _, test := range []struct {
		by   auditor.Way
		step time.Duration // before the request
		want int64
	}{
		{auditor.Port, 2 * sharedFor, askedPods},
		{auditor.Port, sharedFor / 2, 0},
		{auditor.Socket, time.Millisecond, askedPods},
		{auditor.Socket, time.Millisecond, askedPods},
		{auditor.Port, time.Millisecond, 0},
		{auditor.Port, 2 * sharedFor, askedPods},
	} {
		l.clock.Step(test.step)
		if status, inspections := l.ask(test.by, checkAll); status != http.StatusOK || inspections != test.want {
			t.Errorf("%s after %s: %d after %d inspections, want %d", test.by, test.step, status, inspections, test.want)
		}
	}
}

// TestRequests_Browser: a link causes no inspection; the port's page and programs do.
func TestRequests_Browser(t *testing.T) {
	t.Parallel()
	l := newAskedFixture(t)
	for site, want := range map[string]int{
		"": http.StatusOK, "same-origin": http.StatusOK, "none": http.StatusForbidden, "same-site": http.StatusForbidden, "cross-site": http.StatusForbidden,
	} {
		l.clock.Step(2 * sharedFor)
		status, inspections := l.ask(auditor.Port, checkAll, "Sec-Fetch-Site", site)
		if status != want || (inspections > 0) != (want == http.StatusOK) {
			t.Errorf("%q: %d after %d inspections, want %d", site, status, inspections, want)
		}
		if status, _ := l.ask(auditor.Port, "/v1/audit", "Sec-Fetch-Site", site); status != http.StatusOK {
			t.Errorf("%q without an inspection: %d", site, status)
		}
	}
}

// TestRequests_UnknownPods: requests on the port cause none to the API server.
func TestRequests_UnknownPods(t *testing.T) {
	t.Parallel()
	l := newAskedFixture(t)
	for i := range 100 {
		if status, _ := l.ask(auditor.Port, fmt.Sprintf("/v1/audit/shop/none-%d", i)); status != http.StatusNotFound {
			t.Fatalf("the answer is %d", status)
		}
	}
	check.Equal(t, l.requests("/pods/none-"), 0, "requests to the API server")
	l.ask(auditor.Socket, "/v1/audit/shop/none-0")
	check.Equal(t, l.requests("/pods/none-"), 1, "requests to the API server for root's")
}
