package installer

import (
	"errors"
	"flag"
	"net/netip"
	"slices"
	"strings"
)

// repairSettings are those of race repair, with the reference's defaults.
func repairSettings(env environment) []setting {
	return slices.Concat(repairActionSettings(env), repairPodSettings(env))
}

// repairActionSettings say what is done.
func repairActionSettings(environment) []setting {
	return []setting{
		{
			flag: "repair-enabled", env: names("REPAIR_ENABLED"), def: "true",
			use:  "look for pods that started without redirection",
			into: func(d *draft) flag.Value { return toggle(&d.Repair.Enabled) },
		},
		{
			flag: "repair-repair-pods", env: names("REPAIR_REPAIR_PODS"), def: "false",
			use: "redirect them in place", into: func(d *draft) flag.Value { return toggle(&d.Repair.RepairPods) },
		},
		{
			flag: "repair-delete-pods", env: names("REPAIR_DELETE_PODS"), def: "false",
			use: "delete them", into: func(d *draft) flag.Value { return toggle(&d.Repair.DeletePods) },
		},
		{
			flag: "repair-label-pods", env: names("REPAIR_LABEL_PODS"), def: "false",
			use: "label them", into: func(d *draft) flag.Value { return toggle(&d.Repair.LabelPods) },
		},
		{
			flag: "repair-broken-pod-label-key", arg: "KEY", env: names("REPAIR_BROKEN_POD_LABEL_KEY"),
			def: "cni.istio.io/uninitialized", use: "key of that label",
			into: func(d *draft) flag.Value { return text(&d.Repair.LabelKey, qualified) },
		},
		{
			flag: "repair-broken-pod-label-value", arg: "VALUE", env: names("REPAIR_BROKEN_POD_LABEL_VALUE"), def: "true",
			use: "value of that label", into: func(d *draft) flag.Value { return text(&d.Repair.LabelValue, optional(word)) },
		},
	}
}

// repairPodSettings say to which pods.
func repairPodSettings(environment) []setting {
	return []setting{
		{
			flag: "repair-node-name", arg: "NAME", env: names("REPAIR_NODE_NAME"),
			use: "only pods of this node", into: func(d *draft) flag.Value { return text(&d.Repair.NodeName, optional(object)) },
		},
		{
			flag: "repair-sidecar-annotation", arg: "KEY", env: names("REPAIR_SIDECAR_ANNOTATION"), def: "sidecar.istio.io/status",
			use:  "only pods with this annotation; an empty flag: all",
			into: func(d *draft) flag.Value { return text(&d.Repair.SidecarAnnotation, optional(qualified)) },
		},
		{
			flag: "repair-init-container-name", arg: "NAME", env: names("REPAIR_INIT_CONTAINER_NAME"), def: "istio-validation",
			use:  "only this init container; an empty flag: all",
			into: func(d *draft) flag.Value { return text(&d.Repair.InitContainerName, optional(label)) },
		},
		{
			flag: "repair-init-container-termination-message", arg: "TEXT", env: names("REPAIR_INIT_CONTAINER_TERMINATION_MESSAGE"),
			use:  "only with this termination message",
			into: func(d *draft) flag.Value { return text(&d.Repair.TerminationMessage, anyText) },
		},
		{
			flag: "repair-init-container-exit-code", arg: "CODE", env: names("REPAIR_INIT_CONTAINER_EXIT_CODE"), def: "126",
			use: "only with this exit code; 0: any", into: func(d *draft) flag.Value { return exitCode(&d.Repair.ExitCode) },
		},
		{
			flag: "repair-label-selectors", arg: "SELECTOR", env: names("REPAIR_LABEL_SELECTORS"),
			use:  "only pods with these labels",
			into: func(d *draft) flag.Value { return text(&d.Repair.LabelSelectors, anyText) },
		},
		{
			flag: "repair-field-selectors", arg: "SELECTOR", env: names("REPAIR_FIELD_SELECTORS"),
			use:  "only pods with these fields",
			into: func(d *draft) flag.Value { return text(&d.Repair.FieldSelectors, anyText) },
		},
	}
}

// ignoredSettings are what charts of the reference set and this program has no use for. Variables of ambient mode are
// checked all the same: a mistake in them is a mistake in the values the chart was given.
func ignoredSettings(environment) []setting {
	out := []setting{
		ignored("ztunnel-uds-address", "SOCKET", "ZTUNNEL_UDS_ADDRESS", "ambient mode"),
		ignored("log-uds-socket", "SOCKET", "", "a name of --log-uds-address that never worked"),
		ignored("", "", "CURRENT_AGENT_VERSION", "read by nobody"),
		ignored("", "", "REVISION", "read by nobody"),
		ignored("", "", "SYSTEM_NAMESPACE", "read by nobody"),
		ignored("", "", "GOMEMLIMIT", "heeded by the Go runtime itself"),
		ignored("", "", "GOMAXPROCS", "heeded by the Go runtime itself"),
		checkedSwitch("repair-run-as-daemon", "REPAIR_RUN_AS_DAEMON", "versions 1.11 to 1.18"),
		checkedSwitch("ebpf-enabled", "EBPF_ENABLED", "versions 1.18 to 1.20"),
		checkedSwitch("", "ALLOW_SWITCH_TO_HOST_NS", "ambient mode and race repair"),
	}
	for _, env := range []string{
		"AMBIENT_DNS_CAPTURE", "AMBIENT_IPV6", "AMBIENT_RECONCILE_POD_RULES_ON_STARTUP", "AMBIENT_DISABLE_SAFE_UPGRADE",
		"AMBIENT_USE_SCOPED_XTABLES_LOCKING", "AMBIENT_ENABLE_AWS_BRANCH_ENI_PROBE",
	} {
		out = append(out, checkedSwitch("", env, "ambient mode"))
	}
	for _, env := range []string{"HOST_PROBE_SNAT_IP", "HOST_PROBE_SNAT_IPV6"} {
		s := ignored("", "", env, "ambient mode")
		s.into = func(*draft) flag.Value { return text(new(string), ipAddress) }
		out = append(out, s)
	}
	return out
}

func checkedSwitch(name, env, use string) setting {
	s := ignored(name, "", env, use)
	s.into = func(*draft) flag.Value { return toggle(new(bool)) }
	return s
}

func ipAddress(s string) (string, error) {
	if _, err := netip.ParseAddr(s); err != nil {
		return "", errors.New("want an IP address")
	}
	return s, nil
}

const alphanumeric = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"

// word is a value of a label.
func word(s string) (string, error) {
	const longest = 63
	if s == "" || len(s) > longest || strings.Trim(s, alphanumeric+"-_.") != "" ||
		!strings.Contains(alphanumeric, s[:1]) || !strings.Contains(alphanumeric, s[len(s)-1:]) {
		return "", errors.New("want at most 63 letters, digits and inner dashes, underscores and dots")
	}
	return s, nil
}

// qualified is a key of a label or an annotation: NAME or PREFIX/NAME.
func qualified(s string) (string, error) {
	prefix, name, found := strings.Cut(s, "/")
	if !found {
		prefix, name = "prefix", s
	}
	if _, err := object(prefix); err != nil {
		return "", errors.New("want NAME or PREFIX/NAME with a prefix of lower case letters, digits, dashes and dots")
	}
	if _, err := word(name); err != nil {
		return "", err
	}
	return s, nil
}
