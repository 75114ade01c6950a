package installer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/departure"
	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/installation"
	"github.com/meshcni/istio-cni/internal/agent/logrelay"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podinfo"
	"github.com/meshcni/istio-cni/internal/agent/serve"
	"github.com/meshcni/istio-cni/internal/agent/unixsock"
	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/selfcheck"
)

// component is the source of our events.
const component = "istio-cni"

// goodbye bounds what is done after the signal to end: a pod has 30 s by default.
const goodbye = 25 * time.Second

// clock is the time of day, for records, events and health.
func clock() time.Time { return time.Now() } //nolint:forbidigo // what everything below takes its clock from

// node is the agent at work.
type node struct {
	in  input
	cfg Config
	log *slog.Logger

	health  *health.State
	metrics *metrics.Metrics
	// api is nil when nobody said where the API server is.
	api *kube.Client
	// events is that of all parts of the agent, nil without an API.
	events *kube.EventRecorder
	// installation is nil when nothing is to be installed.
	installation *installation.Installation
	relay        *unixsock.Server
	// pods and lookups are nil when the node's pods cannot be followed.
	pods    *podinfo.Store
	lookups *unixsock.Server
	// decisions are what plugins reported.
	decisions  podinfo.Ring
	relayLevel *slog.LevelVar
	// held is the claim to the node; guardSocket alone uses it while the agent runs.
	held *hostfs.FileLock

	work sync.WaitGroup
	// background ends with the agent; what is started with it may be slow or fail for ever.
	background context.Context //nolint:containedctx // the life of the agent
	live       live
	// left says that the agent is leaving: what is removed then stays away.
	left atomic.Bool
	// verdict is that of the self-test, nil until there is one.
	verdict atomic.Pointer[selfcheck.Verdict]
	// stanza is what the plugin is told now.
	stanza atomic.Pointer[cniconf.Stanza]
}

// stay is the agent: everything that can fail for good comes first, then the installation, and whatever needs the API
// server goes on beside it.
func stay(ctx context.Context, in input, cfg Config, log *slog.Logger) error {
	background, end := context.WithCancel(context.WithoutCancel(ctx))
	n := &node{in: in, cfg: cfg, log: log, background: background, metrics: metrics.New(applet.Build().Version())}
	n.stanza.Store(&cfg.Stanza)
	defer func() {
		n.work.Wait()
		n.events.Shutdown()
		if n.held != nil {
			_ = n.held.Close()
		}
	}()
	defer end()
	parts := []string{installation.PartBinaries, installation.PartKubeconfig, installation.PartConf, partSelftest}
	if !cfg.Install {
		parts = nil
	}
	n.health = health.NewState(health.Options{
		Log: log, Now: clock, OnReady: n.metrics.BecameReady, OnUnready: n.metrics.BecameUnready,
	}, parts...)

	servers, err := serve.Open(ctx, log, n.ports()...)
	if err != nil {
		return err
	}
	n.start(func() { n.logged("serving health and metrics", servers.Serve(background)) })
	for _, claim := range []func(context.Context) error{n.lock, n.openRelay} {
		if claimed, problem := n.await(ctx, claim); problem != nil || !claimed {
			return problem
		}
	}
	if n.api, err = kube.NewClient(cfg.access()); err != nil {
		log.WarnContext(ctx, "no API server: no events, no live configuration from a ConfigMap, and no way to tell an upgrade from a removal",
			slog.String("error", err.Error()))
	} else {
		n.events = kube.NewEventRecorder(n.api, kube.EventOptions{Log: log, Count: n.metrics.EventReported}) //nolint:contextcheck // it ends with Shutdown
	}
	n.openLookups(ctx)
	n.start(func() { n.guardSockets(n.background) })
	return n.run(ctx)
}

func (n *node) start(work func()) {
	n.work.Go(work)
}

func (n *node) logged(doing string, err error) {
	if err != nil {
		n.log.Error("a part of the agent ended", slog.String("doing", doing), slog.String("error", err.Error()))
	}
}

