package podcache

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// byMode selects pods by the label mode of the pod, unless it is none, and of the namespace.
const byMode = `[{"podSelector":{"matchExpressions":[{"key":"mode","operator":"NotIn","values":["none"]}]},
	"namespaceSelector":{"matchLabels":{"mode":"ambient"}}}]`

func compiled(t *testing.T, selectors string) *selector.Ambient {
	t.Helper()
	s, err := selector.ParseAmbient([]byte(selectors))
	check.OK(t, err)
	return s
}

// follower is a store in ambient mode with a listener.
type follower struct {
	*Store
	*listener

	selectors atomic.Pointer[selector.Ambient]
}

// follow starts a store and follows it.
func follow(t *testing.T, server *kubetest.Server) *follower {
	t.Helper()
	f := &follower{Store: newStore(t, server)}
	f.selectors.Store(compiled(t, byMode))
	f.options.Ambient = f.selectors.Load
	agenttest.Go(t, f.Run)
	f.listener = listen(t, f.Store)
	return f
}

// listener is what a listener of a store was told. Tests read calls such as "web true": an update with its selection.
type listener struct {
	t    *testing.T
	stop func()

	mu   sync.Mutex
	told []string
}

func listen(t *testing.T, s *Store) *listener {
	t.Helper()
	l := &listener{t: t}
	tell := func(format string, a ...any) {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.told = append(l.told, fmt.Sprintf(format, a...))
	}
	l.stop = agenttest.Go(t, func(ctx context.Context) {
		s.Follow(ctx, kube.Listener[kube.Pod]{
			OnUpdate: func(p kube.Pod) { tell("%s %t", p.Facts.Name, p.Facts.Selected) },
			OnDelete: func(p kube.Pod) { tell("%s gone, was %t", p.Facts.Name, p.Facts.Selected) },
			OnSync:   func() { tell("sync") }, OnError: func(err error) { tell("failing %t", err != nil) },
		})
	})
	return l
}

// wants waits for these calls after those of the last time, in any order, and for no other.
func (l *listener) wants(calls ...string) {
	l.t.Helper()
	got := func() []string { l.mu.Lock(); defer l.mu.Unlock(); return slices.Sorted(slices.Values(l.told)) }
	slices.Sort(calls)
	agenttest.Until(l.t, func() string { return fmt.Sprintf("told %q, want %q", got(), calls) }, func() bool { return slices.Equal(got(), calls) })
	l.mu.Lock()
	defer l.mu.Unlock()
	l.told = nil
}

func (f *follower) pod(name, uid string) kube.PodRef {
	return kube.PodRef{Namespace: "shop", Name: name, UID: uid}
}

func namespace(mode string) []byte {
	return kubetest.Namespace("shop", map[string]string{"mode": mode, "team": "superfluous"})
}

const shop = "/api/v1/namespaces/shop"

// TestFollow_Selected: the selection follows the labels of pod and namespace. The end of the namespace hides no pod's end.
func TestFollow_Selected(t *testing.T) {
	server := kubetest.NewServer(t)
	server.Set(namespace("none"))
	server.Set(pod("web", "1", "n", fmt.Sprintf(`,"labels":{"mode":"x","other":"y"},"annotations":{%q:"enabled",%q:"true"}`,
		ambient.RedirectionKey, ambient.DNSCaptureKey)))
	server.Set(pod("out", "2", "n", `,"labels":{"mode":"none"}`))
	server.Set(pod("side", "3", "n", fmt.Sprintf(`,"annotations":{%q:"{}"}`, sidecar.StatusKey)))
	f := follow(t, server)
	f.wants("web false", "out false", "side false", "sync")
	server.Set(namespace("ambient"))
	f.wants("web true")
	server.Set(kubetest.Namespace("shop", map[string]string{"mode": "ambient", "team": "b"}))
	server.Set(pod("out", "2", "n", ""))
	f.wants("out true")
	facts, err := f.Facts(t.Context(), f.pod("web", "1"), true)
	if err != nil || !facts.Selected || facts.Labels["mode"] != "x" || facts.Labels["other"] != "" || facts.Annotations[ambient.RedirectionKey] != "enabled" ||
		facts.Annotations[ambient.DNSCaptureKey] != "true" {
		t.Errorf("%+v, %v", facts, err)
	}
	f.Store.mu.Lock()
	check.Diff(t, "kept labels", map[string]map[string]string{"shop": {"mode": "ambient"}}, f.round.namespaces)
	f.Store.mu.Unlock()
	server.Delete(shop)
	server.Set(pod("web", "1", "n", `,"annotations":{"mark":"later"}`))
	f.wants("web true")
	server.Delete(shop + "/pods/web")
	f.wants("web gone, was true")
	server.Set(pod("out", "2", "n", ""))
	f.wants("out true")
	server.Set(namespace("none")) // created anew
	f.wants("out false")
	check.Equal(t, gets(server), 0, "requests")
}

