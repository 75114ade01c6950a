package kube

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
)

// clock is one that tests move.
type clock struct{ now time.Time }

func (c *clock) at() time.Time { return c.now }

func newClock() *clock { return &clock{time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)} }

func nodeEvent(message string) Event {
	return Event{
		Object: NodeRef("node-1"), Reason: "ConfigRewritten", Message: message, Type: EventWarning,
		Component: "istio-cni-node", Host: "node-1",
	}
}

// eventsOn decodes what a server has by the library, strictly.
func eventsOn(t *testing.T, server *kubetest.Server) []corev1.Event {
	t.Helper()
	var all []corev1.Event
	for _, data := range server.Events() {
		decoder := json.NewDecoder(strings.NewReader(string(data)))
		decoder.DisallowUnknownFields()
		var event corev1.Event
		if err := decoder.Decode(&event); err != nil {
			t.Fatalf("decoding %s: %v", data, err)
		}
		all = append(all, event)
	}
	return all
}

func counting(t *testing.T, server *kubetest.Server) (account, *clock) {
	t.Helper()
	c := newClock()
	return connected(t, server, func(a *Access) { a.Now = c.at }), c
}

func record(t *testing.T, api account, event Event) {
	t.Helper()
	if _, err := api.RecordEvent(t.Context(), event); err != nil {
		t.Fatal(err)
	}
}

func TestRecordEventWritesWhatKubectlShows(t *testing.T) {
	server := kubetest.NewServer(t)
	api, c := counting(t, server)
	record(t, api, nodeEvent("somebody else wrote it"))
	at := metav1.NewTime(c.now.Truncate(time.Second))
	want := []corev1.Event{{
		TypeMeta:       metav1.TypeMeta{Kind: "Event", APIVersion: "v1"},
		ObjectMeta:     metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("node-1.%x", c.now.UnixNano()), UID: "uid-2", ResourceVersion: "2"},
		InvolvedObject: corev1.ObjectReference{Kind: "Node", Name: "node-1", UID: "node-1", APIVersion: "v1"},
		Reason:         "ConfigRewritten", Message: "somebody else wrote it", Type: "Warning",
		Source:         corev1.EventSource{Component: "istio-cni-node", Host: "node-1"},
		FirstTimestamp: at, LastTimestamp: at, Count: 1,
		ReportingController: "istio-cni-node", ReportingInstance: "node-1",
	}}
	if diff := cmp.Diff(want, eventsOn(t, server)); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	if got := server.Requests(); len(got) != 1 || got[0] != "POST /api/v1/namespaces/default/events" {
		t.Errorf("requests: %q", got)
	}
}

func TestRecordEventOfAPodLiesInItsNamespace(t *testing.T) {
	server := kubetest.NewServer(t)
	api, _ := counting(t, server)
	event := nodeEvent("x")
	event.Object = ObjectRef{Kind: "Pod", Namespace: "shop", Name: "cart", UID: podUID, APIVersion: "v1"}
	record(t, api, event)
	got := eventsOn(t, server)
	if len(got) != 1 || got[0].Namespace != "shop" || got[0].InvolvedObject.Namespace != "shop" {
		t.Errorf("events: %+v", got)
	}
}

func TestRecordEventCountsEqualOnes(t *testing.T) {
	server := kubetest.NewServer(t)
	api, c := counting(t, server)
	for range 3 {
		record(t, api, nodeEvent("same"))
		c.now = c.now.Add(time.Second)
	}
	got := eventsOn(t, server)
	if len(got) != 1 || got[0].Count != 3 || got[0].LastTimestamp.Sub(got[0].FirstTimestamp.Time) != 2*time.Second {
		t.Fatalf("events: %+v, want one that was counted three times in 2s", got)
	}
	record(t, api, nodeEvent("another"))
	if got := eventsOn(t, server); len(got) != 2 {
		t.Errorf("%d events, want 2", len(got))
	}
	c.now = c.now.Add(eventMemoryTime + time.Second)
	record(t, api, nodeEvent("same"))
	if got := eventsOn(t, server); len(got) != 3 {
		t.Errorf("%d events after a long time, want 3", len(got))
	}
}

func TestRecordEventBeginsAnewWhenTheServerForgot(t *testing.T) {
	server := kubetest.NewServer(t)
	api, _ := counting(t, server)
	record(t, api, nodeEvent("same"))
	server.ForgetEvents()
	record(t, api, nodeEvent("same"))
	if got := eventsOn(t, server); len(got) != 1 || got[0].Count != 2 {
		t.Errorf("events: %+v, want one with a count of 2", got)
	}
}

