// Command box is the program of test images: a pause process, servers, and clients that inspect the pod that they run in.
//
//	box [pause]      waits for SIGTERM and reaps orphans: the program of a sandbox
//	box serve ADDR   answers HTTP with "hello from HOST to PEER" until SIGTERM
//	box proxy sidecar [transparent | supervised]
//	                 stands in for a sidecar, whose command begins like this; supervised, in a process of its own, whose
//	                 end the container outlives; "proxy router" is a gateway's
//	box wait         waits until the proxy in this pod is ready, as "pilot-agent wait" does
//	box request ...  does nothing: pilot-agent's request to drain, before a native sidecar ends
//	box get URL      prints the response and its Via header, and fails unless the status is 200
//	box keep URL     gets it again and again over one connection, until SIGTERM, and fails when that breaks
//	box lookup NAME  resolves a name over UDP and TCP, with an unreachable DNS server
//	box api PATH     prints the response of the API server to a GET with the pod's ServiceAccount token
//	box cat FILE...  box ls DIR...
//
// It promises to be static and to need no other file of its image. Start reading at main.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"
)

const serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount/"

func main() {
	command, args := "pause", []string(nil)
	if len(os.Args) > 1 {
		command, args = os.Args[1], os.Args[2:]
	}
	if err := run(command, args); err != nil {
		fmt.Fprintln(os.Stderr, "box:", err)
		os.Exit(1)
	}
}

func run(command string, args []string) error {
	many := map[string]func(string) error{"cat": cat, "ls": list, "get": get, "keep": keep, "api": api, "serve": serve, "lookup": lookup}
	switch command {
	case "pause":
		wait()
		return nil
	case "wait":
		return untilReady()
	case "request":
		return nil
	}
	if command == "proxy" && len(args) > 0 && (args[0] == "sidecar" || args[0] == "router") {
		if slices.Contains(args, "supervised") {
			return supervise()
		}
		return proxy(slices.Contains(args, "transparent") || os.Getenv("ISTIO_META_INTERCEPTION_MODE") == "TPROXY")
	}
	do, known := many[command]
	if !known || len(args) == 0 {
		return fmt.Errorf("unknown command %q with %d arguments", command, len(args))
	}
	for _, arg := range args {
		if err := do(arg); err != nil {
			return err
		}
	}
	return nil
}

// wait returns at SIGTERM or SIGINT. As the first process of a PID namespace it reaps orphans.
func wait() {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGCHLD)
	for got := range signals {
		if got != syscall.SIGCHLD {
			return
		}
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
	}
}

func cat(path string) error {
	text, err := os.ReadFile(path)
	if err == nil {
		_, err = os.Stdout.Write(text)
	}
	return err
}

func list(path string) error {
	entries, err := os.ReadDir(path)
	for _, entry := range entries {
		fmt.Println(entry.Name())
	}
	return err
}

func serve(address string) error {
	listener, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", address)
	if err != nil {
		return err
	}
	host, err := os.Hostname()
	if err != nil {
		return err
	}
	fmt.Println("serving on", listener.Addr())
	server := http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprintln(w, "hello from", host, "to", r.RemoteAddr)
	})}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	ended := make(chan struct{})
	go func() { wait(); close(ended) }()
	select {
	case err := <-failed:
		return err
	case <-ended:
		return nil
	}
}

const timeout = 5 * time.Second

func get(url string) error { return ask(&http.Client{Timeout: timeout}, url, "") }

func keep(url string) error {
	const pause = 100 * time.Millisecond
	dialed := false
	transport := &http.Transport{DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		if dialed {
			return nil, errors.New("the connection was closed")
		}
		dialed = true
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}}
	client := &http.Client{Timeout: timeout, Transport: transport}
	for {
		if err := ask(client, url, ""); err != nil {
			return err
		}
		time.Sleep(pause)
	}
}

func api(path string) error {
	token, err := os.ReadFile(serviceAccount + "token")
	if err != nil {
		return err
	}
	ca, err := os.ReadFile(serviceAccount + "ca.crt")
	if err != nil {
		return err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return errors.New("the account's ca.crt has no certificate")
	}
	server := net.JoinHostPort(os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT"))
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}}
	return ask(&http.Client{Timeout: timeout, Transport: transport}, "https://"+server+path, string(token))
}

func ask(client *http.Client, url, token string) error {
	request, err := http.NewRequestWithContext(context.Background(), http.MethodGet, url, http.NoBody)
	if err != nil {
		return err
	}
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close() //nolint:errcheck // only read from
	via := response.Header.Get("Via")
	if via != "" {
		fmt.Println("via", via)
	}
	if _, err := io.Copy(os.Stdout, response.Body); err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		// On one line: under load ctr may pass on only one of a program's two outputs.
		return fmt.Errorf("%s: %s via %s", url, response.Status, via)
	}
	return nil
}
