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
	"github.com/meshcni/istio-cni/internal/test/check"
)

// newPods returns a server, and the calls that a listener receives about its pods. given, unless nil, changes the server and the
// client before the watch.
func newPods(t *testing.T, given func(*kubetest.Server, *Client)) (*kubetest.Server, *calls) {
	t.Helper()
	server, h, listener := kubetest.NewServer(t), &calls{t: t}, ignoring[Pod]()
	client := connected(t, server, nil).Client
	listener.OnUpdate, listener.OnSync, listener.OnError = func(p Pod) { h.add(p.Facts.Name) }, func() { h.add("synced") }, h.onError
	if given != nil {
		given(server, client)
	}
	agenttest.Go(t, func(ctx context.Context) { client.WatchPods(ctx, PodScope{}, listener) })
	return server, h
}

// heavy returns a pod with size bytes of JSON, in characters that JSON escapes.
func heavy(t *testing.T, name string, size int) []byte {
	t.Helper()
	pod := kubetest.Pod{Namespace: "shop", Name: name, Annotations: map[string]string{"a": "PAYLOAD"}}
	return bytes.Replace(pod.JSON(t), []byte("PAYLOAD"), bytes.Repeat([]byte(`\u003c`), size/6), 1)
}

// TestWatch_NoObjectHidesAnother: a pod of the largest size that the API server stores, or larger, does not hide other pods.
func TestWatch_NoObjectHidesAnother(t *testing.T) {
	t.Parallel()
	small := kubetest.Pod{Namespace: "shop", Name: "small"}
	t.Run("1.45 M characters that JSON escapes", func(t *testing.T) {
		t.Parallel()
		server, h := newPods(t, nil)
		h.wants("synced")
		server.Set(heavy(t, "heavy", 6*1_450_000))
		server.Set(small.JSON(t))
		h.wants("synced", "heavy", "small")
		check.Equal(t, len(server.Requests()), 1, "requests", server.Requests())
	})
	t.Run("an event that is too large for a watch", func(t *testing.T) {
		t.Parallel()
		server, h := newPods(t, nil)
		h.wants("synced")
		server.Set(kubetest.Pod{Namespace: "shop", Name: "heavy", Annotations: map[string]string{"a": strings.Repeat("x", 17<<20)}}.JSON(t))
		server.Set(small.JSON(t))
		h.wants("synced", "error: "+string(TooLarge), "heavy", "small", "synced", "works")
	})
	t.Run("a page that is too large", func(t *testing.T) {
		t.Parallel()
		server, h := newPods(t, func(s *kubetest.Server, c *Client) {
			s.ListsOnly()
			for i := range 4 {
				s.Set(heavy(t, fmt.Sprint("heavy-", i), 256<<10))
			}
			s.Set(small.JSON(t))
			c.limit = 512 << 10
		})
		h.wants("heavy-0", "heavy-1", "heavy-2", "heavy-3", "small", "synced")
		watched(t, server)
		server.Set(kubetest.Pod{Namespace: "shop", Name: "later"}.JSON(t))
		h.wants("heavy-0", "heavy-1", "heavy-2", "heavy-3", "small", "synced", "later")
		// A refused stream, pages of 500, 50 and 5 objects, five pages of one, and the watch.
		check.Equal(t, len(server.Requests()), 10, "requests", server.Requests())
	})
	t.Run("a page of one object that is too large", func(t *testing.T) {
		t.Parallel()
		server, h := newPods(t, func(s *kubetest.Server, c *Client) {
			s.ListsOnly()
			s.Set(heavy(t, "heavy", 768<<10))
			c.limit = 512 << 10
		})
		agenttest.Eventually(t, "no further requests", func() bool { return len(server.Requests()) > 10 })
		h.wants("error: " + string(TooLarge))
	})
}

// TestWatch_EndlessList: a server or proxy always announces a next page.
func TestWatch_EndlessList(t *testing.T) {
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
					return reply(http.StatusUnprocessableEntity, nil)(r)
				}
				requests++
				return reply(http.StatusOK, answer(requests))(r)
			}, Config{Kubeconfig: "/none"})
			client.longest = 3
			h, listener := &calls{t: t}, ignoring[Pod]()
			listener.OnSync, listener.OnError = func() { h.add("synced") }, h.onError
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
			defer cancel()
			client.WatchPods(ctx, PodScope{}, listener)
			if got := h.all(); len(got) != 1 || got[0] != "error: "+string(Undecodable) {
				t.Errorf("calls %q", got)
			}
			if requests < 5 || requests > 120 {
				t.Errorf("%d requests in 10 minutes", requests)
			}
		})
	}
}

// TestError_TokenRedacted: the server repeats the credential in each part of a response.
func TestError_TokenRedacted(t *testing.T) {
	t.Parallel()
	const status = `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 500, "reason": "TOKEN", "message": "no TOKEN"}`
	for name, answer := range map[string]struct{ list, watch string }{
		"a list's kind":             {list: `{"kind": "TOKEN", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}}`},
		"a list's apiVersion":       {list: `{"kind": "PodList", "apiVersion": "TOKEN", "metadata": {"resourceVersion": "1"}}`},
		"a list that is not JSON":   {list: `TOKEN`},
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
				w.Write([]byte(strings.ReplaceAll(text, "TOKEN", strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")))) //nolint:errcheck // the client reports it
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
				t.Logf("the token is not in the text at all: %v", failed)
			}
		})
	}
}
