package racerepair

import (
	"fmt"
	"strconv"

	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
)

// Settings are the user's settings of race repair.
type Settings struct {
	Switches repair.Switches
	// Evict deletes by eviction, which respects a PodDisruptionBudget.
	Evict     bool
	Predicate repair.Predicate
	// LabelKey and LabelValue are the label of mode label.
	LabelKey, LabelValue string
	// Node is the node whose pods are repaired; "" is every node.
	Node string
	// LabelSelectors and FieldSelectors select pods in the API server.
	LabelSelectors, FieldSelectors string
}

// Rows returns the settings, without variables, that the agent and the command "repair" have in common. Names and defaults are
// the reference's; evict is this program's.
func Rows(s *Settings) []settings.Setting {
	labelKey := func(text string) error { return selector.CheckLabel(text, "") }
	labelValue := func(text string) error { return selector.CheckLabel("key", text) }
	optional := func(into *string, check func(string) error) settings.Value {
		return settings.Text(into, settings.Optional(settings.Check(check)))
	}
	const maxExitCode = 255
	return []settings.Setting{
		{
			Name: "repair-pods", Default: "false", Use: "redirect them in place, which works on the pod's own node",
			Value: settings.Bool(&s.Switches.InPlace),
		},
		{
			Name: "delete-pods", Default: "false", Use: "delete them, unless redirecting in place is switched on and can help",
			Value: settings.Bool(&s.Switches.Delete),
		},
		{
			Name: "label-pods", Default: "false", Use: "label them, unless one of the others is switched on and can help",
			Value: settings.Bool(&s.Switches.Label),
		},
		{Name: "evict", Default: "false", Use: "delete by eviction, which respects a PodDisruptionBudget", Value: settings.Bool(&s.Evict)},
		{
			Name: "broken-pod-label-key", Arg: "KEY", Default: repair.BrokenLabel, Use: "key of that label",
			Value: settings.Checked(&s.LabelKey, labelKey),
		},
		{
			Name: "broken-pod-label-value", Arg: "VALUE", Default: repair.BrokenLabelValue, Use: "value of that label",
			Value: settings.Checked(&s.LabelValue, labelValue),
		},
		{Name: "node-name", Arg: "NAME", Use: "only pods of this node", Value: optional(&s.Node, selector.CheckName)},
		{
			Name: "sidecar-annotation", Arg: "KEY", Chart: true, Default: sidecar.StatusKey, Use: "only pods with this annotation; an empty flag: all",
			Value: optional(&s.Predicate.Annotation, labelKey),
		},
		{
			Name: "init-container-name", Arg: "NAME", Default: sidecar.ValidationContainer, Use: "only this init container; an empty flag: all",
			Value: optional(&s.Predicate.Container, selector.CheckName),
		},
		{
			Name: "init-container-termination-message", Arg: "TEXT", Chart: true, Use: "only with this termination message",
			Value: settings.Text(&s.Predicate.Message, nil),
		},
		{
			Name: "init-container-exit-code", Arg: "CODE", Chart: true, Default: strconv.Itoa(repair.NotRedirectedCode), Use: "only with this exit code; 0: any",
			Value: settings.Number(&s.Predicate.ExitCode, maxExitCode),
		},
		{Name: "label-selectors", Arg: "SELECTOR", Chart: true, Use: "only pods with these labels", Value: optional(&s.LabelSelectors, selector.Check)},
		{
			Name: "field-selectors", Arg: "SELECTOR", Chart: true, Use: "only pods with these fields",
			Value: settings.Checked(&s.FieldSelectors, selector.CheckFields),
		},
	}
}

// AuditRows returns the settings of the audit.
func AuditRows(a *AuditSettings) []settings.Setting {
	const report, repaired = "report", "repair"
	return []settings.Setting{
		{
			Name: "audit-interval", Arg: "DURATION", Default: "5m", Use: "time between two inspections of a pod that does not change; 0: no audit",
			Value: settings.Duration(&a.Interval, 0, 0),
		},
		{
			Name: "audit-mode", Arg: "WHAT", Default: report, Use: "report lost and changed rules, or repair them: report or repair",
			Value: settings.Of(&a.Repair, func(text string) (bool, error) {
				if text != report && text != repaired {
					return false, fmt.Errorf("want %s or %s", report, repaired)
				}
				return text == repaired, nil
			}, func(on bool) string { return map[bool]string{false: report, true: repaired}[on] }),
		},
		{
			Name: "audit-pod-condition", Default: "false", Use: "publish the pod condition " + kube.RedirectionVerified, Value: settings.Bool(&a.PodCondition),
		},
	}
}

// PathRows returns the settings of the directories with pods' namespaces; the variables are spelled like the flags.
func PathRows(p *sandbox.Places) []settings.Setting {
	return settings.Named("", []settings.Setting{
		{
			Name: "cni-cache-dir", Arg: "DIR", Default: "/var/lib/cni/results",
			Use: "libcni's cache of sandboxes, a path of the host", Value: settings.Text(&p.Cache, settings.AbsolutePath),
		},
		{
			Name: "netns-dirs", Arg: "DIRS", Default: "/var/run/netns,/var/run/docker/netns",
			Use:   "comma list of directories of the host where container runtimes mount network namespaces",
			Value: settings.List(&p.Netns, ",", 0, settings.AbsolutePath),
		},
		{
			Name: "host-proc", Arg: "DIR", Default: "/proc",
			Use: "procfs of the host, a path of the host", Value: settings.Text(&p.Proc, settings.AbsolutePath),
		},
		{
			Name: "host-roots", Arg: "DIRS", Default: "/host,/host/proc/1/root",
			Use:   "comma list of prefixes under which paths of the host may be seen",
			Value: settings.List(&p.Roots, ",", 1, settings.AbsolutePath),
		},
	}...)
}

// PluginRows returns the plugin's settings that select pods and the backend of their rules. The agent passes them to the
// plugin, and may change them while it runs.
func PluginRows(stanza *cniconf.Stanza) []settings.Setting {
	rows := settings.Named("", []settings.Setting{
		{
			Name: "exclude-namespaces", Arg: "NAMES", Env: []string{"EXCLUDE_NAMESPACES", "EXCLUDED_NAMESPACES"},
			Use:   "comma list of namespaces whose pods are left alone",
			Value: settings.List(&stanza.ExcludeNamespaces, ",", 0, settings.Check(selector.CheckNamespace)),
		},
		{
			Name: "second-ip-family", Arg: "WHAT", Default: redirect.Bypass.String(),
			Use:   "IPv6 of a pod whose first address is IPv4: bypass, capture or reject",
			Value: settings.Of(&stanza.SecondFamily, redirect.ParseSecondFamily, redirect.SecondFamily.String),
		},
		{Name: "native-nftables", Default: "false", Use: "the same as --backend=native", Value: settings.Bool(&stanza.NativeNFTables)},
		{
			Name: "backend", Arg: "WAY", Env: []string{"CNI_BACKEND"}, Default: string(redirect.Auto),
			Use: "how rules get into a pod: auto, netlink (those of iptables-nft, without a process), native (tables of nftables' own) " +
				"or iptables (the programs of the host)",
			Value: settings.Of(&stanza.Backend, redirect.ParseBackend, func(b redirect.Backend) string { return string(b) }),
		},
		{
			Name: "force-iptables-binary", Arg: "VARIANT", Use: "legacy or nft, instead of choosing",
			Value: settings.Checked(&stanza.ForceIptables, func(s string) error {
				_, err := iptables.ParseVariant(s)
				return err
			}),
		},
	}...)
	for i := range rows {
		rows[i].Live = true
	}
	return rows
}