func (n *node) ports() []serve.Port {
	return []serve.Port{
		{Flag: "--health-port", Number: int(n.cfg.HealthPort), Handler: n.health.Handler()},
		{Flag: "--monitoring-port", Number: int(n.cfg.MonitoringPort), Handler: n.metrics.Handler()},
		serve.Introspection("--ctrlz_port", n.cfg.IntrospectionAddress, int(n.cfg.IntrospectionPort), serve.Page{
			Path: "GET /decisions", Handler: n.decisions.Handler(),
		}),
	}
}

// access is the agent's own way to the API server.
func (c Config) access() kube.Config {
	i := c.installationConfig()
	return kube.Config{
		Server: i.Server, TokenFile: i.Token, CAFile: c.Kubeconfig.CA(), SkipVerify: c.Kubeconfig.SkipTLSVerify,
	}
}

// lock is the claim to the node, and the relay's socket another one: agents of the reference know no lock.
func (n *node) lock(context.Context) (err error) {
	n.held, err = alone(n.cfg)
	return err
}

// await makes a claim as soon as no other agent works on the node: the one of before may still be ending. It gives false
// if the agent was told to end meanwhile.
func (n *node) await(ctx context.Context, claim func(context.Context) error) (claimed bool, err error) {
	told := false
	for {
		err := claim(ctx)
		busy := (*hostfs.HeldError)(nil)
		if !errors.As(err, &busy) && !errors.Is(err, unixsock.ErrServed) {
			return err == nil, err
		}
		n.standBy(err)
		if !told {
			n.log.InfoContext(ctx, "waiting for another node agent to end", slog.String("reason", err.Error()))
			told = true
		}
		timer := time.NewTimer(time.Second)
		select {
		case <-ctx.Done():
			timer.Stop()
			return false, nil
		case <-timer.C:
		}
	}
}

// standBy shows the node as it is while another agent serves it: a rollout that starts the new agent first ends the old
// one only when the new one is ready.
func (n *node) standBy(err error) {
	if !n.cfg.Install {
		return
	}
	other := installation.New(n.log, hostfs.Disk{}, n.cfg.installationConfig(), installation.Report{Health: n.health}, nil)
	served := other.Served()
	for _, part := range []string{installation.PartBinaries, installation.PartKubeconfig, installation.PartConf, partSelftest} {
		if served {
			n.health.Ready(part)
		} else {
			n.health.NotReady(part, "waiting for another node agent to end: "+err.Error())
		}
	}
}

func (n *node) openRelay(ctx context.Context) error {
	n.relayLevel = &slog.LevelVar{}
	n.relayLevel.Set(slog.Level(n.cfg.Log.Plugin))
	server, err := unixsock.Open(ctx, unixsock.Options{
		Path: n.cfg.LogSocket, DirMode: n.cfg.RunDirMode, Mode: n.cfg.LogSocketMode, Connections: 16, Timeout: 2 * time.Second,
		UnauthorizedPeer: n.metrics.LogConnectionRefused, Log: n.log,
	})
	if err != nil {
		return err
	}
	n.relay = server
	relay := logrelay.New(logrelay.Options{Records: n.log.Handler(), Level: n.relayLevel, Log: n.log, Metrics: n.metrics})
	n.start(func() { server.Serve(n.background, relay.Handler()) })
	return nil
}

// guardSockets makes sockets and the lock again when somebody removed them.
func (n *node) guardSockets(ctx context.Context) {
	watch := n.watch()
	defer watch.Close()
	guarded := map[string]*unixsock.Server{n.cfg.LogSocket: n.relay}
	if n.lookups != nil {
		guarded[n.cfg.podSocket()] = n.lookups
	}
	paths := []hostfs.Path{{Name: lockFile(n.cfg)}, {Name: n.cfg.verdictFile()}}
	for path := range guarded {
		paths = append(paths, hostfs.Path{Name: path})
	}
	watch.Set(paths...) // logged, and polled
	for {
		select {
		case <-ctx.Done():
			return
		case <-watch.Changed():
		}
		n.mend(ctx, guarded)
	}
}

