package repair

import (
	"bytes"
	"compress/gzip"
	"encoding/pem"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"path/filepath"
	"strings"
	"sync"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	restwatch "k8s.io/client-go/rest/watch"
	"k8s.io/client-go/tools/clientcmd"
)

// tap is a reverse proxy between the program and the API server. It changes nothing, delays requests on demand, and
// records the responses to lists and watches of pods.
type tap struct {
	fixture *fixture
	// kubeconfig is the account's, with the tap as server.
	kubeconfig string

	mu   sync.Mutex
	held map[string]chan struct{} // by method and path suffix
	seen chan struct{}            // receives once per delayed request
	// answers are the responses to lists and watches of pods.
	answers []*answer
}

// answer is a response body as sent on the wire.
type answer struct {
	uri    string
	zipped bool
	mu     sync.Mutex
	body   bytes.Buffer
}

// tap starts a tap for a kubeconfig.
func (l *fixture) tap(kubeconfig string) *tap {
	l.Helper()
	config := shared.REST()
	target, err := url.Parse(config.Host)
	l.Must(err)
	transport, err := rest.TransportFor(rest.AnonymousClientConfig(config))
	l.Must(err)
	t := &tap{fixture: l, held: map[string]chan struct{}{}, seen: make(chan struct{}, 64)}
	forward := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }, Transport: transport, FlushInterval: -1, ModifyResponse: t.listen,
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		t.wait(r)
		forward.ServeHTTP(w, r)
	}))
	server.EnableHTTP2 = true
	server.StartTLS()
	// Cleanups run in reverse order, so the program has ended before.
	l.Cleanup(func() { t.release(); server.CloseClientConnections(); server.Close() })

	known, err := clientcmd.LoadFromFile(kubeconfig)
	l.Must(err)
	for _, c := range known.Clusters {
		c.Server = server.URL
		c.CertificateAuthorityData = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	}
	t.kubeconfig = filepath.Join(l.TempDir(), "tapped.kubeconfig")
	l.Must(clientcmd.WriteToFile(*known, t.kubeconfig))
	return t
}

// hold delays requests with this method and path suffix until release.
func (t *tap) hold(method, end string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.held[method+" "+end] = make(chan struct{})
}

// release forwards all delayed requests and stops delaying.
func (t *tap) release() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, gate := range t.held {
		close(gate)
	}
	clear(t.held)
}

// waitHeld waits until a request is delayed.
func (t *tap) waitHeld() {
	t.fixture.Helper()
	t.fixture.Until("a request to delay", func() bool {
		select {
		case <-t.seen:
			return true
		default:
			return false
		}
	})
}

func (t *tap) wait(r *http.Request) {
	t.mu.Lock()
	var gate chan struct{}
	for what, g := range t.held {
		method, end, _ := strings.Cut(what, " ")
		if r.Method == method && strings.HasSuffix(r.URL.Path, end) {
			gate = g
		}
	}
	t.mu.Unlock()
	if gate == nil {
		return
	}
	t.seen <- struct{}{}
	select {
	case <-gate:
	case <-r.Context().Done():
	}
}

// listen records responses about pods.
func (t *tap) listen(r *http.Response) error {
	if r.Request.Method != http.MethodGet || !strings.HasSuffix(r.Request.URL.Path, "/pods") {
		return nil
	}
	a := &answer{uri: r.Request.URL.RequestURI(), zipped: r.Header.Get("Content-Encoding") == "gzip"}
	t.mu.Lock()
	t.answers = append(t.answers, a)
	t.mu.Unlock()
	r.Body = &listener{ReadCloser: r.Body, to: a}
	return nil
}

// listener is a response body that copies its data to an answer.
type listener struct {
	io.ReadCloser
	to *answer
}

func (l *listener) Read(into []byte) (int, error) {
	n, err := l.ReadCloser.Read(into)
	l.to.mu.Lock()
	defer l.to.mu.Unlock()
	l.to.body.Write(into[:n])
	return n, err
}

// received sums up the data that the program has received so far.
type received struct {
	// wire and plain are sizes in bytes, as sent and uncompressed.
	wire, plain int
	// pods counts how often each pod was sent, by name.
	pods map[string]int
}

// received sums up the recorded lists and watches.
func (t *tap) received() received {
	t.fixture.Helper()
	t.mu.Lock()
	defer t.mu.Unlock()
	all := received{pods: map[string]int{}}
	for _, a := range t.answers {
		a.mu.Lock()
		body := bytes.Clone(a.body.Bytes())
		a.mu.Unlock()
		all.wire += len(body)
		if a.zipped {
			unzipped, err := gzip.NewReader(bytes.NewReader(body))
			t.fixture.Must(err)
			// The gzip stream of an open watch has no end yet.
			if body, err = io.ReadAll(unzipped); err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.fixture.Fatal(err)
			}
		}
		all.plain += len(body)
		all.count(t.fixture, body)
	}
	return all
}

// count decodes watch events in protobuf and ignores an incomplete last one.
func (s *received) count(l *fixture, body []byte) {
	l.Helper()
	info, _ := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), runtime.ContentTypeProtobuf)
	frames := info.StreamSerializer.NewFrameReader(io.NopCloser(bytes.NewReader(body)))
	events := restwatch.NewDecoder(streaming.NewDecoder(frames, info.StreamSerializer.Serializer), scheme.Codecs.UniversalDeserializer())
	for {
		kind, object, err := events.Decode()
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return
		}
		l.Must(err)
		if pod, is := object.(*core.Pod); is && kind != watch.Bookmark {
			s.pods[pod.Name]++
		}
	}
}
