package nodepods

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/agent/unixsock"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/follow"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// traceFixture is an audit whose traces are served on a socket, like in the agent.
type traceFixture struct {
	*auditFixture

	socket string
}

func newTraceFixture(t *testing.T) *traceFixture {
	t.Helper()
	return traced(newAuditFixture(t, auditor.Settings{}, cniconf.NetConf{ExcludeNamespaces: []string{"kube-system"}}))
}

// traced serves the traces of an audit.
func traced(l *auditFixture) *traceFixture {
	l.Helper()
	l.want(audit.Captured, "")
	mux := http.NewServeMux()
	mux.Handle(agentapi.TracePattern, l.controller.TraceHandler())
	// A trace outlasts the socket's request timeout.
	s := agenttest.Serve(l.T, mux, func(o *unixsock.Options) { o.Timeout = 500 * time.Millisecond })
	return &traceFixture{l, s.Path}
}

// trace requests a trace of a pod, and calls each for every record.
func (l *traceFixture) trace(ctx context.Context, namespace, name string, query url.Values, each func(follow.Record)) error {
	agent, err := agentapi.Dial(ctx, l.socket)
	if err != nil {
		return err
	}
	defer agent.Close() //nolint:errcheck // no more writes follow
	return agent.Trace(ctx, namespace, name, query, func(line []byte) error {
		var r follow.Record
		err := json.Unmarshal(line, &r)
		each(r)
		return err
	})
}

// start begins a trace of the pod and waits for its first record.
func (l *traceFixture) start(ctx context.Context, query url.Values) (records chan follow.Record, failed chan error) {
	l.Helper()
	records, failed = make(chan follow.Record, 100), make(chan error, 1)
	go func() { failed <- l.trace(ctx, "shop", "web", query, func(r follow.Record) { records <- r }) }()
	select {
	case r := <-records:
		if r.Begin == nil || r.Begin.Subject != "pod shop/web" {
			l.Fatalf("it begins with %+v", r)
		}
	case err := <-failed:
		l.Fatal(err)
	}
	return records, failed
}

func (l *traceFixture) refused(status int, text string, err error) {
	l.Helper()
	refusal := (*agentapi.Refusal)(nil)
	if !errors.As(err, &refusal) || refusal.Status != status || !strings.Contains(refusal.Message, text) {
		l.Errorf("got %v, want %d with %q", err, status, text)
	}
}

// untraced waits until the namespace has no table of a trace.
func (l *traceFixture) untraced() {
	l.Helper()
	agenttest.Eventually(l.T, "the table stays", func() bool {
		return !strings.Contains(netnstest.Run(l, l.path, "nft", "list", "tables"), fmt.Sprint("trace-", os.Getpid()))
	})
}

func TestTraceOfAPod(t *testing.T) {
	t.Parallel()
	newTraceFixture(t).redirects("all other TCP is captured")
}

func TestTraceOfAPod_Ambient(t *testing.T) {
	t.Parallel()
	l := newAmbientFixture(t, redirect.Netlink)
	l.deaf = true
	l.begin(true)
	traced(l.auditFixture).redirects("all other TCP goes to ztunnel's outbound listener")
}

// redirects traces a packet that a rule with the reason redirects.
func (l *traceFixture) redirects(why string) {
	l.Helper()
	records, failed := l.start(l.Context(), url.Values{"for": {"2s"}, "to": {"10.88.0.1:80"}})
	time.Sleep(1100 * time.Millisecond) // longer than the socket's request timeout
	netnstest.Run(l, l.path, "bash", "-c", "for p in 81 80; do timeout 0.1 bash -c \"echo > /dev/tcp/10.88.0.1/$p\" 2>/dev/null; done; true")
	l.want(audit.Captured, "") // the trace's table is not a fault
	packets := 0
	for r := range records {
		if p := r.Packet; p != nil {
			packets++
			if p.Wanted != document.Past || !strings.Contains(p.Sentence, "is redirected to 127.0.0.1:15001: "+why) || !p.NoListener || len(p.Hops) < 3 || p.Hops[0].Why == "" {
				l.Errorf("got %+v", p)
			}
		}
		if e := r.End; e != nil {
			if packets != 1 || e.Packets != 1 || e.Past != 1 || e.Lost > 0 || e.Reason != "the time is over" {
				l.Errorf("%d packets, the end is %+v", packets, e)
			}
			break
		}
	}
	check.OK(l, <-failed)
	l.untraced()
}

// TestATraceEnds when its client disconnects, when another trace of the pod begins, and when its pod ends.
func TestATraceEnds(t *testing.T) {
	t.Parallel()
	l := newTraceFixture(t)
	ctx, cancel := context.WithCancel(t.Context())
	_, failed := l.start(ctx, nil)
	cancel()
	if err := <-failed; err == nil {
		t.Error("no error")
	}
	l.untraced()
	var records chan follow.Record
	first, ended := l.start(t.Context(), nil)
	records, failed = l.start(t.Context(), nil)
	if r := <-first; r.End == nil || r.End.Reason != "another trace of the pod began" {
		t.Errorf("it ends with %+v", r)
	}
	check.OK(t, <-ended)
	l.server.Delete(l.pod.path())
	if r := <-records; r.End == nil || r.End.Reason != "the pod ended" || !strings.Contains(r.End.Hint, "no packet was seen") {
		t.Errorf("it ends with %+v", r)
	}
	check.OK(t, <-failed)
	l.untraced()
}

func TestRefusedTraces(t *testing.T) {
	t.Parallel()
	l := newTraceFixture(t)
	none := func(r follow.Record) { t.Errorf("got %+v", r) }
	outside := podSpec{ns: "kube-system", name: "dns", uid: "d", phase: "Running"}.at("10.88.0.7/24")
	l.set(outside)
	agenttest.Eventually(t, "the other pod is missing", func() bool { return len(l.controller.Pods()) == 2 })
	l.refused(http.StatusNotFound, "no such pod", l.trace(t.Context(), "shop", "other", nil, none))
	l.refused(http.StatusConflict, sidecar.ExcludedNamespace.Sentence(), l.trace(t.Context(), "kube-system", "dns", nil, none))
	for name, value := range map[string]string{"to": "x", "from": "1.2.3.4:5", "port": "0", "for": "11m"} {
		l.refused(http.StatusBadRequest, name+`: value "`+value+`"`, l.trace(t.Context(), "shop", "web", url.Values{name: {value}}, none))
	}
}