// TestFollow_NamespacesUnreadable: listeners never take "unknown" for "not selected", and the plugin gets no answer by a guess.
func TestFollow_NamespacesUnreadable(t *testing.T) {
	server := kubetest.NewServer(t)
	server.Set(namespace("ambient"))
	server.Set(pod("web", "1", "n", ""))
	server.Set(pod("side", "3", "n", fmt.Sprintf(`,"annotations":{%q:"{}"}`, sidecar.StatusKey)))
	server.FailOn("/api/v1/namespaces?", kubetest.Forbidden, kubetest.Forever)
	server.FailOn(shop+"$", kubetest.Forbidden, 1)
	f := follow(t, server)
	f.wants("failing true", "side false")
	check.Equal(t, kube.ClassOf(check.Err(f.Facts(t.Context(), f.pod("web", "1"), true))), kube.Forbidden)
	if facts, err := f.Facts(t.Context(), f.pod("web", "1"), true); err != nil || !facts.Selected { // the namespace can be fetched
		t.Errorf("%+v, %v", facts, err)
	}
	if facts, err := f.Facts(t.Context(), f.pod("side", "3"), true); err != nil || facts.Selected {
		t.Errorf("%+v, %v", facts, err)
	}
	check.Equal(t, gets(server), 2, "requests for pods")
	server.Heal()
	f.wants("failing false", "web true", "sync")
}

// TestFollow_PodBeforeNamespace: the watches have no common order.
func TestFollow_PodBeforeNamespace(t *testing.T) {
	server := kubetest.NewServer(t)
	f := follow(t, server)
	f.wants("sync")
	agenttest.Eventually(t, "no watches", func() bool { return server.Watches() == 2 })
	server.HoldWatches("namespaces")
	server.Set(namespace("ambient"))
	server.Set(pod("web", "1", "n", ""))
	server.Set(pod("brief", "2", "n", ""))
	server.Delete(shop + "/pods/brief")
	server.Set(pod("side", "3", "n", fmt.Sprintf(`,"annotations":{%q:"{}"}`, sidecar.StatusKey)))
	f.wants("side false")
	got := make(chan kube.Pod, 1)
	agenttest.Go(t, func(ctx context.Context) {
		p, err := f.Pod(ctx, f.pod("web", "1"))
		if err != nil {
			t.Error(err)
		}
		got <- p
	})
	agenttest.Eventually(t, "no request for the pod", func() bool { return gets(server) == 1 })
	server.ReleaseWatches()
	check.Equal(t, (<-got).Facts.Selected, true, "selected")
	f.wants("web true")
}

// TestFollow_Orphan: a namespace that was deleted by force leaves pods behind. They do not keep the others from being synced, and one
// that an earlier agent has enrolled stays enrolled.
func TestFollow_Orphan(t *testing.T) {
	server := kubetest.NewServer(t)
	server.Set(kubetest.Namespace("other", nil))
	server.Set(pod("web", "1", "n", ""))
	server.Set(pod("enrolled", "2", "n", fmt.Sprintf(`,"annotations":{%q:"enabled"}`, ambient.RedirectionKey)))
	f := follow(t, server)
	f.wants("enrolled true", "sync")
	server.Set(namespace("ambient"))
	f.wants("web true")
	server.Delete(shop)
	server.Delete(shop + "/pods/web")
	server.Delete(shop + "/pods/enrolled")
	f.wants("web gone, was true", "enrolled gone, was true")
}

