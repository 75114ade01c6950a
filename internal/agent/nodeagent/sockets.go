package nodeagent

import (
	"context"
	"encoding/json"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/agent/logserver"
	"github.com/meshcni/istio-cni/internal/agent/nodepods"
	"github.com/meshcni/istio-cni/internal/agent/podcache"
	"github.com/meshcni/istio-cni/internal/agent/unixsock"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redact"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// openRelay serves the socket to which plugins send their log.
func (n *node) openRelay(ctx context.Context) error {
	server, err := unixsock.Open(ctx, unixsock.Options{
		Path: n.Config.LogSocket, DirMode: n.Config.RunDirMode, Mode: n.Config.LogSocketMode, Connections: 16, Timeout: 2 * time.Second,
		UnauthorizedPeer: n.metrics.LogConnectionRefused, Log: n.Log,
	})
	if err != nil {
		return err
	}
	n.relay = server
	relay := logserver.Handler(logserver.Options{Records: n.Log.Handler(), Level: n.relayLevel, Log: n.Log, Metrics: n.metrics})
	n.work.Go(func() { server.Serve(n.background, relay) })
	return nil
}

// guardSockets restores the sockets, the lock and the verdict after their removal.
func (n *node) guardSockets() {
	sockets := map[string]interface{ Rebind(context.Context) error }{n.Config.LogSocket: n.relay}
	if n.lookups != nil {
		sockets[n.Config.podSocket()] = n.lookups
	}
	if n.ambient != nil {
		sockets[n.Config.eventSocket()], sockets[n.Config.Ambient.Socket] = n.ambient.events, n.ambient.ztunnels
	}
	paths := slices.AppendSeq([]string{n.Config.lockFile(), n.Config.verdictFile()}, maps.Keys(sockets))
	n.onChange(paths, func() {
		if again, err := n.held.Reacquire(n.Config.lockFile()); again || err != nil {
			n.Log.Warn("the lock was removed, and is taken again", slog.Any("error", err))
		}
		n.record(n.background)
		for path, server := range sockets {
			if err := server.Rebind(n.background); err != nil {
				n.Log.Warn("a socket cannot be made again", slog.String("path", path), slog.String("error", err.Error()))
			}
		}
	})
}

// onChange calls do after each change of files outside the installation, for as long as the agent runs. The installation's own
// watch logs a missing kernel watch.
func (n *node) onChange(files []string, do func()) {
	log := n.Log
	if n.Config.Install {
		log = slog.New(slog.DiscardHandler)
	}
	watch := hostfs.NewWatch(log)
	defer watch.Close()
	var paths []hostfs.Path
	for _, file := range files {
		paths = append(paths, hostfs.Path{Name: file})
	}
	watch.Set(paths...) // logged, and polled
	for {
		select {
		case <-n.background.Done():
			return
		case <-watch.Changed():
			do()
		}
	}
}

// openLookups starts the watch of the node's pods and the server for plugins. Without the server, plugins query the API server.
func (n *node) openLookups(ctx context.Context) {
	if n.api == nil || n.Config.NodeName == "" {
		n.Log.InfoContext(ctx, "plugins query the API server themselves: the agent does not know the API server or its node's name")
		return
	}
	n.pods = podcache.NewStore(podcache.Options{
		API: n.api, Node: n.Config.NodeName, Log: n.Log, Count: n.metrics.PodSeen, Keep: n.Config.Repair.Keeps(), KeepMessage: n.Config.Repair.Predicate.Message,
		Ambient: n.selectors,
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
	if n.Config.Observe { // another plugin's decisions are unknown
		return
	}
	n.work.Go(func() {
		n.decisions.RecordOutside(n.background, n.pods.Follow, func() (sidecar.Policy, error) {
			conf, err := n.plugin()
			return conf.Policy(), err
		})
	})
}

// bundle serves the parts of a bug report that only the agent has, without credentials of known forms and without the token of the
// agent's own account, which the plugin has as well.
func (n *node) bundle() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		since, err := time.Time{}, error(nil)
		if text := r.URL.Query().Get(agentapi.SinceParam); text != "" {
			since, err = time.Parse(time.RFC3339, text)
		}
		if err != nil {
			http.Error(w, agentapi.SinceParam+": not a time", http.StatusBadRequest)
			return
		}
		const maxToken = 1 << 20
		token, _, _ := hostfs.ReadFile(n.Config.Token, maxToken) // without the file there is no secret
		clean, kind := redact.New(string(token)), "text/plain; charset=utf-8"
		text, value, err := n.part(agentapi.BundlePart(r.PathValue("part")), since, clean)
		switch {
		case err == nil && value != nil:
			kind = "application/json"
			if text, err = json.Marshal(value); err == nil {
				text, err = clean.JSON(text)
			}
		case text != nil:
			text = clean.Text(text)
		}
		switch {
		case err != nil:
			http.Error(w, err.Error(), http.StatusInternalServerError)
		case text == nil:
			http.Error(w, "there is no such part", http.StatusNotFound)
		default:
			w.Header().Set("Content-Type", kind)
			_, _ = w.Write(printable.Lines(text)) //nolint:gosec // not HTML; the client can have closed the connection
		}
	})
}

// part returns a part as text or as a value for JSON. For an unknown part it returns neither.
func (n *node) part(part agentapi.BundlePart, since time.Time, clean *redact.Redactor) (text []byte, value any, err error) {
	switch part {
	case agentapi.BundleMetrics:
		text = n.metrics.Text()
	case agentapi.BundleLog:
		text = n.Recent.Since(since)
	case agentapi.BundleReadiness:
		value = n.health.Snapshot()
	case agentapi.BundleAgent:
		value, err = n.info(clean)
	}
	return text, value, err
}

// info describes the agent. It redacts unknown keys of the plugin's configuration because a template can have any key.
func (n *node) info(clean *redact.Redactor) (agentapi.AgentInfo, error) {
	c := n.Config
	stanza, err := clean.Foreign(n.stanza.Load().written.Element())
	return agentapi.AgentInfo{
		Version: n.Version, Node: c.NodeName, Namespace: c.Namespace, Pod: c.PodName, Settings: c.Lines, Plugin: json.RawMessage(stanza),
	}, err
}
