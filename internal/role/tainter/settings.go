package tainter

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/applet/settings"
	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/node/pluginlog"
)

// setting is one row: a flag with its other spellings, variables that say the same (the first that is not empty counts),
// and where it goes.
type setting struct {
	name    string
	aliases []string
	arg     string // what the flag takes, "" for a switch
	env     []string
	// def is the default, legacy and untaint that of a mode alone.
	def, legacy, untaint string
	// from is another setting whose value is the default in mode untaint.
	from string
	use  string
	// mode is the one that the setting is of, "" for both. Giving it chooses that mode.
	mode Mode
	set  func(*draft, string) error
}

func (s setting) defaultOf(d *draft) string {
	text := s.def
	switch {
	case d.Mode == Untaint && s.from != "" && d.found[s.from].Text != "":
		text = d.found[s.from].Text
	case d.Mode == Legacy && s.legacy != "":
		text = s.legacy
	case d.Mode == Untaint && s.untaint != "":
		text = s.untaint
	}
	return text
}

// row is the setting as it is read.
func (s setting) row(d *draft) settings.Setting {
	row := settings.Setting{
		Name: s.name, Aliases: s.aliases, Arg: s.arg, Env: s.env, Default: s.defaultOf(d), Shown: s.def + s.legacy + s.untaint, Use: s.use,
		Set: func(text string) error { return s.set(d, text) },
	}
	if s.mode != "" {
		row.Use += fmt.Sprintf(" (mode %s)", s.mode)
	}
	if s.legacy != "" && s.untaint != "" {
		row.Shown = fmt.Sprintf("%s in mode legacy, %s in mode untaint", s.legacy, s.untaint)
	}
	return row
}

// rows are all settings, with the defaults of the mode.
func (d *draft) rows() []settings.Setting {
	var rows []settings.Setting
	for _, s := range table() {
		rows = append(rows, s.row(d))
	}
	return rows
}

func names(of ...string) []string { return of }

// dashed gives the variables of the legacy controller and those that a shell can set.
func dashed(name string) []string { return settings.Dashed("TAINT_", name) }

func table() []setting {
	return slices.Concat(modeSettings(), legacySettings(), untaintSettings(), taintSettings(), policySettings(),
		leaseSettings(), processSettings())
}

func modeSettings() []setting {
	return []setting{
		{
			name: "mode", arg: "MODE", env: names("TAINT_MODE"), def: "auto",
			use: "legacy, untaint, or auto: legacy if a setting of that mode is given, else untaint",
			set: func(*draft, string) error { return nil },
		},
		{
			name: "dry-run", env: names("TAINT_DRY_RUN"), def: "false",
			use: "say for each node what would be done, once, and change nothing",
			set: func(d *draft, s string) error { return settings.Toggle(&d.DryRun, s) },
		},
		{
			// Of both modes, but only the legacy controller had it.
			name: "run-as-daemon", env: dashed("run-as-daemon"), def: "true", mode: "",
			use: "false: look at all nodes once and exit; hysteresis does not count then",
			set: func(d *draft, s string) error { return settings.Toggle(&d.Daemon, s) },
		},
	}
}

func legacySettings() []setting {
	return []setting{
		{
			name: "configmap-namespace", arg: "NAMESPACE", env: dashed("configmap-namespace"), legacy: "kube-system", mode: Legacy,
			use: "namespace of the ConfigMap with the requirements",
			set: func(d *draft, s string) error { return name(&d.ConfigMapNamespace, s) },
		},
		{
			name: "configmap-name", arg: "NAME", env: dashed("configmap-name"), legacy: "single", mode: Legacy,
			use: "the ConfigMap: each of its keys is a YAML list of {name, selector, namespace}",
			set: func(d *draft, s string) error { return name(&d.ConfigMapName, s) },
		},
	}
}

func untaintSettings() []setting {
	return []setting{
		{
			name: "namespace", aliases: names("namespaces", "cniNamespace"), arg: "NAMESPACE", mode: Untaint, from: "pod-namespace",
			env: names("TAINT_NAMESPACE", "TAINT_NAMESPACES"), untaint: "istio-system",
			use: "namespaces of the agent's pods, between commas, * for all: a ready pod in one of them is enough; the own one " +
				"if that is known",
			set: func(d *draft, s string) error { return list(&d.namespaces, s) },
		},
		{
			name: "selector", arg: "SELECTOR", env: names("TAINT_SELECTOR"), untaint: readiness.AgentSelector, mode: Untaint,
			use: "label selector of the agent's pods",
			set: func(d *draft, s string) error {
				d.selectors = names(s)
				return selector.Check(s)
			},
		},
	}
}