// TestReselect: selectors that name other labels apply to all pods, and no pod's end is lost between two rounds.
func TestReselect(t *testing.T) {
	server := kubetest.NewServer(t)
	server.Set(namespace("ambient"))
	for i, name := range []string{"web", "gone", "anew"} {
		server.Set(pod(name, fmt.Sprint(i), "n", `,"labels":{"tier":"1"}`))
	}
	f := follow(t, server)
	f.wants("anew true", "gone true", "web true", "sync")
	server.Fail(kubetest.Unavailable, kubetest.Forever)
	server.BreakWatches()
	f.wants("failing true", "failing true")
	server.Delete(shop + "/pods/gone")
	server.Set(pod("anew", "9", "n", ""))
	f.selectors.Store(compiled(t, `[{"podSelector":{"matchLabels":{"tier":"1"}}},{"namespaceSelector":{"matchLabels":{"team":"x"}}}]`))
	f.Reselect()
	f.wants("failing false", "failing true", "failing true")
	check.Equal(t, gets(server), 0, "requests")
	server.Heal()
	f.wants("failing true", "failing false", "anew gone, was true", "anew false", "web true", "gone gone, was true", "sync")
	f.selectors.Store(nil)
	f.Reselect()
	f.wants("anew false", "web false", "sync")
	check.Is(t, check.Err(f.Facts(t.Context(), f.pod("web", "0"), true)), errNoAmbient)
}

// TestFacts_FetchedWithNamespace: once for all plugins, by labels that the cache does not keep.
func TestFacts_FetchedWithNamespace(t *testing.T) {
	server := kubetest.NewServer(t)
	server.Set(namespace("ambient"))
	server.Set(pod("far", "3", "elsewhere", ""))
	f := follow(t, server)
	f.wants("sync")
	service := &Service{Store: f.Store, Metrics: metrics.New("")}
	server.FailOn("/pods/far", kubetest.NotFound, 1)
	for _, test := range []struct {
		code int
		want string
	}{{http.StatusNotFound, ""}, {http.StatusOK, `"Selected":true`}} {
		before := len(server.Requests())
		w := service.request(t, http.MethodGet, "/v1/pods/shop/far?uid=3&ambient=true", "")
		if w.Code != test.code || !strings.Contains(w.Body.String(), test.want) {
			t.Errorf("%d %s", w.Code, w.Body)
		}
		check.Equal(t, len(server.Requests())-before, map[int]int{http.StatusNotFound: 1, http.StatusOK: 2}[test.code], "requests")
	}
}

// TestPod_OfAnEvent: never a pod that listeners do not know, and never another one of its name.
func TestPod_OfAnEvent(t *testing.T) {
	server := kubetest.NewServer(t)
	server.Set(namespace("ambient"))
	server.Set(pod("web", "1", "n", ""))
	server.Set(pod("going", "2", "n", `,"deletionTimestamp":"2026-01-09T00:00:00Z"`))
	server.Set(pod("static", "4", "n", `,"annotations":{"kubernetes.io/config.hash":"h"}`))
	f := follow(t, server)
	f.wants("going true", "static true", "web true", "sync")
	for _, ref := range []kube.PodRef{f.pod("web", "1"), f.pod("web", ""), f.pod("static", "h")} {
		if p, err := f.Pod(t.Context(), ref); err != nil || p.Facts.Name != ref.Name || !p.Facts.Selected {
			t.Errorf("%v: %+v, %v", ref, p, err)
		}
	}
	check.Equal(t, gets(server), 1, "requests, for the pod without a UID,")
	for _, ref := range []kube.PodRef{f.pod("going", "2"), f.pod("going", "")} {
		check.Is(t, check.Err(f.Pod(t.Context(), ref)), errDeleting, ref)
	}
	for ref, class := range map[kube.PodRef]kube.Class{f.pod("web", "old"): kube.WrongPod, f.pod("none", "1"): kube.NotFound, f.pod("none", ""): kube.NotFound} {
		check.Equal(t, kube.ClassOf(check.Err(f.Pod(t.Context(), ref))), class, ref)
	}
	// A stale pod of the name is in the cache.
	agenttest.Eventually(t, "no watches", func() bool { return server.Watches() == 2 })
	server.HoldWatches("pods")
	server.Delete(shop + "/pods/web")
	server.Set(pod("web", "5", "n", ""))
	for _, uid := range []string{"5", ""} {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		check.Is(t, check.Err(f.Pod(ctx, f.pod("web", uid))), context.DeadlineExceeded, uid)
		cancel()
	}
	got := make(chan string, 2)
	for _, uid := range []string{"5", ""} {
		agenttest.Go(t, func(ctx context.Context) {
			p, err := f.Pod(ctx, f.pod("web", uid))
			got <- fmt.Sprint(p.Facts.UID, err)
		})
	}
	server.ReleaseWatches()
	for range 2 {
		check.Equal(t, <-got, "5<nil>", "pod")
	}
	f.wants("web gone, was true", "web true")
}
