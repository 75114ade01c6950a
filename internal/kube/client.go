package kube

import (
	"fmt"
	"net"
	"net/http"
	"net/url"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/transport"
)

// userAgent is how the API server's audit log knows us.
const userAgent = "istio-cni"

// Client reads pods from one API server. It may be used by several goroutines.
type Client struct {
	file string

	requests atomic.Int64

	mu      sync.Mutex
	current *endpoint
}

// Requests is how many were sent.
func (c *Client) Requests() int { return int(c.requests.Load()) }

// NewClient builds a client from a kubeconfig file. Server, inline and file credentials (token, tokenFile, client
// certificate, username), certificate-authority, insecure-skip-tls-verify, tls-server-name, proxy-url and impersonation
// mean what they mean to kubectl; credential plugins are refused. No request is sent. An error is a [ConfigError]; that
// of a missing file satisfies errors.Is(err, fs.ErrNotExist).
func NewClient(kubeconfig string) (*Client, error) {
	loaded, err := loadSettings(kubeconfig)
	if err != nil {
		return nil, err
	}
	current, err := newEndpoint(loaded, shortLived)
	if err != nil {
		return nil, &ConfigError{File: kubeconfig, Err: err}
	}
	return &Client{file: kubeconfig, current: current}, nil
}

// Server is the API server's URL, for messages.
func (c *Client) Server() string { return c.endpoint().settings.server.Redacted() }

func (c *Client) endpoint() *endpoint {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.current
}

// refresh reads the kubeconfig again: the node agent may have rewritten it since, with a new token, authority or
// address, and that is what a second attempt after a refusal is for. A file that cannot be used just now changes nothing.
func (c *Client) refresh() {
	loaded, err := loadSettings(c.file)
	if err != nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if reflect.DeepEqual(loaded, c.current.settings) {
		return
	}
	fresh, err := newEndpoint(loaded, shortLived)
	if err != nil {
		return
	}
	c.current.connections.CloseIdleConnections()
	c.current = fresh
}

// endpoint is one server with the connections to it.
type endpoint struct {
	settings    settings
	http        http.Client
	connections *http.Transport
}

// shortLived is for a process that asks once: one HTTP/1.1 connection, kept for further attempts. HTTP/2 would cost its
// own opening exchange for the sake of requests that are never sent.
func shortLived(connections *http.Transport) {
	connections.Protocols = new(http.Protocols)
	connections.Protocols.SetHTTP1(true)
}

// longLived is for a process that stays: a watch and short requests share one HTTP/2 connection. A connection whose other
// end is gone without a word is noticed by pings, within the two times together.
func longLived(connections *http.Transport) {
	connections.Protocols = new(http.Protocols)
	connections.Protocols.SetHTTP1(true)
	connections.Protocols.SetHTTP2(true)
	connections.HTTP2 = &http.HTTP2Config{SendPingTimeout: 30 * time.Second, PingTimeout: 15 * time.Second}
}

// newEndpoint takes TLS and authentication from client-go and the connections from net/http; tune is [shortLived] or
// [longLived].
func newEndpoint(from settings, tune func(*http.Transport)) (*endpoint, error) {
	config := from.transport
	tlsConfig, err := transport.TLSConfigFor(&config)
	if err != nil {
		return nil, fmt.Errorf("preparing TLS: %w", err)
	}
	connections := &http.Transport{
		Proxy:           http.ProxyFromEnvironment,
		DialContext:     (&net.Dialer{KeepAlive: 30 * time.Second}).DialContext,
		TLSClientConfig: tlsConfig,
		// The server compresses only what is far larger than a pod.
		DisableCompression:     true,
		MaxResponseHeaderBytes: 64 << 10,
		IdleConnTimeout:        90 * time.Second,
	}
	tune(connections)
	if from.proxy != nil {
		connections.Proxy = http.ProxyURL(from.proxy)
	}
	authenticated, err := transport.HTTPWrappersForConfig(&config, connections)
	if err != nil {
		return nil, fmt.Errorf("preparing authentication: %w", err)
	}
	return &endpoint{
		settings:    from,
		connections: connections,
		http: http.Client{
			Transport: authenticated,
			// A redirect is an answer, and not the one that was asked for.
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}, nil
}

// proxy names the proxy that a request passes, for messages.
func (e *endpoint) proxy(request *http.Request) string {
	through, err := e.connections.Proxy(request)
	if err != nil || through == nil {
		return ""
	}
	return through.Redacted()
}

func (e *endpoint) podURL(key PodKey) *url.URL {
	return e.settings.server.JoinPath("api", "v1", "namespaces", key.Namespace, "pods", key.Name)
}

// secrets are the texts that no message may hold, whoever wrote it.
func (e *endpoint) secrets() []string {
	var secrets []string
	for _, secret := range []string{e.settings.transport.BearerToken, e.settings.transport.Password} {
		if secret != "" {
			secrets = append(secrets, secret, "[redacted]")
		}
	}
	return secrets
}
