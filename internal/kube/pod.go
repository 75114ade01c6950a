package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptrace"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// PodKey says which pod is meant.
type PodKey struct {
	Namespace, Name string
	// UID is what the container runtime gave; empty accepts any pod of that name.
	UID string
}

// String is the namespace and name as kubectl users write them.
func (k PodKey) String() string { return clean(k.Namespace + "/" + k.Name) }

// valid tells whether namespace and name may stand in a URL's path: nothing that could lead to another resource.
func (k PodKey) valid() bool {
	return validSegment(k.Namespace) && validSegment(k.Name)
}

func validSegment(text string) bool {
	const longest = 253 // of a DNS-1123 subdomain
	if text == "" || text == "." || text == ".." || len(text) > longest {
		return false
	}
	for _, r := range text {
		letter := r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z'
		if !letter && (r < '0' || r > '9') && r != '-' && r != '.' && r != '_' {
			return false
		}
	}
	return true
}

// Budget bounds a look-up. Zero fields take the defaults.
type Budget struct {
	// Total is the time for the whole look-up, all attempts and pauses together; 10 s by default.
	Total time.Duration
	// Attempt is the time for one attempt, so that one that hangs leaves room for others; a third of Total and at
	// most 3 s by default.
	Attempt time.Duration
	// FirstBackoff is the pause after the first failed attempt, 50 ms by default. It doubles with every attempt up to
	// MaxBackoff, 1 s by default. Pauses are shortened at random by up to a half, so that the pods of a node do not
	// ask in step.
	FirstBackoff, MaxBackoff time.Duration
}

func (b Budget) withDefaults() Budget {
	if b.Total <= 0 {
		b.Total = 10 * time.Second
	}
	if b.Attempt <= 0 {
		const longest = 3 * time.Second
		b.Attempt = min(b.Total/3, longest)
	}
	if b.FirstBackoff <= 0 {
		b.FirstBackoff = 50 * time.Millisecond
	}
	if b.MaxBackoff <= 0 {
		b.MaxBackoff = time.Second
	}
	b.MaxBackoff = max(b.MaxBackoff, b.FirstBackoff)
	return b
}

// Annotations of a mirror pod, by which the API server shows a pod that the kubelet read from a file
// (k8s.io/kubernetes/pkg/kubelet/types). The runtime knows such a pod by the kubelet's own UID, which is the hash of
// the file; the API object has another.
const (
	configMirrorAnnotation = "kubernetes.io/config.mirror"
	configHashAnnotation   = "kubernetes.io/config.hash"
)

// matches tells whether a pod is the one that was asked for.
func (k PodKey) matches(pod sidecar.Facts) bool {
	if pod.Namespace != k.Namespace || pod.Name != k.Name {
		return false
	}
	return k.UID == "" || k.UID == pod.UID ||
		k.UID == pod.Annotations[configHashAnnotation] || k.UID == pod.Annotations[configMirrorAnnotation]
}

// Pod fetches one pod. It sends GET /api/v1/namespaces/NAMESPACE/pods/NAME, once if the answer is good, and again after
// failures as their [Class] says until the budget is used up. Before each further attempt the kubeconfig is read again.
// An error is an [Error]; when ctx was canceled it is also context.Canceled.
func (c *Client) Pod(ctx context.Context, key PodKey, b Budget) (sidecar.Facts, error) {
	b = b.withDefaults()
	limited, cancel := context.WithTimeout(ctx, b.Total)
	defer cancel()
	l := newLookup(limited, c, key, b)
	if !key.valid() {
		l.last = failure{class: InvalidKey}
		return sidecar.Facts{}, l.failed()
	}
	for {
		pod, failed := l.attempt(limited)
		if failed == nil {
			return pod, nil
		}
		l.remember(limited, *failed)
		wait, again := l.pause()
		if !again || !sleep(limited, wait) {
			break
		}
		c.refresh()
	}
	l.exhausted = l.exhausted || limited.Err() != nil
	if errors.Is(ctx.Err(), context.Canceled) {
		l.cancel()
	}
	return sidecar.Facts{}, l.failed()
}

// lookup is one call of [Client.Pod].
type lookup struct {
	client   *Client
	key      PodKey
	budget   Budget
	deadline time.Time     // of the budget, or of the caller's context if that is earlier
	total    time.Duration // from the start to the deadline

	attempts  int
	refusals  int // failures whose class is tried a bounded number of times
	backoff   time.Duration
	exhausted bool
	last      failure
	server    string
	proxy     string
}

func newLookup(limited context.Context, c *Client, key PodKey, b Budget) *lookup {
	deadline, _ := limited.Deadline()
	return &lookup{
		client:   c,
		key:      key,
		budget:   b,
		deadline: deadline,
		total:    time.Until(deadline),
		backoff:  b.FirstBackoff,
		server:   c.Server(),
	}
}

