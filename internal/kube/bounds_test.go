package kube

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
)

// followingPods lets a listener hear of all pods until the test ends.
func followingPods(t *testing.T, client *Client) *calls {
	t.Helper()
	h, listener := &calls{t: t}, ignoring[Pod]()
	listener.OnUpdate, listener.OnSync, listener.OnError = func(p Pod) { h.add(p.Facts.Name) }, func() { h.add("synced") }, h.onError
	agenttest.Go(t, func(ctx context.Context) { client.WatchPods(ctx, PodScope{}, listener) })
	return h
}

// heavy is a pod of so many bytes of JSON, each character of which JSON escapes.
func heavy(t *testing.T, name string, size int) []byte {
	t.Helper()
	pod := kubetest.Pod{Namespace: "shop", Name: name, Annotations: map[string]string{"a": "PAYLOAD"}}
	return bytes.Replace(pod.JSON(t), []byte("PAYLOAD"), bytes.Repeat([]byte(`\u003c`), size/6), 1)
}

// TestNoObjectHidesAnother lets a pod be as large as the API server's store takes it, and larger than any can be.
func TestNoObjectHidesAnother(t *testing.T) {
	t.Parallel()
	small := kubetest.Pod{Namespace: "shop", Name: "small"}
	t.Run("1.45 M characters that JSON escapes", func(t *testing.T) {
		t.Parallel()
		server := kubetest.NewServer(t)
		h := followingPods(t, connected(t, server, nil).Client)
		h.wants("synced")
		server.Set(heavy(t, "heavy", 6*1_450_000))
		server.Set(small.JSON(t))
		h.wants("synced", "heavy", "small")
		if len(server.Requests()) != 1 {
			t.Errorf("requests: %q", server.Requests())
		}
	})
	t.Run("an event that no watch can have", func(t *testing.T) {
		t.Parallel()
		server := kubetest.NewServer(t)
		h := followingPods(t, connected(t, server, nil).Client)
		h.wants("synced")
		server.Set(heavy(t, "heavy", 20<<20))
		server.Set(small.JSON(t))
		h.wants("synced", "error: "+string(TooLarge), "heavy", "small", "synced", "works")
	})
	t.Run("a page that is too large", func(t *testing.T) {
		t.Parallel()
		server := kubetest.NewServer(t)
		server.ListsOnly()
		for i := range 4 {
			server.Set(heavy(t, fmt.Sprint("heavy-", i), 256<<10))
		}
		server.Set(small.JSON(t))
		client := connected(t, server, nil).Client
		client.limit = 512 << 10
		h := followingPods(t, client)
		h.wants("heavy-0", "heavy-1", "heavy-2", "heavy-3", "small", "synced")
		watched(t, server)
		server.Set(kubetest.Pod{Namespace: "shop", Name: "later"}.JSON(t))
		h.wants("heavy-0", "heavy-1", "heavy-2", "heavy-3", "small", "synced", "later")
		// One that is refused, pages of 500, 50 and 5, five of 1, and the watch.
		if n := len(server.Requests()); n != 10 {
			t.Errorf("%d requests: %q", n, server.Requests())
		}
	})
	t.Run("a page of one object that is too large", func(t *testing.T) {
		t.Parallel()
		server := kubetest.NewServer(t)
		server.ListsOnly()
		server.Set(heavy(t, "heavy", 768<<10))
		client := connected(t, server, nil).Client
		client.limit = 512 << 10
		h := followingPods(t, client)
		agenttest.Eventually(t, "no further tries", func() bool { return len(server.Requests()) > 10 })
		h.wants("error: " + string(TooLarge))
	})
}