// watch is for what is watched beside the installation. The installation's own watch logs what the kernel lacks for all.
func (n *node) watch() *hostfs.Watch {
	log := n.log
	if n.cfg.Install {
		log = slog.New(slog.DiscardHandler)
	}
	return hostfs.NewWatch(log)
}

func (n *node) mend(ctx context.Context, sockets map[string]*unixsock.Server) {
	if again, err := n.held.Reacquire(lockFile(n.cfg)); again || err != nil {
		n.log.WarnContext(ctx, "the lock was removed, and is taken again", slog.Any("error", err))
	}
	n.record(ctx)
	for path, server := range sockets {
		if server.Listening() {
			continue
		}
		if err := server.Rebind(ctx); err != nil {
			n.log.WarnContext(ctx, "a socket cannot be made again", slog.String("path", path), slog.String("error", err.Error()))
		}
	}
}

// run installs until the agent is told to end, and then decides what to leave behind.
func (n *node) run(ctx context.Context) error {
	failed := make(chan error, 1)
	if n.cfg.Install {
		n.installation = installation.New(n.log, hostfs.Disk{}, n.cfg.installationConfig(), installation.Report{
			Health: n.health, Metrics: n.metrics, Warn: n.warn,
		}, nil)
		n.readDirectory() // what it says counts from the first stanza on
		n.start(func() { failed <- n.installation.Run(ctx) })
	} else {
		n.log.InfoContext(ctx, "nothing is installed (CNI_ENABLE_INSTALL=false)")
	}
	testing, endTest := context.WithCancel(ctx)
	defer endTest()
	tested := make(chan struct{})
	n.start(func() {
		defer close(tested)
		n.test(testing)
	})
	n.follow()
	select {
	case <-ctx.Done():
	case err := <-failed:
		if ctx.Err() == nil {
			return err
		}
	}
	endTest()
	<-tested // what it writes down would be left
	n.left.Store(true)
	return n.leave(context.WithoutCancel(ctx))
}

// leave gives the node back if the agent leaves for good.
func (n *node) leave(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, goodbye)
	defer cancel()
	if n.installation == nil {
		return nil
	}
	n.log.InfoContext(ctx, "told to end: asking whether for good", slog.String("policy", string(n.cfg.UninstallOnExit)))
	verdict := departure.ShouldUninstall(ctx, n.api, departure.Self{
		Namespace: n.cfg.Namespace, DaemonSet: n.cfg.DaemonSet, NodeName: n.cfg.NodeName, PodName: n.cfg.PodName,
	}, n.cfg.UninstallOnExit)
	n.log.InfoContext(ctx, "decided", slog.Bool("uninstall", verdict.Uninstall), slog.String("reason", string(verdict.Reason)),
		slog.String("detail", verdict.Detail))
	if !verdict.Uninstall {
		return nil
	}
	if _, err := n.installation.Uninstall(ctx); err != nil {
		return fmt.Errorf("giving the node back: %w", err)
	}
	return forget(n.cfg) // the lock is held until the process ends, and nobody may come after it
}

// warn records an event on the node.
func (n *node) warn(reason, message string) {
	if n.cfg.NodeName == "" {
		return
	}
	n.events.Record(kube.Event{
		Object: kube.NodeRef(n.cfg.NodeName), Reason: reason, Message: message, Type: kube.EventWarning, Component: component,
		Host: n.cfg.NodeName,
	})
}

// runtimeRetry is how long the question for the node's runtime rests after a failure.
const runtimeRetry = 30 * time.Second

// askRuntime finds out, for mode auto, whether the runtime loads drop-in files.
func (n *node) askRuntime() {
	for n.background.Err() == nil {
		state, err := n.api.Node(n.background, n.cfg.NodeName)
		if err == nil {
			known := installation.LoadsDropIns(state.Runtime)
			n.log.Info("the runtime is known", slog.String("runtime", state.Runtime), slog.Bool("loads drop-in files", known == cniconf.Loaded))
			n.installation.DropIns(known)
			return
		}
		n.log.Debug("the node's runtime is not known yet", slog.String("error", err.Error()))
		timer := time.NewTimer(runtimeRetry)
		select {
		case <-n.background.Done():
		case <-timer.C:
		}
		timer.Stop()
	}
}
