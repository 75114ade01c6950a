package installer

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	"github.com/meshcni/istio-cni/internal/agent/nodeagent"
	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/agent/teardown"
	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/settings"
)

// What the agent does about pods of ambient mode if that is enabled.
const (
	ambientServe  = "serve"
	ambientIgnore = "ignore"
)

// cleanUp is a variable without a flag that decides about another setting.
const cleanUp = "AMBIENT_DISABLE_SAFE_UPGRADE"

func (d *draft) ambientSettings() []settings.Setting {
	stanza := &d.Want.Stanza
	return []settings.Setting{
		{
			Name: "ambient-enabled", Default: "false",
			Use: "put pods of ambient mode into the mesh, with the ztunnel of this node", Value: settings.Bool(&d.ambientEnabled),
		},
		{
			Name: "ambient-pods", Arg: "WHAT", Default: ambientServe,
			Use:   "with ambient mode enabled: serve its pods, or ignore them, which are outside of the mesh then",
			Value: settings.Choice(&d.ambientPods, ambientServe, ambientIgnore),
		},
		{
			Name: "ambient-enablement-selector", Arg: "YAML", Live: true,
			Use:   "list of {podSelector, namespaceSelector}: pods that one of them selects are in ambient mode",
			Value: settings.Of(&stanza.EnablementSelectors, selector.Enablement, func(j json.RawMessage) string { return string(j) }),
		},
		{
			Name: "enable-ambient-detection-retry", Default: "false", Live: true,
			Use:   "written into the plugin's configuration; a pod whose mode is unknown does not start either way",
			Value: settings.Bool(&stanza.AmbientDetectionRetry),
		},
		{
			Name: "ztunnel-uds-address", Arg: "SOCKET", Default: "/var/run/ztunnel/ztunnel.sock",
			Use: "socket to which ztunnel connects", Value: settings.Text(&d.Ambient.Socket, socket),
		},
	}
}

// ambientVariables are those settings of ambient mode that have no flag. ALLOW_SWITCH_TO_HOST_NS defaults to false as in the
// reference, whose chart sets it unless the agent has hostNetwork.
func (d *draft) ambientVariables() []settings.Setting {
	a, defaults := &d.Ambient, ambient.DefaultConfig()
	return []settings.Setting{
		{
			Env: names("AMBIENT_DNS_CAPTURE"), Default: "false", Live: true,
			Use: "redirect DNS of pods to ztunnel", Value: settings.Bool(&a.DNSCapture),
		},
		{Env: names("AMBIENT_IPV6"), Default: "false", Use: "false: IPv6 of pods is not redirected", Value: settings.Bool(&a.IPv6)},
		{
			Env: names("AMBIENT_RECONCILE_POD_RULES_ON_STARTUP"), Default: "false",
			Use: "renew differing rules of pods that an earlier agent enrolled", Value: settings.Bool(&a.ReconcileOnStart),
		},
		{
			Env: names(cleanUp), Default: "false",
			Use: "with ambient mode: --uninstall-on-exit=always, unless that is set", Value: settings.Bool(&d.unsafeUpgrade),
		},
		{
			Env: names("HOST_PROBE_SNAT_IP"), Arg: "ADDRESS", Default: defaults.ProbeV4.String(),
			Use: "source of the node's own connections to pods, as kubelet's probes: pods accept it past ztunnel", Value: probe(&a.ProbeV4, netip.Addr.Is4),
		},
		{
			Env: names("HOST_PROBE_SNAT_IPV6"), Arg: "ADDRESS", Default: defaults.ProbeV6.String(),
			Use: "the same for IPv6", Value: probe(&a.ProbeV6, netip.Addr.Is6),
		},
		{
			Env: names("SYSTEM_NAMESPACE"), Arg: "NAME", Default: "istio-system",
			Use:   "namespace whose pods with label app=ztunnel are ztunnel's",
			Value: settings.Checked(&a.SystemNamespace, selector.CheckNamespace),
		},
		{
			Env: names("ALLOW_SWITCH_TO_HOST_NS"), Default: "false",
			Use: "true: the node's network namespace is that of its process 1; false: the agent's own", Value: settings.Bool(&a.SwitchNamespace),
		},
	}
}

// probe returns an address of one family.
func probe(into *netip.Addr, is func(netip.Addr) bool) settings.Value {
	return settings.Of(into, func(s string) (netip.Addr, error) {
		addr, err := netip.ParseAddr(s)
		if err != nil || !is(addr) || addr.Is4In6() || addr.Zone() != "" || !addr.IsGlobalUnicast() && !addr.IsLinkLocalUnicast() {
			return netip.Addr{}, errors.New("want a unicast address of this family")
		}
		return addr, nil
	}, netip.Addr.String)
}

// ambient decides about ambient mode. An agent that uninstalls does not ask.
func (d *draft) ambient() error {
	if !d.ambientEnabled || d.Action == nodeagent.Uninstall {
		return nil
	}
	at := d.at("ambient-enabled")
	if d.ambientPods == ambientIgnore {
		d.warn(at.String() + ": pods of ambient mode are ignored, and start outside of the mesh")
		return nil
	}
	if d.NodeName == "" && d.Action == nodeagent.Stay {
		return fmt.Errorf("%s: ambient mode needs the name of this node: NODE_NAME is not set", at)
	}
	d.Ambient.Enabled, d.Want.Stanza.AmbientEnabled = true, true
	if d.unsafeUpgrade && !d.at("uninstall-on-exit").Given() {
		d.UninstallOnExit = teardown.Always
		d.derive("uninstall-on-exit", cleanUp)
	}
	return nil
}