// TestAListEnds is about servers and proxies that send a next page for ever.
func TestAListEnds(t *testing.T) {
	page := func(items, next string) []byte {
		return []byte(`{"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "5", "continue": "` + next + `"}, "items": [` + items + `]}`)
	}
	const pod = `{"metadata": {"namespace": "shop", "name": "a", "uid": "u", "resourceVersion": "4"}}`
	for name, answer := range map[string]func(request int) []byte{
		"the same page":                 func(int) []byte { return page(pod, "again") },
		"the same objects, new tokens":  func(n int) []byte { return page(pod, fmt.Sprint(n)) },
		"no objects, new tokens":        func(n int) []byte { return page("", fmt.Sprint(n)) },
		"no objects and the same token": func(int) []byte { return page("", "again") },
		"new objects, new tokens": func(n int) []byte {
			return page(strings.Replace(pod, `"a"`, fmt.Sprintf(`"a%d"`, n), 1), fmt.Sprint(n))
		},
	} {
		bubble(t, name, func(t *testing.T) {
			requests := 0
			client := clientOf(func(r *http.Request) (*http.Response, error) {
				if r.URL.Query().Has("watch") {
					return answers(http.StatusUnprocessableEntity, nil)(r)
				}
				requests++
				return answers(http.StatusOK, answer(requests))(r)
			}, Config{Kubeconfig: "/none"})
			client.longest = 3
			h, listener := &calls{t: t}, ignoring[Pod]()
			listener.OnSync, listener.OnError = func() { h.add("synced") }, h.onError
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
			defer cancel()
			client.WatchPods(ctx, PodScope{}, listener)
			if got := h.all(); len(got) != 1 || got[0] != "error: "+string(Undecodable) {
				t.Errorf("told %q", got)
			}
			if requests < 5 || requests > 120 {
				t.Errorf("%d requests in 10 minutes", requests)
			}
		})
	}
}

// TestATokenThatComesBackIsRedacted lets a server repeat the credential wherever it can.
func TestATokenThatComesBackIsRedacted(t *testing.T) {
	t.Parallel()
	const status = `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 500, "reason": "TOKEN", "message": "no TOKEN"}`
	for name, answer := range map[string]struct{ list, watch string }{
		"a list's kind":             {list: `{"kind": "TOKEN", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}}`},
		"a list's apiVersion":       {list: `{"kind": "PodList", "apiVersion": "TOKEN", "metadata": {"resourceVersion": "1"}}`},
		"a list that is something":  {list: `TOKEN`},
		"a list of another type":    {list: `{"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": "TOKEN"}`},
		"a watch's ERROR":           {watch: `{"type": "ERROR", "object": ` + status + `}`},
		"an event's type":           {watch: `{"type": "TOKEN", "object": {"kind": "Pod", "apiVersion": "v1"}}`},
		"an event's kind":           {watch: `{"type": "ADDED", "object": {"kind": "TOKEN", "apiVersion": "v1"}}`},
		"an event that is nonsense": {watch: `{"type": "ADDED", "object": {"kind": "Pod", "apiVersion": "v1", "metadata": "TOKEN"}}`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client := foreign(t, (*httptest.Server).StartTLS, "token: "+secret, func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Type", "application/json")
				text := answer.watch
				if !r.URL.Query().Has("watch") {
					text = answer.list
				}
				if text == "" {
					w.WriteHeader(http.StatusUnprocessableEntity)
					text = strings.Replace(status, "500", "422", 1)
				}
				w.Write([]byte(strings.ReplaceAll(text, "TOKEN", strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")))) //nolint:errcheck // the client says so
			})
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			var failed error
			listener := ignoring[Pod]()
			listener.OnError = func(err error) { failed = err; cancel() }
			client.WatchPods(ctx, PodScope{}, listener)
			if failed == nil {
				t.Fatal("no error")
			}
			for err := failed; err != nil; {
				if text := fmt.Sprintf("%v %+v %#v", err, err, err); strings.Contains(text, secret) {
					t.Errorf("%T shows the token: %s", err, text)
				}
				inner, ok := err.(interface{ Unwrap() error })
				if !ok {
					break
				}
				err = inner.Unwrap()
			}
			if !strings.Contains(failed.Error(), "[redacted]") {
				t.Logf("nothing of it is left: %v", failed)
			}
		})
	}
}
