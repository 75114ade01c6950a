package nodeagent

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/agent/nodepods"
	"github.com/meshcni/istio-cni/internal/agent/podcache"
	"github.com/meshcni/istio-cni/internal/agent/unixsock"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// openLookups starts the watch of the node's pods and the server for plugins. Without the server, plugins query the API server.
func (n *node) openLookups(ctx context.Context) {
	if n.api == nil || n.Config.NodeName == "" {
		n.Log.InfoContext(ctx, "plugins query the API server themselves: the agent does not know the API server or its node's name")
		return
	}
	n.pods = podcache.NewStore(podcache.Options{
		API: n.api, Node: n.Config.NodeName, Log: n.Log, Count: n.metrics.PodSeen, Keep: n.Config.Repair.Keeps(), KeepMessage: n.Config.Repair.Predicate.Message,
	})
	n.work.Go(func() { n.pods.Run(n.background) }) // race repair uses the pods as well
	n.keepDecisions()                              //nolint:contextcheck // it ends with the agent, after ctx
	server, err := unixsock.Open(ctx, unixsock.Options{
		Path: n.Config.podSocket(), DirMode: n.Config.RunDirMode, Mode: 0o600, Connections: 256, Timeout: 5 * time.Second, KeepAlive: true, Log: n.Log,
	})
	if err != nil {
		// Plugins work without the server; the node does not work without the plugin.
		n.Log.ErrorContext(ctx, "plugins cannot query this agent, and query the API server", slog.String("error", err.Error()))
		n.warn(eventSocket, "plugins cannot query the node agent, and query the API server: "+err.Error())
		return
	}
	n.lookups = server
	service := podcache.Service{
		Store: n.pods, Ring: &n.decisions, Metrics: n.metrics,
		Audit:    n.audited(func(c *nodepods.Controller) http.Handler { return c.Handler(auditor.Socket) }),
		AuditPod: n.audited(func(c *nodepods.Controller) http.Handler { return c.PodHandler(auditor.Socket) }),
		Trace:    n.audited((*nodepods.Controller).TraceHandler), Bundle: n.bundle(),
	}
	n.work.Go(func() { server.Serve(n.background, service.Handler()) })
}

// keepDecisions restores the decisions of the previous agent, and keeps the file until n.endKeeping.
func (n *node) keepDecisions() {
	n.decisions.Restore(n.Config.decisionsFile(), n.Log)
	keeping, end := context.WithCancel(n.background)
	kept := make(chan struct{})
	n.endKeeping = func() { end(); <-kept }
	n.work.Go(func() {
		defer close(kept)
		n.decisions.Keep(keeping, n.Config.decisionsFile(), n.Log)
	})
	if n.Config.Observe { // another plugin's decisions are not known
		return
	}
	n.work.Go(func() {
		n.decisions.RecordOutside(n.background, n.pods.Follow, func() (sidecar.Policy, error) {
			conf, err := n.plugin()
			return conf.Policy(), err
		})
	})
}
