// Package page serves the agent's page: static files over the JSON that the commands use.
//
// It promises that the page changes nothing, that the browser runs only the page's own script and loads nothing from
// elsewhere, and that no answer is stored. It decides nothing and holds no state. The port refuses requests from other
// sites (serve.Introspection).
//
// Start reading at Handler, and in page.js at refresh.
package page

import (
	"embed"
	"net/http"
)

//go:embed index.html page.css page.js icon.svg
var files embed.FS

// policy allows the page's own files and nothing else.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'none'; " +
	"base-uri 'none'; frame-ancestors 'none'"

// Handler serves the page and the handlers of api, by path, which the page reads.
func Handler(api map[string]http.Handler) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /", http.FileServerFS(files))
	for path, handler := range api {
		mux.Handle("GET "+path, handler)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		mux.ServeHTTP(w, r)
	})
}
