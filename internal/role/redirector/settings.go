package redirector

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/user"
	"strconv"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/node/iptables"
)

// config has all inputs of a run.
type config struct {
	spec redirect.Spec

	netns         string
	forceIptables iptables.Variant
	path          string // search path of programs
	dryRunFile    string
	proxyUser     string

	probePort    uint16
	probeTimeout time.Duration

	output                                                             output.Form
	dryRun, explain, verify, reconcile, cleanup, force, skip, validate bool
	backend                                                            redirect.Backend
	dns, allDNS, dropInvalid, dualStack, cniMode, native               bool

	warnings []string
}

// specSetting is the setting of a field of the Spec, which is parsed as a whole.
type specSetting struct {
	settings.Setting
	field redirect.Field
}

// groups is the table of all settings. A variable is spelled like its flag unless the row says otherwise; of several variables
// the first non-empty one applies.
func (c *config) groups() []settings.Group {
	spec := make([]settings.Setting, 0, len(specSettings()))
	for _, s := range specSettings() {
		spec = append(spec, s.Setting)
	}
	return []settings.Group{
		{Title: "What to do", Rows: settings.Named("", c.actionSettings()...)},
		{Title: "What is redirected", Rows: append(spec, settings.Named("", c.captureSettings()...)...)},
		{Title: "How", Rows: settings.Named("", c.meansSettings()...)},
	}
}

// spec returns a row of specSettings with its shown default and an alias of the flag: one letter, or another spelling.
func spec(field redirect.Field, name, alias, arg, shown, use string) specSetting {
	s := settings.Setting{Name: name, Arg: arg, Shown: shown, Use: use, Value: settings.Text(new(string), nil)}
	if alias != "" {
		s.Aliases = []string{alias}
	}
	return specSetting{settings.Named("", s)[0], field}
}

// variable returns a row of specSettings without a flag.
func variable(field redirect.Field, name, arg, shown, use string) specSetting {
	s := spec(field, "", "", arg, shown, use)
	s.Env = []string{name}
	s.KeepEmpty = field == redirect.FieldOwnerGroups
	return s
}

// specSettings are the settings of the Spec.
func specSettings() []specSetting {
	outboundPort := spec(redirect.FieldOutboundPort, "envoy-port", "p", "PORT", "15001", "outbound redirect port")
	outboundPort.Env = nil // as in Istio's command
	return []specSetting{
		outboundPort,
		spec(redirect.FieldInboundPort, "inbound-capture-port", "z", "PORT", "15006", "inbound redirect or TPROXY port"),
		spec(redirect.FieldTunnelPort, "inbound-tunnel-port", "e", "PORT", "15008", "HBONE port, left alone"),
		spec(redirect.FieldUIDs, "proxy-uid", "u", "UIDS", "the id of user $ENVOY_USER, else 1337", "comma list of user ids that are not captured"),
		spec(redirect.FieldGIDs, "proxy-gid", "g", "GIDS", "the same as --proxy-uid", "comma list of group ids that are not captured"),
		spec(redirect.FieldMode, "istio-inbound-interception-mode", "m", "MODE", "REDIRECT", "inbound capture: REDIRECT or TPROXY"),
		spec(redirect.FieldMark, "istio-inbound-tproxy-mark", "t", "MARK", "1337", "decimal mark of TPROXY traffic"),
		spec(redirect.FieldTable, "istio-inbound-tproxy-route-table", "r", "TABLE", "133", "routing table for marked packets"),
		spec(redirect.FieldInbound, "istio-inbound-ports", "b", "PORTS", "", "inbound ports to capture: *, a comma list of ports and ranges like 8000-8100, or empty for none"),
		spec(redirect.FieldInboundExclude, "istio-local-exclude-ports", "d", "PORTS", "", "comma list of inbound ports and ranges not to capture; only with -b *"),
		spec(redirect.FieldExcludeInterfaces, "istio-exclude-interfaces", "c", "INTERFACES", "",
			"comma list of interfaces to ignore in both directions"),
		spec(redirect.FieldOutbound, "istio-service-cidr", "i", "NETWORKS", "",
			"outbound networks to capture: *, a comma list of address/prefix, or empty for none"),
		spec(redirect.FieldOutboundExclude, "istio-service-exclude-cidr", "x", "NETWORKS", "", "comma list of outbound networks not to capture"),
		spec(redirect.FieldOutboundPorts, "istio-outbound-ports", "q", "PORTS", "",
			"comma list of outbound ports and ranges to capture in all other networks as well"),
		spec(redirect.FieldOutboundPortsExclude, "istio-local-outbound-ports-exclude", "o", "PORTS", "",
			"comma list of outbound ports and ranges not to capture, TCP and UDP"),
		spec(redirect.FieldRerouteInterfaces, "kube-virt-interfaces", "k", "INTERFACES", "",
			"comma list of virtual machine interfaces whose traffic is outbound"),
		spec(redirect.FieldSecondFamily, "second-ip-family", "second_ip_family", "WHAT", "bypass",
			"IPv6 of a pod whose first address is IPv4: bypass, capture or reject"),
		variable(redirect.FieldOwnerGroups, "ISTIO_OUTBOUND_OWNER_GROUPS", "GROUPS", "*",
			"groups whose traffic is captured: * or a comma list; set but empty: none"),
		variable(redirect.FieldOwnerGroupsExclude, "ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE", "GROUPS", "",
			"groups whose traffic is not captured; only with *"),
		variable(redirect.FieldLoopback, "ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR", "NETWORK", "127.0.0.1/32", "the pod's own addresses on lo"),
	}
}

