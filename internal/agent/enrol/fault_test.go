package enrol_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/enrol"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/agent/ztunnels/ztunneltest"
	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/sandbox/sandboxtest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// overwrite writes the annotation as another controller would.
func (p *pod) overwrite(value string) {
	p.f.Helper()
	p.f.server.Edit(p.object(), func(object map[string]any) {
		p.f.Do(unstructured.SetNestedField(object, value, "metadata", "annotations", ambient.RedirectionKey))
	})
}

// TestEnrol_AnnotationOfOthers: a value that another writer gives the annotation does not stay.
func TestEnrol_AnnotationOfOthers(t *testing.T) {
	f := newParallel(t)
	p, out := f.pod("web", labelled), f.pod("out")
	_, z := f.mesh()
	p.enrolled(z)
	for _, value := range []string{"disabled", pending, "", "x"} {
		p.overwrite(value)
		agenttest.Eventually(t, "the annotation stays "+value, func() bool { return p.annotation() == enabled })
		out.overwrite(value)
		out.released(z)
	}
	out.overwrite(enabled)
	out.released(z)
	if n := f.patches(); n > 30 {
		t.Errorf("%d patches", n)
	}
}

// TestEnrol_SidecarWithAnnotation: a pod with a sidecar keeps its rules, whatever its template says about ambient mode.
func TestEnrol_SidecarWithAnnotation(t *testing.T) {
	t.Parallel()
	for _, value := range []string{pending, enabled, "x"} {
		t.Run(value, func(t *testing.T) {
			f := newParallel(t)
			p := f.pod("web", was(value), func(p *pod) { p.annotations["sidecar.istio.io/status"] = "{}" })
			spec := redirect.Default()
			check.OK(t, check.Err(p.space().Apply(t.Context(), spec, redirection.Reconcile)))
			f.mesh()
			agenttest.Eventually(t, "the annotation stays", func() bool { return p.annotation() == "" })
			report, err := p.space().Verify(t.Context(), spec)
			if check.OK(t, err); !report.Clean() || !report.Mesh {
				t.Errorf("the rules of its sidecar: %v %v", report.Diffs, report.Routing)
			}
		})
	}
}

// pause is a log that stops at a text until it goes on.
type pause struct {
	slog.Handler
	text          string
	reached, goOn chan struct{}
	once          *sync.Once
}

func (p pause) Handle(ctx context.Context, r slog.Record) error {
	if strings.Contains(r.Message, p.text) {
		p.once.Do(func() {
			close(p.reached)
			<-p.goOn
		})
	}
	return p.Handler.Handle(ctx, r)
}

func (p pause) WithAttrs(a []slog.Attr) slog.Handler {
	p.Handler = p.Handler.WithAttrs(a)
	return p
}

// TestEnrol_DeletedMeanwhile: a pod that is deleted during its turn leaves nothing.
func TestEnrol_DeletedMeanwhile(t *testing.T) {
	f := newParallel(t)
	p := f.pod("web", labelled)
	before := open(t, p)
	at := pause{slog.NewTextHandler(f.log, nil), "wrote the rules", make(chan struct{}), make(chan struct{}), &sync.Once{}}
	a := f.agent(func(o *enrol.Options) { o.Log = slog.New(at) })
	z := f.ztunnel(ztunneltest.Options{})
	<-at.reached
	f.server.Delete(p.object())
	agenttest.Eventually(t, "it is known", func() bool {
		_, known := a.pods.Status(p.uid)
		return !known
	})
	close(at.goOn)
	other := f.pod("other", labelled)
	other.enrolled(z)
	agenttest.Until(t, func() string { return fmt.Sprint(z.Pods(), p.entry()) }, func() bool { return len(z.Pods()) == 1 && p.entry() == "" })
	agenttest.Eventually(t, "its namespace is open", func() bool { return open(t, p) == before })
}

// open returns the number of descriptors of this process for the pod's namespace.
func open(t *testing.T, p *pod) (n int) {
	t.Helper()
	inode := fmt.Sprintf("net:[%d]", sandboxtest.Inode(t, p.path).Ino)
	all, err := filepath.Glob("/proc/self/fd/*")
	check.OK(t, err)
	for _, one := range all {
		if to, err := os.Readlink(one); err == nil && to == inode {
			n++
		}
	}
	return n
}

