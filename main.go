// Command istio-cni is the network software of a node of an Istio sidecar mesh: CNI plugin, node agent, iptables redirector and
// taint controller. The role is its name in os.Args[0], else its first argument.
package main

import (
	"context"
	"os"
	"runtime"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/command"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/early"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/role/bundle"
	"github.com/meshcni/istio-cni/internal/role/decisions"
	"github.com/meshcni/istio-cni/internal/role/doctor"
	"github.com/meshcni/istio-cni/internal/role/installer"
	"github.com/meshcni/istio-cni/internal/role/plugin"
	"github.com/meshcni/istio-cni/internal/role/pods"
	"github.com/meshcni/istio-cni/internal/role/redirector"
	"github.com/meshcni/istio-cni/internal/role/repairer"
	"github.com/meshcni/istio-cni/internal/role/selftester"
	"github.com/meshcni/istio-cni/internal/role/tainter"
	"github.com/meshcni/istio-cni/internal/role/trace"
	"github.com/meshcni/istio-cni/internal/role/why"
)

func main() {
	runtime.MemProfileRate = 0 // serve.Introspection sets it again where profiles are read
	os.Exit(program().Run(os.Args[0], applet.Process()))
}

func program() applet.Program {
	return applet.Program{
		Name:    cniconf.PluginType,
		About:   "istio-cni redirects the traffic of Istio sidecar pods on a Kubernetes node.",
		Version: version,
		Roles: []applet.Role{
			{
				Name: "plugin", Variable: early.Variable, Protocol: true,
				Summary: "CNI plugin: redirects a pod when the runtime creates it", Run: func(c applet.Call) int { return early.Run(c, lookup) },
			},
			{
				Name: "iptables", Alias: "istio-iptables",
				Summary: "programs, verifies, explains or removes the rules of a network namespace", Rows: redirector.Rows, Run: redirector.Run,
			},
			{Name: "install", Alias: "install-cni", Summary: "node agent: installs the plugin and keeps it installed", Rows: installer.Rows, Run: installer.Run},
			{Name: "taint", Alias: "istio-cni-taint", Summary: "controller: taints nodes whose plugin is not ready", Rows: tainter.Rows, Run: tainter.Run},
			{
				Name: "repair", Alias: "istio-cni-repair",
				Summary: "repairs pods that started before the plugin was there", Rows: repairer.Rows, Run: repairer.Run,
			},
			{Name: "selftest", Summary: "finds out which way of redirecting pods works on this node", Rows: selftester.Rows, Run: selftester.Run},
			{Name: "why", Summary: "explains why a pod is redirected or not, and where a packet goes", Rows: new(command.Why).Rows, Run: why.Run},
			{Name: "trace", Summary: "shows the packets of a pod with the rules that they meet", Rows: new(command.Trace).Rows, Run: trace.Run},
			{Name: "pods", Summary: "lists the pods of this node and whether they are redirected", Rows: new(command.Pods).Rows, Run: pods.Run},
			{Name: "doctor", Summary: "checks what redirection on this node depends on, with a remedy for each fault", Rows: new(command.Doctor).Rows, Run: doctor.Run},
			{Name: "decisions", Summary: "shows the last decisions of the plugin on this node, with their reasons", Rows: new(command.Decisions).Rows, Run: decisions.Run},
			{Name: "bundle", Summary: "collects what a bug report needs", Rows: new(command.Bundle).Rows, Run: bundle.Run, Protocol: true},
			{Name: "version", Summary: "prints the version", Rows: output.VersionRows, Run: output.PrintVersion},
		},
	}
}

// lookup is the plugin's look-up. The plugin does not import client-go, see package early.
func lookup(ctx context.Context, conf *cniconf.NetConf, pod agentapi.Key, budget time.Duration) (sidecar.Facts, int, error) {
	var selects func(pod, namespace map[string]string) bool
	if conf.AmbientEnabled {
		selectors, err := selector.ParseAmbient(conf.EnablementSelectors)
		if err != nil {
			return sidecar.Facts{}, 0, err
		}
		selects = selectors.Select
	}
	client, err := kube.NewClient(kube.Config{Kubeconfig: conf.Kubeconfig, Once: true})
	if kube.ClassOf(err) == kube.InvalidConfig {
		err = plugin.KubeconfigError{Err: err}
	}
	if err != nil {
		return sidecar.Facts{}, 0, err
	}
	facts, err := client.Lookup(ctx, kube.PodRef{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}, selects, budget)
	return facts, client.Requests(), err
}

// version is called only for output: a start of the plugin does not need the build information.
func version() string {
	return applet.Build() + "\nCNI versions: " + strings.Join(cniconf.Versions(), " ")
}
