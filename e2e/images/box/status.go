package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"strconv"
	"time"
)

// Ports of a sidecar's status, which are never redirected.
const (
	// healthPort answers the probes of the proxy itself.
	healthPort = 15021
	// agentPort answers probes of the application, which injection rewrites to paths below /app-health.
	agentPort = 15020
)

// probers is the variable with the application's probes by path, which injection writes.
const probers = "ISTIO_KUBE_APP_PROBERS"

// probe is the part of a rewritten probe that box knows.
type probe struct {
	HTTPGet *struct {
		Path string `json:"path"`
		Port int    `json:"port"`
	} `json:"httpGet"`
}

// serveStatus answers the probes of a proxy that listens, and forwards the application's probes.
func serveStatus(failed chan<- error) error {
	all := map[string]probe{}
	if text := os.Getenv(probers); text != "" {
		if err := json.Unmarshal([]byte(text), &all); err != nil {
			return fmt.Errorf("reading %s: %w", probers, err)
		}
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz/ready", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/app-health/", func(w http.ResponseWriter, r *http.Request) {
		to, known := all[r.URL.Path]
		if !known || to.HTTPGet == nil {
			http.NotFound(w, r)
			return
		}
		if err := ask(applicationClient(), "http://"+net.JoinHostPort(os.Getenv("INSTANCE_IP"), strconv.Itoa(to.HTTPGet.Port))+to.HTTPGet.Path, ""); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})
	for _, port := range []int{healthPort, agentPort} {
		listener, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", fmt.Sprintf(":%d", port))
		if err != nil {
			return err
		}
		server := http.Server{ReadHeaderTimeout: time.Minute, Handler: mux}
		go func() { failed <- server.Serve(listener) }()
	}
	return nil
}

// applicationClient connects like the inbound side of the proxy.
func applicationClient() *http.Client {
	inbound := &side{fromReserved: true}
	return &http.Client{Timeout: timeout, Transport: &http.Transport{DialContext: inbound.dial, DisableKeepAlives: true}}
}

// untilReady polls the health of the proxy in this pod for up to a minute.
func untilReady() error {
	const tries, pause = 120, 500 * time.Millisecond
	var err error
	for range tries {
		if err = get(fmt.Sprintf("http://localhost:%d/healthz/ready", healthPort)); err == nil {
			return nil
		}
		time.Sleep(pause)
	}
	return err
}