func (c *config) actionSettings() []settings.Setting {
	return []settings.Setting{
		{Name: "dry-run", Aliases: []string{"n"}, Use: "print the text for iptables-restore and change nothing", Value: settings.Bool(&c.dryRun)},
		{Name: "explain", FlagOnly: true, Use: "print the rules with their reasons and change nothing", Value: settings.Bool(&c.explain)},
		{Name: "verify", FlagOnly: true, Use: "compare the namespace with the desired rules; exit 3 if they differ", Value: settings.Bool(&c.verify)},
		{Name: "reconcile", Use: "replace rules of the mesh that are not the desired ones", Value: settings.Bool(&c.reconcile)},
		{Name: "cleanup-only", Use: "remove all rules of the mesh, of whatever configuration", Value: settings.Bool(&c.cleanup)},
		{Name: "force-apply", Use: "the same as --reconcile", Value: settings.Bool(&c.force)},
		{Name: "skip-rule-apply", Use: "change no rules and no routes", Value: settings.Bool(&c.skip)},
		{Name: "run-validation", Use: "probe whether traffic is redirected; exit 126 if not", Value: settings.Bool(&c.validate)},
		{ // -o is Istio's, for ports
			Name: "output", FlagOnly: true, Arg: "FORM", Default: string(output.Table), Use: "table (the text), json or yaml, with --dry-run, --explain and --verify",
			Value: settings.Choice(&c.output, output.Forms()...),
		},
		{
			Env: []string{"DRY_RUN_FILE_PATH"}, Arg: "FILE", Use: "file that also receives the text of --dry-run",
			Value: settings.Text(&c.dryRunFile, nil),
		},
	}
}

func (c *config) captureSettings() []settings.Setting {
	return []settings.Setting{
		{
			Name: "redirect-dns", Env: []string{"ISTIO_META_DNS_CAPTURE", "REDIRECT_DNS"},
			Use:   "capture DNS sent to the servers in /etc/resolv.conf",
			Value: settings.Bool(&c.dns),
		},
		{Name: "capture-all-dns", Use: "with --redirect-dns: capture all DNS", Value: settings.Bool(&c.allDNS)},
		{
			Name: "drop-invalid", Env: []string{"INVALID_DROP", "DROP_INVALID"}, Use: "drop packets in conntrack state INVALID",
			Value: settings.Bool(&c.dropInvalid),
		},
		{
			Name: "dual-stack", Env: []string{"ISTIO_DUAL_STACK", "DUAL_STACK"}, Use: "capture IPv6, regardless of the addresses",
			Value: settings.Bool(&c.dualStack),
		},
		{
			Env: []string{"ENVOY_USER"}, Arg: "USER", Default: "istio-proxy", Use: "user whose id is the default of --proxy-uid",
			Value: settings.Text(&c.proxyUser, nil),
		},
	}
}

func (c *config) meansSettings() []settings.Setting {
	const shortestProbe, longestProbe = time.Millisecond, time.Hour
	return []settings.Setting{
		{
			Name: "cni-mode", Use: "report tools that cannot be isolated from the node (lock, name service)",
			Value: settings.Bool(&c.cniMode),
		},
		{
			Name: "network-namespace", Arg: "NAME|PATH", Use: "namespace to work in, a name as in ip netns or a path; by default the current one",
			Value: settings.Text(&c.netns, nil),
		},
		{
			Name: "backend", Arg: "WAY", Env: []string{"CNI_BACKEND"}, Default: string(redirect.Auto),
			Use: "how rules get into the namespace: auto, netlink (iptables-nft rules, without a process), native (tables of " +
				"nftables) or iptables (the host's programs)",
			Value: settings.Of(&c.backend, redirect.ParseBackend, func(b redirect.Backend) string { return string(b) }),
		},
		{Name: "native-nftables", Use: "the same as --backend=native", Value: settings.Bool(&c.native)},
		{
			Name: "force-iptables-binary", Arg: "VARIANT", Use: "legacy or nft, instead of a choice by the program",
			Value: settings.Of(&c.forceIptables, iptables.ParseVariant, func(v iptables.Variant) string { return string(v) }),
		},
		{
			Name: "iptables-probe-port", Arg: "PORT", Default: "15002", Use: "port that the validation dials",
			Value: settings.Port(&c.probePort, 1),
		},
		{
			Name: "probe-timeout", Arg: "DURATION", Default: "5s", Use: "time limit of the validation",
			Value: settings.Duration(&c.probeTimeout, shortestProbe, longestProbe),
		},
	}
}

