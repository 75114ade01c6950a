package taint

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
	"time"
)

// freePort returns a TCP port that is free at the moment.
func freePort(t *testing.T) int {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close() //nolint:errcheck // nothing came in
	return listener.Addr().(*net.TCPAddr).Port
}

// get sends a GET to the controller and returns status and body; status 0 is no response.
func get(t *testing.T, port int, path string) (status int, text string) {
	t.Helper()
	client := http.Client{Timeout: 5 * time.Second}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, fmt.Sprintf("http://127.0.0.1:%d%s", port, path), http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	response, err := client.Do(request)
	if err != nil {
		return 0, err.Error()
	}
	defer response.Body.Close() //nolint:errcheck // only read from
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return 0, err.Error()
	}
	return response.StatusCode, string(body)
}
