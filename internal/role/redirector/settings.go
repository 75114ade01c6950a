package redirector

import (
	"slices"

	"github.com/meshcni/istio-cni/internal/core/redirect"
)

// setting is one flag with its environment variables, lowest precedence first. A flag beats the environment, and a
// later variable beats an earlier one.
type setting struct {
	flag, short string
	env         []string
	def         string
	usage       string
	field       redirect.Field
}

// settings are the flags that make the Spec.
func settings() []setting {
	return slices.Concat(proxySettings(), inboundSettings(), outboundSettings())
}

// proxySettings say where traffic goes, and whose is left alone.
func proxySettings() []setting {
	return []setting{
		{"envoy-port", "p", nil, "15001", "outbound redirect `PORT`", redirect.FieldOutboundPort},
		{
			"inbound-capture-port", "z",
			[]string{"INBOUND_CAPTURE_PORT"},
			"15006",
			"inbound redirect or TPROXY `PORT`", redirect.FieldInboundPort,
		},
		{
			"inbound-tunnel-port", "e",
			[]string{"INBOUND_TUNNEL_PORT"},
			"15008",
			"HBONE `PORT`, left alone", redirect.FieldTunnelPort,
		},
		{
			"proxy-uid", "u",
			[]string{"PROXY_UID"},
			"",
			"comma list of `UIDS` that are not captured; empty: that of user $ENVOY_USER (istio-proxy), else 1337", redirect.FieldUIDs,
		},
		{
			"proxy-gid", "g",
			[]string{"PROXY_GID"},
			"",
			"comma list of `GIDS` that are not captured; empty: the same as --proxy-uid", redirect.FieldGIDs,
		},
		{
			"istio-inbound-interception-mode", "m",
			[]string{"ISTIO_INBOUND_INTERCEPTION_MODE"},
			"",
			"`MODE` of inbound capture, REDIRECT or TPROXY; empty: REDIRECT", redirect.FieldMode,
		},
		{
			"istio-inbound-tproxy-mark", "t",
			[]string{"ISTIO_INBOUND_TPROXY_MARK"},
			"1337",
			"decimal `MARK` of TPROXY traffic", redirect.FieldMark,
		},
		{
			"istio-inbound-tproxy-route-table", "r",
			[]string{"ISTIO_INBOUND_TPROXY_ROUTE_TABLE"},
			"133",
			"routing `TABLE` for marked packets", redirect.FieldTable,
		},
	}
}

// inboundSettings say which traffic to the pod is captured.
func inboundSettings() []setting {
	return []setting{
		{
			"istio-inbound-ports", "b",
			[]string{"ISTIO_INBOUND_PORTS"},
			"",
			"inbound `PORTS` to capture: *, a comma list, or empty for none", redirect.FieldInbound,
		},
		{
			"istio-local-exclude-ports", "d",
			[]string{"ISTIO_LOCAL_EXCLUDE_PORTS"},
			"",
			"inbound `PORTS` not to capture; counts only with -b *", redirect.FieldInboundExclude,
		},
		{
			"istio-exclude-interfaces", "c",
			[]string{"ISTIO_EXCLUDE_INTERFACES"},
			"",
			"comma list of `INTERFACES` that are left alone both ways", redirect.FieldExcludeInterfaces,
		},
	}
}

// outboundSettings say which traffic of the pod is captured.
func outboundSettings() []setting {
	return []setting{
		{
			"istio-service-cidr", "i",
			[]string{"ISTIO_SERVICE_CIDR"},
			"",
			"outbound `NETWORKS` to capture: *, a comma list of address/prefix, or empty for none", redirect.FieldOutbound,
		},
		{
			"istio-service-exclude-cidr", "x",
			[]string{"ISTIO_SERVICE_EXCLUDE_CIDR"},
			"",
			"comma list of outbound `NETWORKS` not to capture", redirect.FieldOutboundExclude,
		},
		{
			"istio-outbound-ports", "q",
			[]string{"ISTIO_OUTBOUND_PORTS"},
			"",
			"comma list of outbound `PORTS` to capture in all other networks as well", redirect.FieldOutboundPorts,
		},
		{
			"istio-local-outbound-ports-exclude", "o",
			[]string{"ISTIO_LOCAL_OUTBOUND_PORTS_EXCLUDE"},
			"",
			"comma list of outbound `PORTS` not to capture, TCP and UDP", redirect.FieldOutboundPortsExclude,
		},
		{
			"kube-virt-interfaces", "k",
			[]string{"KUBE_VIRT_INTERFACES"},
			"",
			"comma list of virtual machine `INTERFACES` whose traffic counts as outbound", redirect.FieldRerouteInterfaces,
		},
		{
			"second-ip-family", "",
			[]string{"SECOND_IP_FAMILY"},
			"bypass",
			"what to do with IPv6 of a pod whose first address is IPv4: `bypass|capture|reject`", redirect.FieldSecondFamily,
		},
	}
}

