package eventrecorder

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func client(t *testing.T, server *kubetest.Server) *kube.Client {
	t.Helper()
	api, err := kube.NewClient(kube.Config{Kubeconfig: server.Kubeconfig(t)})
	check.OK(t, err)
	t.Cleanup(api.Close)
	return api
}

func nodeEvent(message string) kube.Event { return eventOf("node-1", message) }

func eventOf(node, message string) kube.Event {
	return kube.Event{
		Object: kube.NodeRef(node), Reason: "ConfigRewritten", Message: message,
		Type: kube.EventWarning, Component: "istio-cni-node", Host: "node-1",
	}
}

// fixture is a recorder with a fake clock, and the results of its events.
type fixture struct {
	*testing.T
	*Recorder
	server *kubetest.Server
	clock  *clocktesting.FakeClock
	log    *strings.Builder // of a recorder that is shut down

	mu      sync.Mutex
	results map[Result]int
}

func newFixture(t *testing.T, server *kubetest.Server) *fixture {
	t.Helper()
	r := &fixture{
		T: t, server: server, clock: clocktesting.NewFakeClock(time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)), log: &strings.Builder{},
		results: map[Result]int{},
	}
	r.Recorder = New(client(t, server), Options{
		Log: slog.New(slog.NewTextHandler(r.log, nil)), Clock: r.clock, Count: func(result Result) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.results[result]++
		},
	})
	t.Cleanup(r.Shutdown)
	return r
}

// got returns the current number of events with a result.
func (r *fixture) got(result Result) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.results[result]
}

// all waits until n events were sent or have failed.
func (r *fixture) all(n int) {
	r.Helper()
	agenttest.Eventually(r.T, fmt.Sprintf("%d events to be sent", n), func() bool { return r.got(Sent)+r.got(Failed) >= n })
	check.Equal(r, r.got(Sent)+r.got(Failed), n)
}

// sends records an event, which must be sent.
func (r *fixture) sends(event kube.Event) {
	r.Helper()
	before := r.got(Sent) + r.got(Failed)
	r.Record(event)
	r.all(before + 1)
}

// sendsAgain records an event that is refused, and steps the clock to its second request.
func (r *fixture) sendsAgain(event kube.Event) {
	r.Helper()
	before := r.got(Sent) + r.got(Failed)
	r.Record(event)
	agenttest.Eventually(r.T, "the pause", r.clock.HasWaiters)
	r.clock.Step(refusedAgain)
	agenttest.Eventually(r.T, "the second request", func() bool { return r.got(Sent)+r.got(Failed) > before })
}

// eventsOn decodes the events of a server strictly.
func eventsOn(t *testing.T, server *kubetest.Server) []corev1.Event {
	t.Helper()
	var all []corev1.Event
	for _, data := range server.Events() {
		decoder := json.NewDecoder(strings.NewReader(string(data)))
		decoder.DisallowUnknownFields()
		var event corev1.Event
		check.OK(t, decoder.Decode(&event), "decoding", data)
		all = append(all, event)
	}
	return all
}

func TestEvent_Fields(t *testing.T) {
	server := kubetest.NewServer(t)
	r := newFixture(t, server)
	r.sends(nodeEvent("another program wrote it"))
	now := r.clock.Now()
	at := metav1.NewTime(now.Truncate(time.Second))
	want := []corev1.Event{{
		TypeMeta:       metav1.TypeMeta{Kind: "Event", APIVersion: "v1"},
		ObjectMeta:     metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("node-1.%x", now.UnixNano()), UID: "uid-2", ResourceVersion: "2"},
		InvolvedObject: corev1.ObjectReference{Kind: "Node", Name: "node-1", UID: "node-1", APIVersion: "v1"},
		Reason:         "ConfigRewritten", Message: "another program wrote it", Type: "Warning",
		Source:         corev1.EventSource{Component: "istio-cni-node", Host: "node-1"},
		FirstTimestamp: at, LastTimestamp: at, Count: 1,
		ReportingController: "istio-cni-node", ReportingInstance: "node-1",
	}}
	check.Diff(t, "events", want, eventsOn(t, server))
	if got := server.Requests(); len(got) != 1 || got[0] != "POST /api/v1/namespaces/default/events" {
		t.Errorf("requests: %q", got)
	}
	event := nodeEvent("x")
	event.Object = kube.ObjectRef{Kind: "Pod", Namespace: "shop", Name: "cart", UID: "u1", APIVersion: "v1"}
	r.sends(event)
	if got := eventsOn(t, server); !slices.ContainsFunc(got, func(e corev1.Event) bool {
		return e.Namespace == "shop" && e.InvolvedObject.Namespace == "shop"
	}) {
		t.Errorf("events: %+v", got)
	}
}