func taintSettings() []setting {
	return []setting{
		{
			name: "taint-name", aliases: names("taint-key"), arg: "KEY", legacy: readiness.LegacyKey, untaint: readiness.UntaintKey,
			env: names("TAINT_NAME", "PILOT_NODE_UNTAINT_CONTROLLERS_TAINT_NAME"),
			use: "key of the taint",
			set: func(d *draft, s string) error {
				d.Policy.Taint.Key = s
				return selector.CheckTaint(s, "")
			},
		},
		{
			name: "taint-value", arg: "VALUE", env: names("TAINT_VALUE"), untaint: readiness.UntaintValue,
			use: "value of a taint that is added; it does not matter for removing",
			set: func(d *draft, s string) error {
				d.Policy.Taint.Value = s
				return selector.CheckTaint("key", s)
			},
		},
		{
			name: "effect", arg: "EFFECT", env: names("TAINT_EFFECT"), def: readiness.NoSchedule,
			use: "effect of the taint; without it, mode untaint removes those of any effect",
			set: func(d *draft, s string) error {
				d.Policy.Taint.Effect = s
				if !slices.Contains(names(readiness.NoSchedule, readiness.PreferNoSchedule, readiness.NoExecute), s) {
					return errors.New("want NoSchedule, PreferNoSchedule or NoExecute")
				}
				return nil
			},
		},
		{
			name: "add", env: names("TAINT_ADD"), legacy: "true", untaint: "false",
			use: "put the taint on nodes without a ready agent, after a reboot as well; false: only remove it",
			set: func(d *draft, s string) error {
				return pick(&d.Policy.Adding, s, readiness.AddWhenUnready, readiness.NeverAdd)
			},
		},
	}
}

// policySettings say when it is put and taken.
func policySettings() []setting {
	return []setting{
		{
			name: "hysteresis", arg: "DURATION", env: names("TAINT_HYSTERESIS"), def: "2m",
			use: "for how long a node that was ready may be without a ready agent before it is tainted: longer than an update " +
				"of the DaemonSet takes on one node; 0 taints at once, as the legacy controller did",
			set: func(d *draft, s string) error { return duration(&d.Policy.Hysteresis, s) },
		},
		{
			name: "settle", arg: "DURATION", env: names("TAINT_SETTLE"), def: "2m",
			use: "for how long after its return a node is not believed that its agent is ready since before",
			set: func(d *draft, s string) error { return duration(&d.Policy.Settle, s) },
		},
		{
			name: "require-node-ready", env: names("TAINT_REQUIRE_NODE_READY"), legacy: "true", untaint: "false",
			use: "the node's own condition Ready must be true as well",
			set: func(d *draft, s string) error {
				return pick(&d.Policy.Node, s, readiness.NodeReadinessRequired, readiness.NodeReadinessIgnored)
			},
		},
		{
			name: "node-condition", arg: "TYPE", env: names("TAINT_NODE_CONDITION"),
			use: "publish a condition of this type on each node, for a readiness controller, such as cni.istio.io/MeshCNIReady",
			set: func(d *draft, s string) error {
				d.Condition = s
				return selector.CheckTaint(s, "")
			},
		},
	}
}

func leaseSettings() []setting {
	return []setting{
		{
			name: "leader-elect", env: names("TAINT_LEADER_ELECT"), def: "true",
			use: "false: there is no other replica, and no lease is needed",
			set: func(d *draft, s string) error { return settings.Toggle(&d.LeaderElect, s) },
		},
		{
			name: "lease-namespace", arg: "NAMESPACE", env: names("TAINT_LEASE_NAMESPACE"), legacy: "kube-system",
			untaint: "istio-system", from: "pod-namespace",
			use: "namespace of the lease; in mode untaint the own one if that is known",
			set: func(d *draft, s string) error { return name(&d.LeaseNamespace, s) },
		},
		{
			name: "lease-name", arg: "NAME", env: names("TAINT_LEASE_NAME"), legacy: "istio-taint-lock",
			untaint: "istio-node-untaint", use: "the lease that one replica of several holds",
			set: func(d *draft, s string) error { return name(&d.LeaseName, s) },
		},
		{
			name: "lease-duration", arg: "DURATION", env: names("TAINT_LEASE_DURATION"), legacy: "60s", untaint: "30s",
			use: "for how long others respect the lease after it was renewed",
			set: func(d *draft, s string) error { return span(&d.LeaseDuration, s) },
		},
		{
			name: "renew-deadline", arg: "DURATION", env: names("TAINT_RENEW_DEADLINE"), legacy: "15s", untaint: "15s",
			use: "for how long the leader works on while it cannot renew the lease",
			set: func(d *draft, s string) error { return span(&d.RenewDeadline, s) },
		},
		{
			name: "retry-period", arg: "DURATION", env: names("TAINT_RETRY_PERIOD"), legacy: "5s", untaint: "7.5s",
			use: "how often the lease is renewed or tried for",
			set: func(d *draft, s string) error { return span(&d.RetryPeriod, s) },
		},
	}
}

