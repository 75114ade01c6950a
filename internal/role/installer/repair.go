package installer

import (
	"context"
	"log/slog"

	"github.com/meshcni/istio-cni/internal/agent/podrepair"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/podns"
)

// repair looks after pods that run without redirection, for as long as the agent runs. Nothing of the installation waits for it.
func (n *node) repair() {
	n.log.Info("race repair", slog.Any("settings", n.cfg.Repair))
	path, _ := n.in.getenv("PATH")
	places := podns.Places{Cache: n.cfg.Conf.CacheDir, Proc: n.cfg.HostProc, Netns: n.cfg.NetnsDirs, Roots: n.cfg.HostRoots}
	find := places.Find
	switch {
	case n.cfg.NodeName != "" && n.cfg.Repair.Node != n.cfg.NodeName:
		n.log.Warn("race repair is for another node than this one: no pod can be redirected in place",
			slog.String("node", n.cfg.Repair.Node), slog.String("this", n.cfg.NodeName))
		find = nil
	case !places.Reachable():
		find = nil
		n.log.Warn("the processes of the node are not seen: no pod can be redirected in place (mount the node's /proc at /host/proc)")
	}
	var follow func(context.Context, kube.Listener[kube.Pod])
	if n.pods != nil && n.cfg.Repair.Node == n.cfg.NodeName && n.cfg.Repair.LabelSelectors+n.cfg.Repair.FieldSelectors == "" {
		follow = n.pods.Follow // one watch serves both
	}
	podrepair.Run(n.background, podrepair.Options{
		Follow: follow,
		API:    n.api, Events: n.events, Log: n.log, Metrics: n.metrics.Repair, Settings: n.cfg.Repair,
		Plugin: n.plugin,
		Find:   find, ToolPath: path, Host: n.cfg.Repair.Node,
	})
}

// plugin is what the plugin of this node is told now.
func (n *node) plugin() (cniconf.NetConf, error) {
	return n.stanza.Load().NetConf()
}
