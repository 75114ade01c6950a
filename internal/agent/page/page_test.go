package page_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/agent/page"
)

func TestOnlyForLocalRequests(t *testing.T) {
	t.Parallel()
	handler := page.Handler(map[string]http.Handler{"/api/pods": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("[]"))
	})})
	for _, test := range []struct {
		method, host, path string
		status             int
		text               string
	}{
		{"GET", "localhost:9876", "/", http.StatusOK, "<title>istio-cni</title>"},
		{"GET", "127.0.0.1:9876", "/page.js", http.StatusOK, "use strict"},
		{"GET", "[::1]:9876", "/page.css", http.StatusOK, "color-scheme"},
		{"GET", "[::1]", "/api/pods", http.StatusOK, "[]"},
		{"GET", "localhost", "/none", http.StatusNotFound, ""},
		{"POST", "localhost", "/api/pods", http.StatusMethodNotAllowed, ""},
		{"GET", "evil.example:9876", "/api/pods", http.StatusForbidden, "only"},
		{"GET", "10.0.0.1:9876", "/", http.StatusForbidden, "only"},
		{"GET", "", "/", http.StatusForbidden, "only"},
	} {
		r := httptest.NewRequestWithContext(t.Context(), test.method, test.path, nil)
		r.Host = test.host
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		if w.Code != test.status || !strings.Contains(w.Body.String(), test.text) {
			t.Errorf("%s %s%s: %d %.80q", test.method, test.host, test.path, w.Code, w.Body)
		}
		if policy := w.Header().Get("Content-Security-Policy"); test.status == http.StatusOK && !strings.Contains(policy, "default-src 'none'") {
			t.Errorf("policy %q", policy)
		}
	}
}

// TestThePageHasNoInlineCode and inserts no text as HTML: names can be what a pod's author wrote.
func TestThePageHasNoInlineCode(t *testing.T) {
	t.Parallel()
	get := func(path string) string {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)
		r.Host = "localhost"
		w := httptest.NewRecorder()
		page.Handler(nil).ServeHTTP(w, r)
		return w.Body.String()
	}
	for path, words := range map[string][]string{
		"/":        {"<script>", "onclick", "style=", "http://", "https://"},
		"/page.js": {"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "setAttribute('style'"},
	} {
		text := get(path)
		for _, word := range words {
			if strings.Contains(text, word) {
				t.Errorf("%s has %q", path, word)
			}
		}
	}
}