// envOnly are settings that have no flag.
func envOnly() []setting {
	return []setting{
		{env: []string{"ISTIO_OUTBOUND_OWNER_GROUPS"}, field: redirect.FieldOwnerGroups, usage: "groups whose traffic is captured: * (default) or a comma list; set but empty: nobody"},
		{env: []string{"ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE"}, field: redirect.FieldOwnerGroupsExclude, usage: "groups whose traffic is not captured; counts only with *"},
		{env: []string{"ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR"}, field: redirect.FieldLoopback, usage: "what counts as the pod itself on lo, default 127.0.0.1/32"},
	}
}

// toggle is a switch.
type toggle struct {
	flag, short string
	env         []string
	usage       string
	into        func(*config) *bool
}

func toggles() []toggle {
	return []toggle{
		{"dry-run", "n", []string{"DRY_RUN"}, "print the text for iptables-restore and touch nothing", func(c *config) *bool { return &c.dryRun }},
		{"explain", "", nil, "print the rules with their reasons and touch nothing", func(c *config) *bool { return &c.explain }},
		{"verify", "", nil, "compare the namespace with the wanted rules; exit 3 if they differ", func(c *config) *bool { return &c.verify }},
		{"reconcile", "", []string{"RECONCILE"}, "replace rules of the mesh that are not the wanted ones", func(c *config) *bool { return &c.reconcile }},
		{"cleanup-only", "", []string{"CLEANUP_ONLY"}, "remove all rules of the mesh, of whatever configuration", func(c *config) *bool { return &c.cleanup }},
		{"force-apply", "", []string{"FORCE_APPLY"}, "the same as --reconcile", func(c *config) *bool { return &c.force }},
		{"skip-rule-apply", "", []string{"SKIP_RULE_APPLY"}, "change no rules and no routes", func(c *config) *bool { return &c.skip }},
		{"run-validation", "", []string{"RUN_VALIDATION"}, "probe whether traffic is redirected; exit 126 if not", func(c *config) *bool { return &c.validate }},
		{"redirect-dns", "", []string{"REDIRECT_DNS", "ISTIO_META_DNS_CAPTURE"}, "capture DNS sent to the servers in /etc/resolv.conf", func(c *config) *bool { return &c.dns }},
		{"capture-all-dns", "", []string{"CAPTURE_ALL_DNS"}, "with --redirect-dns: capture all DNS", func(c *config) *bool { return &c.allDNS }},
		{"drop-invalid", "", []string{"DROP_INVALID", "INVALID_DROP"}, "drop packets that fit no connection", func(c *config) *bool { return &c.dropInvalid }},
		{"dual-stack", "", []string{"DUAL_STACK", "ISTIO_DUAL_STACK"}, "capture IPv6, whatever the addresses are", func(c *config) *bool { return &c.dualStack }},
		{"cni-mode", "", []string{"CNI_MODE"}, "say so if the tools cannot be isolated from the node (lock, name service)", func(c *config) *bool { return &c.cniMode }},
		{"native-nftables", "", []string{"NATIVE_NFTABLES"}, "the same as --backend=native", func(c *config) *bool { return &c.native }},
	}
}

// historic flags are accepted and do nothing: they belonged to earlier versions of the reference, or to its logging.
// The value tells whether the flag takes an argument.
func historic() map[string]bool {
	return map[string]bool{
		"restore-format": false, "clean": false, "output-paths": true, "host-nsenter-exec": false,
		"iptables-trace-logging": false, "iptables-version": true,
		"log_target": true, "log_as_json": false, "log_output_level": true, "log_stacktrace_level": true, "log_caller": true,
	}
}