// TestEnrol_Ended: nobody searches for a pod that has ended, nor holds the namespace that a plugin has offered.
func TestEnrol_Ended(t *testing.T) {
	f := newParallel(t)
	lost := f.pod("lost", labelled, func(p *pod) { p.address = "10.99.0.1" })
	f.Do(os.RemoveAll(filepath.Join(f.Proc, "1001")))
	job := f.pod("job", labelled, func(p *pod) { p.addressless, p.phase = true, "Pending" })
	a := f.agent()
	agenttest.Eventually(t, "it is not searched", func() bool { return a.pods.Searching() == 1 })
	event, before := job.event(), open(t, job)
	job.phase, lost.phase = "Failed", "Failed"
	job.publish()
	lost.publish()
	agenttest.Eventually(t, "it is searched", func() bool { return a.pods.Searching() == 0 })
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := a.pods.Add(ctx, event); err == nil {
		t.Error("an ended pod is enrolled")
	}
	agenttest.Eventually(t, "its namespace is open", func() bool { return open(t, job) == before })
}

// TestEnrol_APIServerDown: the pauses between requests for a pod grow.
func TestEnrol_APIServerDown(t *testing.T) {
	f := newParallel(t)
	f.server.FailOn("status", kubetest.Forbidden, 1000)
	f.pod("web", labelled)
	now := clocktesting.NewFakeClock(time.Now())
	f.agent(func(o *enrol.Options) { o.Clock = now })
	began := now.Now()
	agenttest.Eventually(t, "no five requests", func() bool {
		now.Step(50 * time.Millisecond)
		return f.patches() == 5
	})
	const least = podwork.RetryBase * (1 + 2 + 4 + 8)
	if took := now.Since(began); took < least {
		t.Errorf("5 requests in %v, want at least %v", took, least)
	}
}

// TestEnrol_ReleasedWhilePatched: the annotation is not written after ztunnel has acknowledged the deletion.
func TestEnrol_ReleasedWhilePatched(t *testing.T) {
	f := newParallel(t)
	p := f.pod("web", labelled, was(pending))
	f.server.FailOn("status", kubetest.Hang, 1)
	_, z := f.mesh()
	agenttest.Eventually(t, "no patch", func() bool { return f.patches() == 1 })
	z.Behave(func(z *ztunneltest.Ztunnel, r ztunneltest.Request) {
		if r.Kind.String() == "Del" && f.patches() == 1 {
			t.Errorf("%s while the annotation is being written", r)
		}
		z.Serve(r)
	})
	p.relabel("")
	p.released(z)
}

// TestStart_Pending: the snapshot has a pod that ztunnel serves and whose annotation could not be written.
func TestStart_Pending(t *testing.T) {
	f := newParallel(t)
	p := f.pod("web", labelled, was(pending))
	f.server.FailOn("status", kubetest.ServerError, 1000)
	first := f.agent()
	z := f.ztunnel(ztunneltest.Options{Reconnect: true})
	agenttest.Eventually(t, "ztunnel has not got it", func() bool { return len(z.Pods()) == 1 && z.Ready() })
	first.stop()
	before := len(z.Requests())
	f.agent()
	agenttest.Eventually(t, "no snapshot", func() bool { return len(z.Requests()) > before })
	check.Contains(t, z.Requests()[before].String(), p.uid)
}

// TestStart_HostNetwork: an annotation does not bring the node's own address into the probe set.
func TestStart_HostNetwork(t *testing.T) {
	f := newParallel(t)
	p := f.pod("web", was(enabled), func(p *pod) { p.host = true })
	f.server.FailOn("status", kubetest.ServerError, 1000)
	in := f.pod("in", labelled, was(enabled))
	f.mesh()
	agenttest.Eventually(t, "no entry", func() bool { return in.entry() != "" })
	check.Equal(t, p.entry(), "", "the entry of the node's address")
}

// TestEnrol_Recreated: pods of a StatefulSet come again under their names, with new UIDs and old addresses.
func TestEnrol_Recreated(t *testing.T) {
	f := newParallel(t)
	p := f.pod("web-0", labelled)
	a := f.agent()
	z := f.ztunnel(ztunneltest.Options{Reconnect: true})
	for i := range 15 {
		f.server.Delete(p.object())
		if i%3 == 0 {
			f.server.CloseWatches()
			f.server.Compact()
		}
		p = f.pod("web-0", labelled, func(p *pod) { p.address = "10.88.0.11" })
		if i%2 == 0 {
			p.enrolled(z)
		}
	}
	p.enrolled(z)
	agenttest.Eventually(t, "pods are left", func() bool {
		in, wait := a.pods.Counts()
		return len(z.Pods()) == 1 && in == 1 && wait == 0
	})
}

