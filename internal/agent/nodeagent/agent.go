package nodeagent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"

	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/agent/decisions"
	"github.com/meshcni/istio-cni/internal/agent/eventrecorder"
	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/installation"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/nodepods"
	"github.com/meshcni/istio-cni/internal/agent/page"
	"github.com/meshcni/istio-cni/internal/agent/podcache"
	"github.com/meshcni/istio-cni/internal/agent/serve"
	"github.com/meshcni/istio-cni/internal/agent/teardown"
	"github.com/meshcni/istio-cni/internal/agent/unixsock"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/selfcheck"
)

// component is the source component of the agent's events.
const component = "istio-cni"

// shutdownTimeout bounds the work after SIGTERM: a pod has 30 s by default.
const shutdownTimeout = 25 * time.Second

// selfTest is a part of the agent's health. docs/errors.md has the comments.
const (
	// The configured backend redirects packets in a test namespace. If not, the reason names what the kernel lacks; the test is repeated
	// every 30 s.
	selfTest health.PartName = "selftest"
)

// The reasons of events on the node. docs/errors.md has the comments.
const (
	// The ConfigMap or `CONFIG_DIR` has a bad value: the last valid content applies.
	eventRefused kube.EventReason = "CNIConfigRefused"
	// Pods cannot be redirected on this node, as in part `selftest`.
	eventSelfTest kube.EventReason = "CNISelfTestFailed"
	// `pods.sock` cannot be made in the run directory. Pods start as long as the API server answers; mend it and restart the agent.
	eventSocket kube.EventReason = "CNILookupSocketFailed"
)

// parts returns the parts of the agent's health that describe the node.
func parts() []health.PartName {
	return []health.PartName{installation.PartBinaries, installation.PartKubeconfig, installation.PartConf, selfTest}
}

// node is a running agent.
type node struct {
	Options

	health  *health.State
	metrics *metrics.Metrics
	// api is nil without the address of an API server.
	api *kube.Client
	// events is the recorder of all parts of the agent, nil without an API.
	events *eventrecorder.Recorder
	// installation is nil if CNI_ENABLE_INSTALL is false.
	installation *installation.Installation
	relay        *unixsock.Server
	// pods and lookups are nil if the node's pods cannot be watched.
	pods    *podcache.Store
	lookups *unixsock.Server
	// decisions has the decisions of plugins. endKeeping stops the writing of their file; it is nil without an API.
	decisions  decisions.Ring
	endKeeping func()
	relayLevel *slog.LevelVar
	// audit is nil if the audit is off or has not begun; noAudit is the reason why it is off.
	audit   atomic.Pointer[nodepods.Controller]
	noAudit atomic.Pointer[string]
	// held is the node's lock; only guardSockets uses it while the agent runs.
	held *hostfs.FileLock

	work sync.WaitGroup
	// background ends with the agent; its goroutines can be slow or fail for ever.
	background context.Context //nolint:containedctx // the life of the agent
	live       live
	// left is true when the agent is ending: removed files then stay removed.
	left atomic.Bool
	// verdict is the result of the self-test, nil before the first result.
	verdict atomic.Pointer[selfcheck.Verdict]
	// stanza is the plugin's current configuration.
	stanza atomic.Pointer[stanza]
	// ambient is nil without ambient mode.
	ambient *ambientMode
}

// stay runs the agent: steps with permanent failures come first, then the installation; goroutines beside it use the API
// server.
func (o Options) stay(ctx context.Context) error {
	n := &node{Options: o, metrics: metrics.New(o.Version), live: newLive(), relayLevel: &slog.LevelVar{}}
	n.configure(n.Config)
	required := parts()
	if !n.Config.Install {
		required = nil
		n.metrics.SetReady(true)
	}
	if n.Config.Ambient.Enabled && !n.Config.Observe {
		required = append(required, partAmbient)
	}
	n.health = health.NewState(health.Options{Log: n.Log, Now: clock.RealClock{}.Now, OnChange: n.metrics.SetReady}, required...)
	return serve.While(ctx, n.Log, n.start, n.ports()...)
}

