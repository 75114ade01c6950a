package nodeagent

import (
	"log/slog"
	"net/http"
	"strings"

	"k8s.io/utils/clock"

	"github.com/meshcni/istio-cni/internal/agent/nodepods"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/node/netns"
)

// startRepair runs race repair and the audit for as long as the agent runs. Race repair of another node's pods has its own controller.
// No step of the installation waits for them.
func (n *node) startRepair() {
	c := n.Config
	repairs, audits := c.RepairEnabled && c.Repair.Node != "", n.canAudit()
	if repairs {
		n.Log.Info("race repair", slog.Any("modes", c.Repair.Switches.Modes()))
	}
	if repairs && c.Repair.Node != c.NodeName {
		if c.NodeName != "" {
			n.Log.Warn("race repair is for another node than this one: no pod can be redirected in place",
				slog.String("node", c.Repair.Node), slog.String("this", c.NodeName))
		}
		o := n.podOptions(c.Repair.Node)
		o.Repair, o.Follow = &c.Repair, nil
		n.runPods(o)
		repairs = false
	}
	if !repairs && !audits {
		return
	}
	o := n.podOptions(c.NodeName)
	if repairs {
		o.Repair = &c.Repair
	}
	if audits {
		o.Audit, o.Processes = c.Audit, c.Places.Processes
		switch {
		case n.ambient != nil:
			o.Enrolment = n.ambient.missing
		case c.Ambient.Enabled:
			o.ProbeSet = n.probeSet
		}
	}
	if pods := n.runPods(o); pods != nil && audits {
		n.audit.Store(pods)
		n.metrics.ReadAudit(pods.Pods, clock.RealClock{}.Now)
	}
}

// runPods runs a controller for as long as the agent runs, and returns nil if its settings are invalid.
func (n *node) runPods(o nodepods.Options) *nodepods.Controller {
	pods, err := nodepods.New(o)
	if err != nil {
		n.Log.Error("race repair and the audit are off", slog.String("error", err.Error()))
		return nil
	}
	n.work.Go(func() { pods.Run(n.background) })
	return pods
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
	n.Log.Log(n.background, n.missingRightsLevel(), "the audit is off: no pod of this node is verified while it runs", slog.String("reason", reason))
	return false
}

// missingRightsLevel is the log level for missing capabilities. Charts grant the right to enter namespaces for repairs in place:
// without such repairs, the operator may leave it out.
func (n *node) missingRightsLevel() slog.Level {
	if n.Config.RepairEnabled && n.Config.Repair.Switches.InPlace {
		return slog.LevelWarn
	}
	return slog.LevelInfo
}

// audited returns a handler of the audit, which may be off or not have begun.
func (n *node) audited(handler func(*nodepods.Controller) http.Handler) http.Handler {
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

// auditMode is off, report or repair.
func (n *node) auditMode() string {
	switch {
	case n.noAudit.Load() != nil:
		return "off"
	case n.Config.Audit.Repair:
		return "repair"
	}
	return "report"
}

// podOptions are the options for the pods of a node, without race repair and audit.
func (n *node) podOptions(of string) nodepods.Options {
	c := n.Config
	o := nodepods.Options{
		Env: podwork.Env{Events: n.events, Log: n.Log, Plugin: n.plugin, ToolPath: n.ToolPath, Host: c.NodeName, Node: of},
		API: n.api, Metrics: n.metrics.Repair,
	}
	switch {
	case c.NodeName != "" && of != c.NodeName:
	case !c.Places.Reachable():
		n.Log.Log(n.background, n.missingRightsLevel(), "the processes of the node are not seen: no pod can be inspected or redirected in place (mount the node's /proc at /host/proc)")
	default:
		o.Find = c.Places.Find
	}
	if n.pods != nil {
		o.Follow, o.Reported = n.pods.Follow, n.decisions.Of // one watch serves lookups, repair and audit
	}
	return o
}

// stanza is a configuration of the plugin, both as text and parsed: each pod event needs the parsed form.
type stanza struct {
	written   cniconf.Stanza
	read      cniconf.NetConf
	selectors *selector.Ambient
	err       error
}

// plugin returns the plugin's current configuration, which the caller must not change.
func (n *node) plugin() (cniconf.NetConf, error) {
	current := n.stanza.Load()
	return current.read, current.err
}
