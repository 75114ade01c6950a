package installer

import (
	"errors"
	"flag"
	"net/netip"
	"strings"

	"github.com/meshcni/istio-cni/internal/agent/podrepair"
)

// repairSettings are those of race repair.
func repairSettings(environment) []setting {
	rows := []setting{{
		flag: "repair-enabled", env: names("REPAIR_ENABLED"), def: "true",
		use:  "look for pods that started without redirection",
		into: func(d *draft) flag.Value { return toggle(&d.RepairEnabled) },
	}}
	for _, row := range podrepair.Rows() {
		name := "repair-" + row.Name
		rows = append(rows, setting{
			flag: name, arg: row.Arg, env: names(strings.ReplaceAll(strings.ToUpper(name), "-", "_")), def: row.Default, use: row.Use,
			into: func(d *draft) flag.Value { return repairValue{row, &d.Repair} },
		})
	}
	return rows
}

// repairValue is a place of the settings of race repair.
type repairValue struct {
	row podrepair.Row
	of  *podrepair.Settings
}

func (v repairValue) Set(text string) error { return v.row.Set(v.of, text) }
func (v repairValue) String() string {
	if v.of == nil {
		return ""
	}
	return v.row.Show(v.of)
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