// start opens what only one agent at a time may have, and runs until ctx ends.
func (n *node) start(ctx context.Context) (err error) {
	background, end := context.WithCancel(context.WithoutCancel(ctx))
	n.background = background
	defer func() {
		end()
		n.work.Wait()
		n.events.Shutdown()
		if n.held != nil {
			_ = n.held.Close()
		}
	}()
	for _, open := range []func(context.Context) error{n.lock, n.openRelay} {
		if opened, failed := n.await(ctx, open); failed != nil || !opened {
			return failed
		}
	}
	if n.api, err = kube.NewClient(n.Config.clientConfig()); err != nil {
		n.Log.WarnContext(ctx, "no API server: no events, no live configuration from a ConfigMap, and no way to tell an upgrade from a removal",
			slog.String("error", err.Error()))
	} else {
		n.events = eventrecorder.New(n.api, eventrecorder.Options{Log: n.Log, Count: n.metrics.EventReported}) //nolint:contextcheck // it ends with Shutdown
	}
	n.openLookups(ctx)
	if err = n.openAmbient(ctx); err != nil {
		return err
	}
	n.work.Go(n.guardSockets)
	return n.run(ctx)
}

func (n *node) ports() []serve.Port {
	local := n.scopeHandlers()
	local["/"] = page.Handler(map[string]http.Handler{
		"/decisions": n.decisions.Handler(), "/readyz": n.health.Handler(),
		"/api/agent": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			answer(w, map[string]any{ // for the web page
				"node": n.Config.NodeName, "version": n.Version, "audit": n.auditMode(), "interval": n.Config.Audit.Interval.Seconds(),
			})
		}),
		"/api/pods":                    n.audited(func(c *nodepods.Controller) http.Handler { return c.Handler(auditor.Port) }),
		"/api/pods/{namespace}/{name}": n.audited(func(c *nodepods.Controller) http.Handler { return c.PodHandler(auditor.Port) }),
	})
	return []serve.Port{
		{Flag: "--health-port", Number: int(n.Config.HealthPort), Handler: n.health.Handler()},
		{Flag: "--monitoring-port", Number: int(n.Config.MonitoringPort), Handler: n.metrics.Handler()},
		serve.Introspection("--ctrlz_port", n.Config.IntrospectionAddress, int(n.Config.IntrospectionPort), n.Config.Profiling, local),
	}
}

// lock acquires the node's lock. The relay's socket locks the node as well because Istio's agents do not know the lock.
func (n *node) lock(context.Context) (err error) {
	n.held, err = n.Config.lock()
	return err
}

// await calls open until no other agent holds the lock or the socket: the previous agent can still be ending. It returns false
// if ctx ended meanwhile.
func (n *node) await(ctx context.Context, open func(context.Context) error) (opened bool, err error) {
	reported := false
	_ = wait.PollUntilContextCancel(ctx, time.Second, true, func(ctx context.Context) (done bool, _ error) {
		err = open(ctx)
		if _, held := errors.AsType[*hostfs.HeldError](err); !held && !errors.Is(err, unixsock.ErrServed) {
			opened = err == nil
			return true, nil
		}
		n.standBy(err)
		if !reported {
			n.Log.InfoContext(ctx, "waiting for another node agent to end", slog.String("reason", err.Error()))
			reported = true
		}
		err = nil
		return false, nil
	})
	return opened, err
}

// standBy reports the readiness of the node while another agent serves it: a rollout that starts the new agent first ends the
// old agent only when the new one is ready.
func (n *node) standBy(err error) {
	if !n.Config.Install {
		return
	}
	served := n.Options.installation(installation.Report{Health: n.health}).Served()
	for _, part := range parts() {
		if served {
			n.health.Ready(part)
		} else {
			n.health.NotReady(part, "waiting for another node agent to end: "+err.Error())
		}
	}
}

