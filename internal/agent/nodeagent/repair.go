package nodeagent

import (
	"context"
	"log/slog"
	"net/http"

	"github.com/meshcni/istio-cni/internal/agent/racerepair"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
)

// startRepair runs race repair and the audit for as long as the agent runs, as one controller where both are about the same pods.
// No step of the installation waits for them.
func (n *node) startRepair() {
	c := n.Config
	repairs, audits := c.RepairEnabled && c.Repair.Node != "", c.Audit.Interval > 0 && n.pods != nil
	own := c.Repair.Node == c.NodeName && c.Repair.LabelSelectors+c.Repair.FieldSelectors == ""
	if repairs {
		n.Log.Info("race repair", slog.Any("modes", c.Repair.Switches.Modes()))
	}
	if audits {
		auditor := racerepair.New(n.repairOptions(true, !repairs || !own))
		n.audit.Store(auditor)
		n.metrics.ReadAudit(auditor.Pods, clock)
		n.work.Go(func() { auditor.Run(n.background) })
	}
	if repairs && !(audits && own) {
		n.work.Go(func() { racerepair.Run(n.background, n.repairOptions(false, false)) })
	}
}

// audited returns a handler of the audit, which may be switched off or not have begun.
func (n *node) audited(handler func(*racerepair.Controller) http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		auditor := n.audit.Load()
		if auditor == nil {
			http.Error(w, "the audit is switched off, or has not begun", http.StatusNotFound)
			return
		}
		handler(auditor).ServeHTTP(w, r)
	})
}

// repairOptions are the options of a controller with or without the audit.
func (n *node) repairOptions(audits, auditOnly bool) racerepair.Options {
	c := n.Config
	o := racerepair.Options{
		API: n.api, Events: n.events, Log: n.Log, Metrics: n.metrics.Repair, Settings: c.Repair, Plugin: n.plugin,
		Find: c.Places.Find, ToolPath: n.ToolPath, Host: c.NodeName, AuditOnly: auditOnly,
	}
	if audits {
		o.Audit, o.Processes, o.Settings.Node = c.Audit, n.podProcesses, c.NodeName
	}
	switch {
	case c.NodeName != "" && o.Settings.Node != c.NodeName:
		n.Log.Warn("race repair is for another node than this one: no pod can be redirected in place",
			slog.String("node", o.Settings.Node), slog.String("this", c.NodeName))
		o.Find = nil
	case !c.Places.Reachable():
		o.Find = nil
		n.Log.Warn("the processes of the node are not seen: no pod can be inspected or redirected in place (mount the node's /proc at /host/proc)")
	}
	var scoped bool
	if !audits {
		scoped = c.Repair.Node != c.NodeName || c.Repair.LabelSelectors+c.Repair.FieldSelectors != ""
	}
	if n.pods != nil && !scoped {
		o.Follow = n.pods.Follow // one watch serves lookups, repair and audit
	}
	return o
}

// podProcesses lists the processes of the pods of this node by pod UID.
func (n *node) podProcesses(ctx context.Context) (map[string][]audit.Process, error) {
	all := map[string][]audit.Process{}
	err := n.Config.Places.Processes(ctx, func(p sandbox.Process) {
		all[p.Pod] = append(all[p.Pod], audit.Process{PID: p.PID, Container: p.Container, UID: p.UID, GID: p.GID})
	})
	return all, err
}

// plugin returns the plugin's current configuration.
func (n *node) plugin() (cniconf.NetConf, error) {
	return n.stanza.Load().NetConf()
}