func TestRecordEventCreatesLaterWhatItCouldNot(t *testing.T) {
	server := kubetest.NewServer(t)
	api, _ := counting(t, server)
	server.Fail(kubetest.ServerError, 1)
	if _, err := api.RecordEvent(t.Context(), nodeEvent("same")); ClassOf(err) != ServerError {
		t.Fatalf("got %v, want ServerError", err)
	}
	record(t, api, nodeEvent("same"))
	if got := eventsOn(t, server); len(got) != 1 || got[0].Count != 2 {
		t.Errorf("events: %+v, want one with a count of 2", got)
	}
}

func TestRecordEventTakesAnAnswerThatWasLostForDone(t *testing.T) {
	server := kubetest.NewServer(t)
	api, _ := counting(t, server)
	record(t, api, nodeEvent("same"))
	// As if nobody had heard that it is there.
	api.events.mu.Lock()
	api.events.said[nodeEvent("same")].stored = false
	api.events.mu.Unlock()
	record(t, api, nodeEvent("same"))
	record(t, api, nodeEvent("same"))
	if got := eventsOn(t, server); len(got) != 1 || got[0].Count != 3 {
		t.Errorf("events: %+v, want one with a count of 3", got)
	}
}

func TestRecordEventDoesNotFlood(t *testing.T) {
	server := kubetest.NewServer(t)
	api, c := counting(t, server)
	for range 1000 {
		record(t, api, nodeEvent("same"))
	}
	if got := len(server.Requests()); got != eventBurst {
		t.Errorf("%d requests, want %d", got, eventBurst)
	}
	c.now = c.now.Add(eventInterval)
	record(t, api, nodeEvent("same"))
	record(t, api, nodeEvent("same"))
	if got := eventsOn(t, server); len(got) != 1 || got[0].Count != 1001 {
		t.Errorf("events: %+v, want one with a count of 1001", got)
	}

	for i := range 1000 { // of one reason, all different
		record(t, api, nodeEvent(fmt.Sprint("variation ", i)))
	}
	if got := len(server.Requests()); got != eventBurst+1 {
		t.Errorf("%d requests after variations, want %d", got, eventBurst+1)
	}

	for i := range 1000 { // about all sorts of things
		event := nodeEvent("same")
		event.Object.Name = fmt.Sprint("node-", i)
		record(t, api, event)
	}
	if got := len(server.Requests()); got > eventBurst+1+eventsTogether {
		t.Errorf("%d requests after all sorts of things, want at most %d", got, eventBurst+1+eventsTogether)
	}
	api.events.mu.Lock()
	defer api.events.mu.Unlock()
	if said, budgets := len(api.events.said), len(api.events.budgets); said > maxRemembered || budgets > maxRemembered {
		t.Errorf("%d events and %d budgets are remembered, want at most %d", said, budgets, maxRemembered)
	}
}

func TestRecordEventCutsLongMessages(t *testing.T) {
	server := kubetest.NewServer(t)
	api, _ := counting(t, server)
	record(t, api, nodeEvent(strings.Repeat("é", maxEventMessage)+"x"))
	record(t, api, nodeEvent("x"+strings.Repeat("é", maxEventMessage)))
	for _, event := range eventsOn(t, server) {
		if len(event.Message) > maxEventMessage || len(event.Message) < maxEventMessage-1 || !utf8.ValidString(event.Message) {
			t.Errorf("a message of %d bytes, valid %v", len(event.Message), utf8.ValidString(event.Message))
		}
	}
}

func TestEventBudget(t *testing.T) {
	c := newClock()
	b := eventBudget{filled: c.now}
	spend := func() (sent int) {
		for b.take(c.now, 5, 1) {
			sent++
		}
		return sent
	}
	for _, step := range []struct {
		after time.Duration
		sent  int
	}{{0, 5}, {0, 0}, {59 * time.Second, 0}, {time.Second, 1}, {2 * time.Minute, 2}, {time.Hour, 5}, {1000 * time.Hour, 5}} {
		c.now = c.now.Add(step.after)
		if got := spend(); got != step.sent {
			t.Errorf("%v later: %d sent, want %d", step.after, got, step.sent)
		}
	}
}
