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
	n.Log.Info("race repair", slog.Any("modes", n.Config.Repair.Switches.Modes()))
	find := n.Config.Places.Find
	switch {
	case n.Config.NodeName != "" && n.Config.Repair.Node != n.Config.NodeName:
		n.Log.Warn("race repair is for another node than this one: no pod can be redirected in place",
			slog.String("node", n.Config.Repair.Node), slog.String("this", n.Config.NodeName))
		find = nil
	case !n.Config.Places.Reachable():
		find = nil
		n.Log.Warn("the processes of the node are not seen: no pod can be redirected in place (mount the node's /proc at /host/proc)")
	}
	var follow func(context.Context, kube.Listener[kube.Pod])
	if n.pods != nil && n.Config.Repair.Node == n.Config.NodeName && n.Config.Repair.LabelSelectors+n.Config.Repair.FieldSelectors == "" {
		follow = n.pods.Follow // one watch serves lookups and repair
	}
	racerepair.Run(n.background, racerepair.Options{
		Follow: follow,
		API:    n.api, Events: n.events, Log: n.Log, Metrics: n.metrics.Repair, Settings: n.Config.Repair,
		Plugin: n.plugin,
		Find:   find, ToolPath: n.ToolPath, Host: n.Config.Repair.Node,
	})
}

// plugin returns the plugin's current configuration.
func (n *node) plugin() (cniconf.NetConf, error) {
	return n.stanza.Load().NetConf()
}