// run installs until ctx ends, and then decides whether to uninstall.
func (n *node) run(ctx context.Context) error {
	failed := make(chan error, 1)
	if n.Config.Install {
		n.install()
		n.readDirectory() // live configuration applies from the first stanza on
		n.work.Go(func() { failed <- n.installation.Run(ctx) })
	} else {
		n.Log.InfoContext(ctx, "nothing is installed (CNI_ENABLE_INSTALL=false or CNI_OBSERVE=true)")
	}
	testing, endTest := context.WithCancel(ctx)
	defer endTest()
	tested := make(chan struct{})
	n.work.Go(func() {
		defer close(tested)
		if !n.Config.Observe { // the self-test would load kernel modules, and does not test another plugin
			n.test(testing)
		}
	})
	n.startWatches()
	select {
	case <-ctx.Done():
	case err := <-failed:
		if ctx.Err() == nil {
			return err
		}
	}
	endTest()
	<-tested // a later record would leave the verdict on the node
	n.left.Store(true)
	return n.shutdown(context.WithoutCancel(ctx))
}

// install creates the installation with the log level of an earlier request.
func (n *node) install() {
	n.live.mu.Lock()
	defer n.live.mu.Unlock()
	n.installation = n.Options.installation(installation.Report{Health: n.health, Metrics: n.metrics, Warn: n.warn})
	n.enforce()
}

// shutdown uninstalls if the agent's DaemonSet or the policy requires the uninstallation.
func (n *node) shutdown(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, shutdownTimeout)
	defer cancel()
	if n.installation == nil {
		return nil
	}
	n.Log.InfoContext(ctx, "received SIGTERM, deciding whether to uninstall", slog.String("policy", string(n.Config.UninstallOnExit)))
	verdict := teardown.ShouldUninstall(ctx, n.api, teardown.Self{
		Namespace: n.Config.Namespace, DaemonSet: n.Config.DaemonSet, NodeName: n.Config.NodeName, PodName: n.Config.PodName,
	}, n.Config.UninstallOnExit)
	n.Log.InfoContext(ctx, "teardown decision", slog.Bool("uninstall", verdict.Uninstall), slog.String("reason", string(verdict.Reason)),
		slog.String("detail", verdict.Detail))
	if !verdict.Uninstall {
		return nil
	}
	if n.endKeeping != nil {
		n.endKeeping() // a later write would leave the file on the node
	}
	if err := errors.Join(n.installation.Uninstall(ctx), n.closeAmbient(ctx)); err != nil {
		return fmt.Errorf("uninstalling: %w", err)
	}
	return n.Config.removeRest() // the lock is held until the process ends
}

// warn records an event on the node.
func (n *node) warn(reason kube.EventReason, message string) {
	if n.Config.NodeName == "" {
		return
	}
	n.events.Record(kube.Event{
		Object: kube.NodeRef(n.Config.NodeName), Reason: reason, Message: message, Type: kube.EventWarning, Component: component,
		Host: n.Config.NodeName,
	})
}

// runtimeRetry is the time between two requests for the node's runtime.
const runtimeRetry = 30 * time.Second

// askRuntime determines, for mode auto, whether the runtime loads drop-in files.
func (n *node) askRuntime() {
	_ = wait.PollUntilContextCancel(n.background, runtimeRetry, true, func(ctx context.Context) (known bool, _ error) {
		state, err := n.api.Node(ctx, n.Config.NodeName)
		if err != nil {
			n.Log.DebugContext(ctx, "the node's runtime is not known yet", slog.String("error", err.Error()))
			return false, nil
		}
		runtime := state.Status.NodeInfo.ContainerRuntimeVersion
		dropIns := installation.LoadsDropIns(runtime)
		n.Log.InfoContext(ctx, "the runtime is known", slog.String("runtime", runtime),
			slog.Bool("loads drop-in files", dropIns == cniconf.Loaded))
		n.installation.Change(func(w *cniconf.Want) { w.DropIns = dropIns })
		return true, nil
	})
}