func processSettings() []setting {
	return []setting{
		{
			name: "kubeconfig", arg: "FILE", env: names("KUBECONFIG"), use: "instead of the account of the pod",
			set: func(d *draft, s string) error { d.Kubeconfig = s; return nil },
		},
		{
			name: "health-port", arg: "PORT", env: names("TAINT_HEALTH_PORT"), def: "8001",
			use: "/healthz and /readyz; 0 is off. It is not the agent's 8000: both may be in one pod",
			set: func(d *draft, s string) error { return settings.Port(&d.HealthPort, s) },
		},
		{
			name: "monitoring-port", arg: "PORT", env: names("TAINT_MONITORING_PORT"), def: "15024",
			use: "metrics; 0 is off. It is not the agent's 15014",
			set: func(d *draft, s string) error { return settings.Port(&d.MonitoringPort, s) },
		},
		{
			name: "log_output_level", arg: "LEVEL", env: names("LOG_LEVEL"), def: "info",
			use: "debug, info, warn, error or none, or SCOPE:LEVEL pairs, of which default and all count",
			set: func(d *draft, s string) error {
				l, err := pluginlog.ParseScopes(s, "default", "all", "taint")
				d.LogLevel = l
				return err
			},
		},
		{
			name: "log_as_json", env: names("LOG_AS_JSON"), def: "false", use: "log JSON",
			set: func(d *draft, s string) error { return settings.Toggle(&d.LogJSON, s) },
		},
		{
			name: "pod-namespace", arg: "NAMESPACE", env: names("POD_NAMESPACE"), use: "the own one",
			set: func(_ *draft, s string) error {
				var own string
				return name(&own, s)
			},
		},
		{
			name: "pod-name", arg: "NAME", env: names("POD_NAME", "HOSTNAME"), use: "the own one, for the lease",
			set: func(d *draft, s string) error { d.PodName = s; return nil },
		},
		{
			name: "node-name", arg: "NAME", env: names("KUBERNETES_NODE_NAME", "NODE_NAME"), use: "the own node, for events",
			set: func(d *draft, s string) error { d.NodeName = s; return nil },
		},
	}
}

// pick is a switch between two values.
func pick[T any](into *T, text string, on, off T) error {
	var is bool
	err := settings.Toggle(&is, text)
	*into = off
	if is {
		*into = on
	}
	return err
}

func duration(into *time.Duration, text string) error {
	d, err := time.ParseDuration(text)
	if err != nil || d < 0 {
		return errors.New("want a duration such as 90s or 2m")
	}
	*into = d
	return nil
}

// span is a duration that is not nothing.
func span(into *time.Duration, text string) error {
	if err := duration(into, text); err != nil {
		return err
	}
	if *into < time.Second {
		return errors.New("want a second at least")
	}
	return nil
}

// name is that of an object or a namespace.
func name(into *string, text string) error {
	const longest = 253
	*into = text
	for part := range strings.SplitSeq(text, ".") {
		if part == "" || strings.Trim(part, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" || part[0] == '-' ||
			part[len(part)-1] == '-' || len(text) > longest {
			return fmt.Errorf("want a name of at most %d lower case letters, digits, inner dashes and dots", longest)
		}
	}
	return nil
}

// list is names between commas. "*" is all namespaces.
func list(into *[]string, text string) error {
	*into = nil
	for field := range strings.SplitSeq(text, ",") {
		field = strings.TrimSpace(field)
		if field == "" || slices.Contains(*into, field) {
			continue
		}
		if field == "*" {
			*into = names("")
			return nil
		}
		var one string
		if err := name(&one, field); err != nil {
			return fmt.Errorf("item %q: %w", field, err)
		}
		*into = append(*into, one)
	}
	if len(*into) == 0 {
		return errors.New("want at least one namespace, or * for all of them")
	}
	return nil
}
