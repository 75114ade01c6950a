package page_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/agent/page"
)

func TestPage_FilesAndHeaders(t *testing.T) {
	t.Parallel()
	handler := page.Handler(map[string]http.Handler{"/api/pods": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("[]"))
	})})
	for _, test := range []struct {
		method, path string
		status       int
		text         string
	}{
		{"GET", "/", http.StatusOK, "<title>istio-cni</title>"},
		{"GET", "/page.js", http.StatusOK, "use strict"},
		{"GET", "/page.css", http.StatusOK, "color-scheme"},
		{"GET", "/icon.svg", http.StatusOK, "<svg"},
		{"GET", "/api/pods", http.StatusOK, "[]"},
		{"GET", "/page.go", http.StatusNotFound, ""},
		{"GET", "/none", http.StatusNotFound, ""},
		{"POST", "/api/pods", http.StatusMethodNotAllowed, ""},
		{"POST", "/", http.StatusMethodNotAllowed, ""},
	} {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), test.method, test.path, nil))
		if w.Code != test.status || !strings.Contains(w.Body.String(), test.text) {
			t.Errorf("%s %s: %d %.80q", test.method, test.path, w.Code, w.Body)
		}
		for name, value := range map[string]string{
			"Content-Security-Policy": "default-src 'none'; script-src 'self'", "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store",
		} {
			// http.Error drops Cache-Control.
			if got := w.Header().Get(name); !strings.HasPrefix(got, value) && (name != "Cache-Control" || w.Code == http.StatusOK) {
				t.Errorf("%s %s: %s is %q", test.method, test.path, name, got)
			}
		}
	}
}

// TestPage_NoInlineCode: nor is text inserted as HTML, because a pod's author chooses its names.
func TestPage_NoInlineCode(t *testing.T) {
	t.Parallel()
	get := func(path string) string {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)
		w := httptest.NewRecorder()
		page.Handler(nil).ServeHTTP(w, r)
		return w.Body.String()
	}
	for path, words := range map[string][]string{
		"/":        {"<script>", "onclick", "style=", "http:", "https:"},
		"/page.js": {"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "https:"},
	} {
		text := get(path)
		for _, word := range words {
			if strings.Contains(text, word) {
				t.Errorf("%s has %q", path, word)
			}
		}
	}
}