func TestRecord_EqualEvents(t *testing.T) {
	server := kubetest.NewServer(t)
	r := newFixture(t, server)
	r.sends(nodeEvent("same"))
	for range 1000 {
		r.clock.Step(100 * time.Microsecond)
		r.Record(nodeEvent("same"))
	}
	check.Equal(t, r.got(Suppressed), 1000, "events were suppressed")
	r.clock.Step(eventUpdate)
	r.sends(nodeEvent("same"))
	got := eventsOn(t, server)
	if len(got) != 1 || got[0].Count != 1002 || got[0].LastTimestamp.Sub(got[0].FirstTimestamp.Time) != eventUpdate {
		t.Fatalf("events: %+v, want one that was counted 1002 times", got)
	}
	r.sends(nodeEvent("another"))
	check.Equal(t, len(eventsOn(t, server)), 2, "events")
	r.clock.Step(eventWindow + time.Second)
	r.sends(nodeEvent("same"))
	check.Equal(t, len(eventsOn(t, server)), 3, "events after a long time")
}

// TestRecord_EventGoneFromServer by the next equal event.
func TestRecord_EventGoneFromServer(t *testing.T) {
	for name, tc := range map[string]struct {
		before, after func(*kubetest.Server)
		failures      int
	}{
		"it was deleted": {
			before: func(*kubetest.Server) {},
			after:  func(s *kubetest.Server) { s.Delete("/api/v1/namespaces/default/events/" + eventsOn(t, s)[0].Name) },
		},
		"it was not created": {func(s *kubetest.Server) { s.Fail(kubetest.ServerError, 1) }, func(*kubetest.Server) {}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			server := kubetest.NewServer(t)
			r := newFixture(t, server)
			tc.before(server)
			r.sends(nodeEvent("same"))
			tc.after(server)
			r.clock.Step(eventUpdate)
			r.sends(nodeEvent("same"))
			if got := eventsOn(t, server); len(got) != 1 || got[0].Count != 2 {
				t.Errorf("events: %+v, want one with a count of 2", got)
			}
			r.Shutdown()
			if r.got(Failed) != tc.failures || strings.Count(r.log.String(), "an event was not recorded") != tc.failures {
				t.Errorf("results %v, log %s", r.results, r.log)
			}
		})
	}
}

// TestRecord_RefusedNamespace: a chart may grant rights in some namespaces, or in none.
func TestRecord_RefusedNamespace(t *testing.T) {
	t.Parallel()
	server := kubetest.NewServer(t)
	server.FailOn("/namespaces/default/", kubetest.Forbidden, kubetest.Forever)
	r := newFixture(t, server)
	pod := kube.Event{
		Object: kube.ObjectRef{Kind: "Pod", APIVersion: "v1", Namespace: "shop", Name: "web", UID: "u"}, Reason: "R", Type: kube.EventNormal,
	}
	r.sendsAgain(nodeEvent("first"))
	for i := range 3 {
		r.sends(nodeEvent(fmt.Sprint(i)))
	}
	check.Equal(t, len(server.Requests()), 2, "it asked")
	r.sends(pod)
	if r.got(Sent) != 1 || len(server.Events()) != 1 {
		t.Errorf("the events of another namespace: %d", len(server.Events()))
	}
	r.clock.Step(refusedFor)
	r.sendsAgain(nodeEvent("later"))
	check.Equal(t, len(server.Requests()), 5, "it asked")
	server.Heal()
	r.clock.Step(refusedFor)
	r.sends(nodeEvent("allowed"))
	r.Shutdown()
	if r.got(Sent) != 2 || strings.Count(r.log.String(), "no right to create") != 1 || strings.Contains(r.log.String(), "level=WARN") {
		t.Errorf("log:\n%s", r.log)
	}
}

// TestRecord_ServerStarts: the API server refuses every request until it has read the roles.
func TestRecord_ServerStarts(t *testing.T) {
	t.Parallel()
	server := kubetest.NewServer(t)
	server.FailOn("/namespaces/default/", kubetest.Forbidden, 1)
	r := newFixture(t, server)
	r.Record(nodeEvent("second"))
	r.sendsAgain(nodeEvent("first"))
	r.all(2)
	if r.got(Sent) != 2 || len(server.Events()) != 2 {
		t.Errorf("%d events are sent, %d stored", r.got(Sent), len(server.Events()))
	}
}

func TestRecord_EventExists(t *testing.T) {
	api := client(t, kubetest.NewServer(t))
	for range 2 {
		check.OK(t, api.CreateEvent(t.Context(), kube.EventSeries{Event: nodeEvent("x"), Name: "node-1.1"}))
	}
}

