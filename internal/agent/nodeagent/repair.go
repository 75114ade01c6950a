package nodeagent

import (
	"context"
	"log/slog"

	"github.com/meshcni/istio-cni/internal/agent/racerepair"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/kube"
)

// repair runs race repair for as long as the agent runs. No step of the installation waits for it.
func (n *node) repair() {
	n.log.Info("race repair", slog.Any("modes", n.cfg.Repair.Switches.Modes()))
	find := n.cfg.Places.Find
	switch {
	case n.cfg.NodeName != "" && n.cfg.Repair.Node != n.cfg.NodeName:
		n.log.Warn("race repair is for another node than this one: no pod can be redirected in place",
			slog.String("node", n.cfg.Repair.Node), slog.String("this", n.cfg.NodeName))
		find = nil
	case !n.cfg.Places.Reachable():
		find = nil
		n.log.Warn("the processes of the node are not seen: no pod can be redirected in place (mount the node's /proc at /host/proc)")
	}
	var follow func(context.Context, kube.Listener[kube.Pod])
	if n.pods != nil && n.cfg.Repair.Node == n.cfg.NodeName && n.cfg.Repair.LabelSelectors+n.cfg.Repair.FieldSelectors == "" {
		follow = n.pods.Follow // one watch serves lookups and repair
	}
	racerepair.Run(n.background, racerepair.Options{
		Follow: follow,
		API:    n.api, Events: n.events, Log: n.log, Metrics: n.metrics.Repair, Settings: n.cfg.Repair,
		Plugin: n.plugin,
		Find:   find, ToolPath: n.ToolPath, Host: n.cfg.Repair.Node,
	})
}

// plugin returns the plugin's current configuration.
func (n *node) plugin() (cniconf.NetConf, error) {
	return n.stanza.Load().NetConf()
}