// remember keeps the failure that explains the look-up: an attempt that the end of the budget cut short says less than
// a complete one before it.
func (l *lookup) remember(limited context.Context, failed failure) {
	if limited.Err() == nil || l.attempts == 1 {
		l.last = failed
	}
}

// pause decides whether another attempt follows, and after how long.
func (l *lookup) pause() (time.Duration, bool) {
	if limit := l.last.class.attempts(); limit > 0 {
		l.refusals++
		if l.refusals >= limit {
			return 0, false
		}
	}
	left := time.Until(l.deadline)
	wait := l.backoff/2 + rand.N(l.backoff/2+1) //nolint:gosec // spreading load needs no secrecy
	l.backoff = min(2*l.backoff, l.budget.MaxBackoff)
	if l.last.retryAfter > 0 {
		wait += l.last.retryAfter
	}
	if wait < left {
		return wait, true
	}
	// The rest of the budget is for asking rather than for pausing, unless the server forbids it.
	if l.last.retryAfter >= left || left < l.budget.FirstBackoff {
		l.exhausted = true
		return 0, false
	}
	return max(l.last.retryAfter, left/2), true
}

func (l *lookup) cancel() {
	cause := context.Canceled
	if l.last.class != Canceled && l.last.class != "" {
		cause = fmt.Errorf("%w; before that: %s", cause, l.last.class)
	}
	l.last = failure{class: Canceled, err: cause}
	l.exhausted = false
}

func (l *lookup) failed() *Error {
	return &Error{
		Class:     l.last.class,
		Key:       l.key,
		Server:    l.server,
		Proxy:     l.proxy,
		File:      l.client.file,
		Status:    l.last.status,
		Message:   l.last.message,
		Attempts:  l.attempts,
		Elapsed:   l.total - time.Until(l.deadline),
		Exhausted: l.exhausted,
		Err:       l.last.err,
	}
}

func sleep(ctx context.Context, wait time.Duration) bool {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// attempt asks once. It gives a pod or a failure.
func (l *lookup) attempt(limited context.Context) (sidecar.Facts, *failure) {
	l.attempts++
	l.client.requests.Add(1)
	ctx, cancel := context.WithTimeout(limited, l.budget.Attempt)
	defer cancel()
	to := l.client.endpoint()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, to.podURL(l.key).String(), http.NoBody)
	if err != nil {
		return sidecar.Facts{}, &failure{class: InvalidKey, err: err}
	}
	request.Header.Set("Accept", "application/json")
	l.server, l.proxy = to.settings.server.Redacted(), to.proxy(request)
	response, reached, failed := to.open(request)
	if failed != nil {
		return sidecar.Facts{}, failed
	}
	defer response.Body.Close() //nolint:errcheck // only read from
	body, failed := readPod(response, reached)
	if failed != nil {
		return sidecar.Facts{}, failed
	}
	return l.key.decode(body)
}

// open sends one request. It gives a good answer, whose body the caller closes, or a failure.
func (e *endpoint) open(request *http.Request) (*http.Response, *progress, *failure) {
	reached := new(progress)
	traced := request.WithContext(httptrace.WithClientTrace(request.Context(), reached.trace()))
	response, err := e.http.Do(traced)
	if err != nil {
		return nil, nil, reached.failure(err)
	}
	done := response.StatusCode == http.StatusOK || request.Method == http.MethodPost && response.StatusCode == http.StatusCreated ||
		request.Method == http.MethodDelete && response.StatusCode == http.StatusAccepted
	if !done {
		defer response.Body.Close() //nolint:errcheck // only read from
		return nil, nil, refusal(response, strings.NewReplacer(e.secrets()...))
	}
	return response, reached, nil
}

// decode reads the answer to a request for the pod.
func (k PodKey) decode(body []byte) (sidecar.Facts, *failure) {
	pod, err := Facts(body)
	if err != nil {
		class := Undecodable
		if syntax, ok := errors.AsType[*json.SyntaxError](err); ok && syntax.Offset >= int64(len(body)) {
			class = Truncated
		}
		return sidecar.Facts{}, &failure{class: class, err: err}
	}
	if !k.matches(pod) {
		return sidecar.Facts{}, &failure{class: WrongPod, err: fmt.Errorf(
			"asked for %s with UID %q, got %s with UID %q", k, k.UID,
			PodKey{Namespace: pod.Namespace, Name: pod.Name}, pod.UID)}
	}
	return pod, nil
}

// maxPod bounds the answer. The API server's store takes objects of up to 1.5 MiB.
const maxPod = 8 << 20