// TestEnrol_NamespacesForbidden: while namespaces cannot be read nothing is released.
func TestEnrol_NamespacesForbidden(t *testing.T) {
	f := newParallel(t)
	f.namespace("ambient")
	p := f.pod("web")
	first := f.agent()
	z := f.ztunnel(ztunneltest.Options{Reconnect: true})
	p.enrolled(z)
	first.stop()
	f.server.FailOn("namespaces?", kubetest.Forbidden, 12)
	before := f.patches()
	f.agent()
	p.enrolled(z)
	agenttest.Eventually(t, "no snapshot", z.Ready)
	p.enrolled(z)
	check.Equal(t, f.patches(), before, "patches")
}

// TestEnrol_HugeAnnotation: odd values are ignored.
func TestEnrol_HugeAnnotation(t *testing.T) {
	f := newParallel(t)
	p := f.pod("web", labelled, func(p *pod) {
		p.annotations[ambient.RerouteInterfacesKey] = strings.Repeat("eth0,", 50000)
		p.annotations[ambient.DNSCaptureKey] = "\x00\nmaybe"
	})
	f.agent()
	p.enrolled(f.ztunnel(ztunneltest.Options{}))
	if n := len(f.log.String()); n > 100000 {
		t.Errorf("%d bytes of log", n)
	}
}

// TestEnrol_SlowFailure: a pod whose rules take long to read and cannot be written does not keep a worker from other pods.
func TestEnrol_SlowFailure(t *testing.T) {
	f := newParallel(t)
	now := clocktesting.NewFakeClock(time.Now())
	p := f.pod("web", labelled)
	nft := exec.CommandContext(t.Context(), "nsenter", "--net="+p.path, "nft", "-i")
	input, err := nft.StdinPipe()
	check.OK(t, err)
	check.OK(t, nft.Start())
	t.Cleanup(func() { _ = nft.Wait() })
	// While nft runs, the kernel refuses changes of this table by others (NFT_TABLE_F_OWNER).
	text := "add table ip mangle { flags owner; }\nadd table ip y\nadd chain ip y y\n" + strings.Repeat("add rule ip y y accept\n", 10000)
	check.OK(t, check.Err(io.WriteString(input, text)))
	agenttest.Eventually(t, "no rules", func() bool {
		return strings.Count(netnstest.Run(t, p.path, "nft", "list", "ruleset"), "accept") == 10000
	})
	var failed atomic.Int32
	f.agent(func(o *enrol.Options) {
		o.Clock = now
		o.Failed = func(step metrics.AmbientStep) {
			if step == metrics.StepRules {
				failed.Add(1)
			}
		}
	})
	z := f.ztunnel(ztunneltest.Options{})
	agenttest.Eventually(t, "the rules are written", func() bool {
		now.Step(time.Second)
		return failed.Load() > 0
	})
	// Ten minutes, in which an attempt takes some seconds: a thousand times faster than the clock of the machine.
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for range 600 {
		<-tick.C
		now.Step(time.Second)
	}
	if n := failed.Load(); n > 30 { // about 4; about 45 without the pause
		t.Errorf("%d attempts", n)
	}
	f.pod("other", labelled).enrolledAfter(now, 10*time.Millisecond, z)
	check.OK(t, input.Close())
	p.enrolledAfter(now, time.Second, z) // they are written again
}

// enrolledAfter steps the clock until the pod is enrolled.
func (p *pod) enrolledAfter(now *clocktesting.FakeClock, step time.Duration, z *ztunneltest.Ztunnel) {
	p.f.Helper()
	agenttest.Until(p.f.T, func() string { return p.problem(z) }, func() bool {
		now.Step(step)
		return p.problem(z) == ""
	})
}

// TestEnrol_UnreadableRules: rules that cannot be read are not read again at each of their changes.
func TestEnrol_UnreadableRules(t *testing.T) {
	f := newParallel(t)
	now := clocktesting.NewFakeClock(time.Now())
	p, other := f.pod("web", labelled), f.pod("other", labelled)
	a := f.agent(func(o *enrol.Options) { o.Clock = now })
	z := f.ztunnel(ztunneltest.Options{})
	p.enrolledAfter(now, 10*time.Millisecond, z)
	other.enrolledAfter(now, 10*time.Millisecond, z)
	rules := "add table ip nat\nadd chain ip nat y\n" + strings.Repeat("add rule ip nat y accept\n", 60000)
	netnstest.Feed(t, p.path, rules, "nft", "-f", "-")
	agenttest.Eventually(t, "the rules are read", func() bool {
		now.Step(10 * time.Millisecond)
		return strings.Contains(p.missing(a), "cannot be inspected")
	})
	netnstest.Run(t, p.path, "nft", "delete", "chain", "ip", "nat", "y")
	now.Step(50 * time.Second)
	other.enrolled(z)
	if p.missing(a) == "" {
		t.Error("they are read again")
	}
	p.enrolledAfter(now, time.Second, z) // they are read again
}