// historic flags are accepted without effect: they belonged to earlier versions of Istio's command, or to its logging.
func historic() []settings.Setting {
	rows := []settings.Setting{{Name: "restore-format", Aliases: []string{"f"}}}
	for _, name := range []string{"clean", "host-nsenter-exec", "iptables-trace-logging", "log_as_json"} {
		rows = append(rows, settings.Setting{Name: name})
	}
	for _, name := range []string{"output-paths", "iptables-version", "log_target", "log_output_level", "log_stacktrace_level", "log_caller"} {
		rows = append(rows, settings.Setting{Name: name, Arg: "TEXT"})
	}
	return rows
}

// resolvConf has the DNS servers whose traffic is captured.
const resolvConf = "/etc/resolv.conf"

// commandDefaults returns the Spec of a command without flags: unlike a pod's Spec it captures no ports and no addresses.
func commandDefaults() redirect.Spec {
	s := redirect.Default()
	s.Inbound, s.InboundExclude = redirect.Ports{}, nil
	s.Outbound, s.OutboundPortsExclude = redirect.Networks{}, nil
	return s
}

// read builds the configuration. All problems are reported together.
func read(given func(flag string) (string, bool), getenv func(string) (string, bool)) (config, error) {
	c := config{}
	c.path, _ = getenv("PATH")
	rows := settings.All(c.groups())
	origins, err := settings.Given(rows, given, getenv).Read(rows)
	values := redirect.Values{}
	for _, s := range specSettings() {
		if at := origins[s.String()]; at.Given() && (at.Text != "" || s.KeepEmpty) {
			values[s.field] = redirect.Value{Source: at.String(), Text: at.Text}
		}
	}
	if u, unknown := user.Lookup(c.proxyUser); unknown == nil && values[redirect.FieldUIDs].Text == "" {
		values[redirect.FieldUIDs] = redirect.Value{Source: fmt.Sprintf("user %q", c.proxyUser), Text: u.Uid}
	}
	spec, specErr := redirect.Parse(commandDefaults(), values, redirect.Dialect{GroupID: groupID})
	if values[redirect.FieldGIDs].Text == "" {
		spec.GIDs = spec.UIDs
	}
	chosen, backendErr := redirect.ChooseBackend(c.backend, c.native, string(c.forceIptables))
	if backendErr != nil {
		backendErr = fmt.Errorf("--backend, --native-nftables and --force-iptables-binary: %w", backendErr)
	}
	c.backend = chosen
	spec.DropInvalid, spec.DualStack = c.dropInvalid, c.dualStack
	c.spec = spec
	return c, errors.Join(err, specErr, backendErr, c.contradiction(), c.captureDNS())
}

// contradiction refuses flags that exclude each other.
func (c *config) contradiction() error {
	switch {
	case c.output != output.Table && !c.dryRun && !c.explain && !c.verify:
		return fmt.Errorf("--output %s needs --dry-run, --explain or --verify", c.output)
	case c.verify && (c.dryRun || c.explain):
		return errors.New("--verify contradicts --dry-run and --explain: it compares, they print what is wanted")
	case c.cleanup && (c.verify || c.explain):
		return errors.New("--verify and --explain contradict --cleanup-only: they change nothing")
	}
	return nil
}

func groupID(name string) (uint32, error) {
	g, err := user.LookupGroup(name)
	if err != nil {
		return 0, err
	}
	id, err := strconv.ParseUint(g.Gid, 10, 32)
	return uint32(id), err
}

// captureDNS completes the Spec with this container's DNS servers, because the pod's servers are known only here.
func (c *config) captureDNS() error {
	switch {
	case !c.dns:
		if c.allDNS {
			c.warnings = append(c.warnings, "--capture-all-dns does nothing without --redirect-dns")
		}
		return nil
	case c.allDNS:
		c.spec.DNS = redirect.DNSAll
		return nil
	}
	text, err := os.ReadFile(resolvConf)
	if err != nil {
		return fmt.Errorf("reading the DNS servers for --redirect-dns: %w", err)
	}
	c.spec.DNSServers = nameservers(string(text))
	if len(c.spec.DNSServers) == 0 {
		c.warnings = append(c.warnings, fmt.Sprintf("not capturing DNS: %s names no server by address; use --capture-all-dns", resolvConf))
		return nil
	}
	c.spec.DNS = redirect.DNSServers
	return nil
}

// nameservers parses resolv.conf(5). It omits an address with a zone (fe80::1%eth0), which no rule can match.
func nameservers(text string) []netip.Addr {
	var out []netip.Addr
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 2 || f[0] != "nameserver" {
			continue
		}
		if a, err := netip.ParseAddr(f[1]); err == nil && a.Zone() == "" {
			out = append(out, a)
		}
	}
	return out
}
