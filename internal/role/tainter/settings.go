package tainter

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/core/settings"
)

// perMode has the mode-specific parts of a setting: its defaults and the mode that the setting selects.
type perMode struct {
	legacy, untaint string
	// only is the setting's mode, "" for both modes.
	only Mode
	// ownNamespace makes pod-namespace the default in mode untaint.
	ownNamespace bool
}

// differences returns the differences between the modes, by the name of the setting.
func differences() map[string]perMode {
	return map[string]perMode{
		"configmap-namespace": {legacy: "kube-system", only: Legacy},
		"configmap-name":      {legacy: "single", only: Legacy},
		"namespace":           {untaint: "istio-system", only: Untaint, ownNamespace: true},
		"selector":            {untaint: readiness.AgentSelector, only: Untaint},
		"taint-name":          {legacy: readiness.LegacyKey, untaint: readiness.UntaintKey},
		"taint-value":         {untaint: readiness.UntaintValue},
		"add":                 {legacy: "true", untaint: "false"},
		"require-node-ready":  {legacy: "true", untaint: "false"},
		"lease-namespace":     {legacy: "kube-system", untaint: "istio-system", ownNamespace: true},
		"lease-name":          {legacy: "istio-taint-lock", untaint: "istio-node-untaint"},
		"lease-duration":      {legacy: "60s", untaint: "30s"},
		"renew-deadline":      {legacy: "15s", untaint: "15s"},
		"retry-period":        {legacy: "5s", untaint: "7.5s"},
	}
}

// Rows are the flags for the completion.
func Rows() []settings.Setting { return new(Config).rows() }

// rows returns all settings, with the defaults of the mode. A variable is spelled like its flag with the prefix TAINT_, unless the row
// has another variable.
func (c *Config) rows() []settings.Setting {
	rows := slices.Concat(c.modeRows(), c.taintRows(), c.policyRows(), c.leaseRows(), c.processRows())
	for i := range rows {
		if of, differs := differences()[rows[i].Name]; differs {
			of.apply(&rows[i], c)
		}
	}
	return settings.Named("TAINT_", rows...)
}

func (p perMode) apply(s *settings.Setting, c *Config) {
	s.Shown = p.legacy + p.untaint
	if p.legacy != "" && p.untaint != "" {
		s.Shown = fmt.Sprintf("%s in mode legacy, %s in mode untaint", p.legacy, p.untaint)
	}
	if p.only != "" {
		s.Use += fmt.Sprintf(" (mode %s)", p.only)
	}
	switch {
	case c.Mode == Legacy:
		s.Default = p.legacy
	case c.Mode == Untaint && p.ownNamespace && c.ownNamespace != "":
		s.Default = c.ownNamespace
	case c.Mode == Untaint:
		s.Default = p.untaint
	}
}

func names(of ...string) []string { return of }

func (c *Config) modeRows() []settings.Setting {
	return []settings.Setting{
		{
			Name: "mode", Arg: "MODE", Default: string(Auto), Use: "legacy, untaint, or auto: legacy if a setting of that mode is given, else untaint",
			Value: settings.Choice(new(Mode), Auto, Legacy, Untaint),
		},
		{
			Name: "dry-run", Default: "false", Use: "print the change of each node once, and change nothing",
			Value: settings.Bool(&c.DryRun),
		},
		{
			Name: "run-as-daemon", Env: settings.Dashed("TAINT_", "run-as-daemon"), Default: "true",
			Use: "false: check all nodes once and exit, without hysteresis", Value: settings.Bool(&c.Daemon),
		},
		{
			Name: "configmap-namespace", Arg: "NAMESPACE", Env: settings.Dashed("TAINT_", "configmap-namespace"),
			Use: "namespace of the ConfigMap with the requirements", Value: settings.Checked(&c.Taint.ConfigMap.Namespace, selector.CheckName),
		},
		{
			Name: "configmap-name", Arg: "NAME", Env: settings.Dashed("TAINT_", "configmap-name"),
			Use:   "the ConfigMap: each of its keys is a YAML list of {name, selector, namespace}",
			Value: settings.Checked(&c.Taint.ConfigMap.Name, selector.CheckName),
		},
		{
			Name: "namespace", Aliases: names("namespaces", "cniNamespace"), Arg: "NAMESPACE", Env: names("TAINT_NAMESPACE", "TAINT_NAMESPACES"),
			Repeated: true,
			Use: "namespaces of the agent's pods, between commas, * for all: a ready pod in one of them is enough; by default this pod's " +
				"namespace if it is known",
			Value: settings.Of(&c.namespaces, readNamespaces, func(all []string) string { return strings.Join(all, ",") }),
		},
		{
			Name: "selector", Arg: "SELECTOR", Use: "label selector of the agent's pods",
			Value: settings.Checked(&c.selector, selector.Check),
		},
	}
}

