package nodeagent

import (
	"context"
	"log/slog"
	"net/http"
	"strings"

	"k8s.io/utils/clock"

	"github.com/meshcni/istio-cni/internal/agent/racerepair"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
)

// startRepair runs race repair and the audit while the agent runs, in one controller if both are about the same pods.
// No step of the installation waits for them.
func (n *node) startRepair() {
	c := n.Config
	repairs, audits := c.RepairEnabled && c.Repair.Node != "", n.canAudit()
	selects := c.Repair.LabelSelectors+c.Repair.FieldSelectors != ""
	own := c.Repair.Node == c.NodeName && !selects
	if repairs {
		n.Log.Info("race repair", slog.Any("modes", c.Repair.Switches.Modes()))
	}
	var reports func(kube.Pod) bool
	if repairs && (!audits || !own) {
		o := n.repairOptions(false, false)
		if audits {
			o.AuditedNode = c.NodeName
		}
		other := racerepair.New(o)
		reports = other.Reports
		n.work.Go(func() { other.Run(n.background) })
	}
	if !audits {
		return
	}
	o := n.repairOptions(true, !repairs || !own)
	if o.Reports = reports; selects && o.Audit.Repair {
		o.Audit.Repair, o.Audit.Restricted = false, true
		n.Log.Warn("repair uses label or field selectors: the audit reports, and restores no rules")
	}
	auditor := racerepair.New(o)
	n.audit.Store(auditor)
	n.metrics.ReadAudit(auditor.Pods, clock.RealClock{}.Now)
	n.work.Go(func() { auditor.Run(n.background) })
}

// canAudit reports whether the pods of the node can be audited. If not, commands show the reason, and the log has it unless the
// user switched the audit off.
func (n *node) canAudit() bool {
	if n.Config.Audit.Interval == 0 {
		n.noAudit.Store(new("it is switched off (--audit-interval=0)"))
		return false
	}
	capabilities, err := netns.Lacking()
	if err != nil {
		n.Log.Warn("the capabilities of the agent are not known", slog.String("error", err.Error()))
	}
	var missing []string
	if n.pods == nil {
		missing = append(missing, "the address of the API server or the name of the node")
	}
	if !n.Config.Places.Reachable() {
		missing = append(missing, "/proc of the node, at /host/proc")
	}
	if missing = append(missing, capabilities...); len(missing) == 0 {
		return true
	}
	reason := "the node agent lacks " + strings.Join(missing, ", ")
	n.noAudit.Store(&reason)
	n.Log.Log(n.background, n.missingRightsLevel(), "the audit is off: no pod of this node is verified while it runs",
		slog.String("reason", reason))
	return false
}

// missingRightsLevel is the log level for missing capabilities: charts give them for the repair in place only.
func (n *node) missingRightsLevel() slog.Level {
	if n.Config.RepairEnabled && n.Config.Repair.Switches.InPlace {
		return slog.LevelWarn
	}
	return slog.LevelInfo
}

// audited returns a handler of the audit, which can be off or not have begun.
func (n *node) audited(handler func(*racerepair.Controller) http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		auditor, reason := n.audit.Load(), n.noAudit.Load()
		switch {
		case auditor != nil && auditor.Synced():
			handler(auditor).ServeHTTP(w, r)
		case reason != nil:
			http.Error(w, "the audit is off: "+*reason, http.StatusServiceUnavailable)
		default:
			http.Error(w, "the audit has not begun: the node's pods are not known yet (is the API server within reach?)", http.StatusServiceUnavailable)
		}
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
		o.Audit, o.Processes, o.Settings.Node, o.Reported = c.Audit, n.podProcesses, c.NodeName, n.decisions.Of
	}
	switch {
	case c.NodeName != "" && o.Settings.Node != c.NodeName:
		n.Log.Warn("race repair is for another node than this one: no pod can be redirected in place",
			slog.String("node", o.Settings.Node), slog.String("this", c.NodeName))
		o.Find = nil
	case !c.Places.Reachable():
		o.Find = nil
		n.Log.Log(n.background, n.missingRightsLevel(), "the processes of the node are not seen: no pod can be inspected or redirected in place "+
			"(mount the node's /proc at /host/proc)")
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
func (n *node) podProcesses(ctx context.Context) (map[string][]sandbox.Process, error) {
	all := map[string][]sandbox.Process{}
	err := n.Config.Places.Processes(ctx, func(p sandbox.Process) { all[p.Pod] = append(all[p.Pod], p) })
	return all, err
}

// plugin returns the plugin's current configuration.
func (n *node) plugin() (cniconf.NetConf, error) {
	return n.stanza.Load().NetConf()
}