// TestRecord_BoundPerObject: different events share the object's bound, and another object's events are not affected.
func TestRecord_BoundPerObject(t *testing.T) {
	r := newFixture(t, kubetest.NewServer(t))
	for i := range 1000 {
		r.Record(nodeEvent(fmt.Sprint("variation ", i)))
	}
	r.all(objectBurst)
	check.Equal(t, r.got(Suppressed), 1000-objectBurst, "events were suppressed")
	r.sends(eventOf("node-2", "x"))
	end := nodeEvent("it is over")
	end.Type = kube.EventNormal
	r.sends(end) // despite the warnings
	r.clock.Step(objectInterval)
	r.sends(nodeEvent("later"))
	r.Record(nodeEvent("one too many"))
	check.Equal(t, len(r.server.Requests()), objectBurst+3)
}

// TestRecord_Pace: events are sent at a bounded rate, and none is lost.
func TestRecord_Pace(t *testing.T) {
	r := newFixture(t, kubetest.NewServer(t))
	const n = eventBurst + 40
	for i := range n {
		r.Record(eventOf(fmt.Sprint("node-", i), "x"))
	}
	r.all(eventBurst)
	for i := eventBurst; i < n; i++ {
		agenttest.Eventually(t, "the pause", r.clock.HasWaiters)
		r.clock.Step(eventInterval - time.Millisecond)
		check.Equal(t, len(r.server.Requests()), i, "requests before the end of the pause")
		r.clock.Step(time.Millisecond)
		r.all(i + 1)
	}
	check.Equal(t, r.got(Suppressed), 0, "events were suppressed")
}

// TestRecord_HangingServer fills the queue: events beyond it are dropped, counted and logged once, and the caches
// stay bounded. Shutdown waits only for the flush.
func TestRecord_HangingServer(t *testing.T) {
	r := newFixture(t, kubetest.NewServer(t))
	r.server.Fail(kubetest.Hang, kubetest.Forever)
	event := func(i int) kube.Event { return eventOf(fmt.Sprint("node-", i), "x") }
	r.Record(event(0))
	agenttest.Eventually(t, "no request", func() bool { return len(r.server.Requests()) == 1 }) // the queue is empty
	const n = 3 * maxQueued
	for i := range n {
		r.Record(event(1 + i))
	}
	check.Equal(t, r.got(Suppressed), n-maxQueued)
	if seen, objects := r.seen.Len(), r.objects.Len(); seen > maxRemembered || objects > maxRemembered {
		t.Errorf("%d events and %d objects are remembered", seen, objects)
	}
	r.Shutdown()
	r.Record(event(n + 1))
	check.Equal(t, strings.Count(r.log.String(), "events are dropped"), 1, "the drops are logged", "times", &r.log)
	if got := len(r.server.Requests()); got > eventBurst {
		t.Errorf("%d requests at the end, want no more than the bucket has", got)
	}
	if r.got(Sent) != 0 || r.got(Failed)+r.got(Suppressed) != n+2 {
		t.Errorf("%v of %d events", r.results, n+2)
	}
}

func TestShutdown_QueuedEvents(t *testing.T) {
	server := kubetest.NewServer(t)
	r := newFixture(t, server)
	for i := range 10 {
		r.Record(nodeEvent(fmt.Sprint(i)))
	}
	r.Shutdown()
	r.Shutdown()
	check.Equal(t, len(eventsOn(t, server)), 10, "events")
	var none *Recorder
	none.Record(nodeEvent("x"))
	none.Shutdown()
}

func TestMessage_Bounds(t *testing.T) {
	r := newFixture(t, kubetest.NewServer(t))
	for _, message := range []string{
		strings.Repeat("é", maxEventMessage) + "x", "x" + strings.Repeat("é", maxEventMessage), "a\x1b[2Jb\nc\x00d\u202e\xff",
	} {
		r.sends(nodeEvent(message))
	}
	sent := eventsOn(t, r.server)
	slices.SortFunc(sent, func(a, b corev1.Event) int { return len(b.Message) - len(a.Message) })
	for _, event := range sent[:2] {
		if len(event.Message) > maxEventMessage || len(event.Message) < maxEventMessage-30 || !utf8.ValidString(event.Message) {
			t.Errorf("a message of %d bytes, valid %v", len(event.Message), utf8.ValidString(event.Message))
		}
	}
	check.Equal(t, sent[2].Message, `a\u001b[2Jb\nc\u0000d\u202e\ufffd`, "message")
}

// TestEvent_Names: names are valid for the longest object name, and unique.
func TestEvent_Names(t *testing.T) {
	r := newFixture(t, kubetest.NewServer(t))
	names := map[string]bool{}
	for _, object := range []string{
		"a", strings.Repeat("a", 253), strings.Repeat("a", maxObjectName-1) + "." + strings.Repeat("b", 16), strings.Repeat("a-", 126) + "a",
	} {
		r.sends(eventOf(object, "x"))
	}
	for _, event := range eventsOn(t, r.server) {
		names[event.Name] = true
		check.Equal(t, len(validation.IsDNS1123Subdomain(event.Name)), 0, "problems of", event.Name)
	}
	check.Equal(t, len(names), 4, "names for 4 events")
}