func (c *Config) taintRows() []settings.Setting {
	taint := &c.Taint.Policy.Taint
	return []settings.Setting{
		{
			Name: "taint-name", Aliases: names("taint-key"), Arg: "KEY", Env: names("TAINT_NAME", "PILOT_NODE_UNTAINT_CONTROLLERS_TAINT_NAME"),
			Use: "key of the taint", Value: settings.Checked(&taint.Key, checkKey),
		},
		{
			Name: "taint-value", Arg: "VALUE", Env: names("TAINT_VALUE"), Use: "value of an added taint; a taint with any value is removed",
			Value: settings.Checked(&taint.Value, func(s string) error { return selector.CheckTaint("key", s) }),
		},
		{
			Name: "effect", Arg: "EFFECT", Env: names("TAINT_EFFECT"), Default: readiness.NoSchedule,
			Use:   "effect of the taint; without it, mode untaint removes the taint with any effect",
			Value: settings.Choice(&taint.Effect, readiness.NoSchedule, readiness.PreferNoSchedule, readiness.NoExecute),
		},
		{
			Name: "add", Use: "add the taint to nodes without a ready agent, also after a reboot; false: only remove it",
			Value: settings.Bool(&c.Taint.Policy.AddTaint),
		},
	}
}

// policyRows are the settings that decide when the taint is added and removed.
func (c *Config) policyRows() []settings.Setting {
	return []settings.Setting{
		{
			Name: "hysteresis", Arg: "DURATION", Default: "2m",
			Use: "for how long a node that was ready may be without a ready agent before it is tainted: longer than an update " +
				"of the DaemonSet takes on one node; 0 taints at once, as the legacy controller did",
			Value: settings.Duration(&c.Taint.Policy.GracePeriod, 0, 0),
		},
		{
			Name: "settle", Arg: "DURATION", Default: "2m",
			Use:   "for how long after a node's return a Ready condition of its agent from before is ignored",
			Value: settings.Duration(&c.Taint.Policy.Settle, 0, 0),
		},
		{
			Name: "require-node-ready", Use: "the node's own condition Ready must be true as well",
			Value: settings.Bool(&c.Taint.Policy.RequireNodeReady),
		},
		{
			Name: "node-condition", Arg: "TYPE",
			Use:   "publish a condition of this type, such as cni.istio.io/MeshCNIReady, on each node, for a readiness controller",
			Value: settings.Checked(&c.Taint.Condition, checkKey),
		},
	}
}

func (c *Config) leaseRows() []settings.Setting {
	return []settings.Setting{
		{
			Name: "leader-elect", Default: "true", Use: "false: use no lease, for a single replica",
			Value: settings.Bool(&c.LeaderElect),
		},
		{
			Name: "lease-namespace", Arg: "NAMESPACE", Use: "namespace of the lease; in mode untaint this pod's namespace if it is known",
			Value: settings.Checked(&c.Lease.Namespace, selector.CheckName),
		},
		{
			Name: "lease-name", Arg: "NAME", Use: "the lease that one replica of several holds",
			Value: settings.Checked(&c.Lease.Name, selector.CheckName),
		},
		{
			Name: "lease-duration", Arg: "DURATION", Use: "for how long other replicas respect the lease after its renewal",
			Value: settings.Duration(&c.Lease.Duration, time.Second, 0),
		},
		{
			Name: "renew-deadline", Arg: "DURATION", Use: "for how long the leader keeps working while it cannot renew the lease",
			Value: settings.Duration(&c.Lease.Deadline, time.Second, 0),
		},
		{
			Name: "retry-period", Arg: "DURATION", Use: "how often the holder renews the lease and the others try to acquire it",
			Value: settings.Duration(&c.Lease.Retry, time.Second, 0),
		},
	}
}

func (c *Config) processRows() []settings.Setting {
	return append(c.Rows("TAINT_", "taint", "8001", "15024", "false"), []settings.Setting{
		{
			Name: "pod-namespace", Arg: "NAMESPACE", Env: names("POD_NAMESPACE"), Use: "this pod's namespace",
			Value: settings.Checked(new(string), selector.CheckName),
		},
		{
			Name: "pod-name", Arg: "NAME", Env: names("POD_NAME", "HOSTNAME"), Use: "this pod's name, for the lease",
			Value: settings.Text(&c.Lease.Identity, nil),
		},
		{
			Name: "node-name", Arg: "NAME", Env: names("KUBERNETES_NODE_NAME", "NODE_NAME"), Use: "this node, for events",
			Value: settings.Text(&c.Taint.Host, nil),
		},
	}...)
}

// checkKey validates a taint's key or the type of a node condition.
func checkKey(text string) error { return selector.CheckTaint(text, "") }

// readNamespaces parses names between commas. "*" selects all namespaces.
func readNamespaces(text string) ([]string, error) {
	if slices.ContainsFunc(strings.Split(text, ","), func(s string) bool { return strings.TrimSpace(s) == "*" }) {
		return names(""), nil
	}
	var all []string
	err := settings.List(&all, ",", 1, settings.Check(selector.CheckName)).Set(text)
	return all, err
}