func readPod(response *http.Response, reached *progress) ([]byte, *failure) {
	return readBody(response, reached, maxPod, "pod")
}

// readBody reads the whole answer; what names the thing that is never larger than the limit.
func readBody(response *http.Response, reached *progress, limit int64, what string) ([]byte, *failure) {
	tooLarge := &failure{class: TooLarge, err: fmt.Errorf("no %s has more than %d bytes", what, limit)}
	if response.ContentLength > limit {
		return nil, tooLarge
	}
	if response.ContentLength > 0 {
		body := make([]byte, response.ContentLength)
		if _, err := io.ReadFull(response.Body, body); err != nil {
			return nil, reached.failure(err)
		}
		return body, nil
	}
	body, err := io.ReadAll(io.LimitReader(response.Body, limit+1))
	if err != nil {
		return nil, reached.failure(err)
	}
	if int64(len(body)) > limit {
		return nil, tooLarge
	}
	return body, nil
}

// refusal reads an answer other than 200.
func refusal(response *http.Response, redact *strings.Replacer) *failure {
	const longest = 64 << 10
	// What cannot be read any more is not missed: the status says enough. Reading to the end keeps the connection.
	body, _ := io.ReadAll(io.LimitReader(response.Body, longest))
	failed := failure{class: classOf(response.StatusCode), status: response.StatusCode, message: string(body)}
	var verdict wireStatus
	if json.Unmarshal(body, &verdict) == nil && verdict.Kind == "Status" {
		failed.verdict = verdict
		if verdict.Message != "" {
			failed.message = verdict.Message
		}
	}
	failed.message = clean(redact.Replace(failed.message))
	if failed.message == "" {
		failed.err = errors.New(clean(redact.Replace(response.Status)))
	}
	// The API server sends seconds, never a date.
	if seconds, err := strconv.ParseUint(response.Header.Get("Retry-After"), 10, 31); err == nil {
		failed.retryAfter = time.Duration(seconds) * time.Second
	}
	return &failed
}

// wireStatus is how the API server says no (k8s.io/apimachinery/pkg/apis/meta/v1.Status). Load balancers and other
// servers that answer in its place do not.
type wireStatus struct {
	Kind    string `json:"kind"`
	Message string `json:"message"`
	Reason  string `json:"reason"`
	Code    int    `json:"code"`
	Details struct {
		Name  string `json:"name"`
		Group string `json:"group"`
		// Kind is the resource, for instance "daemonsets".
		Kind   string `json:"kind"`
		Causes []struct {
			Reason string `json:"reason"`
		} `json:"causes"`
	} `json:"details"`
}

// blames tells whether the verdict has a cause of this reason.
func (s *wireStatus) blames(reason string) bool {
	for _, cause := range s.Details.Causes {
		if cause.Reason == reason {
			return true
		}
	}
	return false
}

func classOf(status int) Class {
	switch {
	case status == http.StatusUnauthorized:
		return Unauthorized
	case status == http.StatusForbidden:
		return Forbidden
	case status == http.StatusNotFound:
		return NotFound
	case status == http.StatusTooManyRequests:
		return TooManyRequests
	case status >= http.StatusInternalServerError:
		return ServerError
	}
	return Rejected
}

// stage is how far an attempt has come.
type stage int32

const (
	starting stage = iota
	resolving
	connecting
	handshaking
	waiting
	reading
)

func (s stage) String() string {
	switch s {
	case starting:
		return "preparing the request"
	case resolving:
		return "resolving the server's name"
	case connecting:
		return "connecting"
	case handshaking:
		return "in the TLS handshake"
	case waiting:
		return "waiting for the answer"
	case reading:
		return "reading the answer"
	}
	return "asking"
}

// progress follows an attempt, so that a timeout can say what it waited for. The hooks run in goroutines of net/http,
// some of them after the attempt has been given up.
type progress struct{ stage atomic.Int32 }

func (p *progress) at(s stage) { p.stage.Store(int32(s)) }

func (p *progress) trace() *httptrace.ClientTrace {
	return &httptrace.ClientTrace{
		DNSStart:             func(httptrace.DNSStartInfo) { p.at(resolving) },
		ConnectStart:         func(string, string) { p.at(connecting) },
		TLSHandshakeStart:    func() { p.at(handshaking) },
		GotConn:              func(httptrace.GotConnInfo) { p.at(waiting) },
		GotFirstResponseByte: func() { p.at(reading) },
	}
}

func (p *progress) failure(err error) *failure {
	at := stage(p.stage.Load())
	return &failure{class: classify(err, at), err: fmt.Errorf("%s: %w", at, withoutURL(err))}
}
