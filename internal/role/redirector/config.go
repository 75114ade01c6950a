package redirector

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/node/iptables"
)

// config is all that a run depends on, read once.
type config struct {
	spec redirect.Spec

	netns         string
	forceIptables iptables.Variant
	path          string // of programs
	dryRunFile    string

	probePort    uint16
	probeTimeout time.Duration

	dryRun, explain, verify, reconcile, cleanup, force, skip, validate bool
	backend                                                            redirect.Backend
	dns, allDNS, dropInvalid, dualStack, cniMode, native               bool

	warnings []string
}

// Defaults of the validation.
const (
	defaultProbePort    = "15002"
	defaultProbeTimeout = "5s"
	longestProbe        = time.Hour
)

// resolvConf names the servers whose DNS is captured.
const resolvConf = "/etc/resolv.conf"

// source reads values: a flag that was given, else the environment.
type source struct {
	*cli.Context
	getenv func(string) (string, bool)
}

// value gives the text of a setting and where it stands. An empty variable counts as unset unless keepEmpty.
func (s source) value(flag string, env []string, keepEmpty bool) (redirect.Value, bool) {
	if flag != "" && s.IsSet(flag) {
		return redirect.Value{Source: "flag --" + flag, Text: s.String(flag)}, true
	}
	for _, name := range slices.Backward(env) {
		if text, set := s.getenv(name); set && (text != "" || keepEmpty) {
			return redirect.Value{Source: "environment variable " + name, Text: text}, true
		}
	}
	return redirect.Value{}, false
}

// commandDefaults is the Spec of a command without flags: unlike a pod's it captures no ports and no addresses.
func commandDefaults() redirect.Spec {
	s := redirect.Default()
	s.Inbound, s.InboundExclude = redirect.Ports{}, nil
	s.Outbound, s.OutboundPortsExclude = redirect.Networks{}, nil
	return s
}

// read makes the configuration. All problems are reported together.
func read(s source) (config, error) {
	c := config{path: s.text("PATH"), dryRunFile: s.text("DRY_RUN_FILE_PATH")}
	var errs []error
	for _, t := range toggles() {
		on, err := s.toggle(t)
		errs = append(errs, err)
		*t.into(&c) = on
	}
	values := redirect.Values{}
	for _, set := range append(settings(), envOnly()...) {
		keepEmpty := set.field == redirect.FieldOwnerGroups
		if v, ok := s.value(set.flag, set.env, keepEmpty); ok && (v.Text != "" || keepEmpty) {
			values[set.field] = v
		}
	}
	s.identities(values)
	spec, err := redirect.Parse(commandDefaults(), values, redirect.Dialect{GroupID: groupID})
	errs = append(errs, err, s.others(&c))
	spec.DropInvalid, spec.DualStack = c.dropInvalid, c.dualStack
	c.spec = spec
	errs = append(errs, c.captureDNS())
	return c, errors.Join(errs...)
}

func (s source) text(env string) string {
	v, _ := s.getenv(env)
	return v
}

func (s source) toggle(t toggle) (bool, error) {
	if s.IsSet(t.flag) {
		return s.Bool(t.flag), nil
	}
	v, set := s.value("", t.env, false)
	if !set {
		return false, nil
	}
	on, err := strconv.ParseBool(v.Text)
	if err != nil {
		return false, fmt.Errorf("%s: value %q: want true or false", v.Source, v.Text)
	}
	return on, nil
}

// identities completes the proxy's ids: uids default to the proxy's user, gids to what the uids are.
func (s source) identities(values redirect.Values) {
	uids, set := values[redirect.FieldUIDs]
	if !set {
		name := s.text("ENVOY_USER")
		if name == "" {
			name = "istio-proxy"
		}
		uids = redirect.Value{Source: "default", Text: strconv.Itoa(redirect.DefaultID)}
		if u, err := user.Lookup(name); err == nil {
			uids = redirect.Value{Source: fmt.Sprintf("user %q", name), Text: u.Uid}
		}
		values[redirect.FieldUIDs] = uids
	}
	if _, set := values[redirect.FieldGIDs]; !set {
		values[redirect.FieldGIDs] = uids
	}
}

func groupID(name string) (uint32, error) {
	g, err := user.LookupGroup(name)
	if err != nil {
		return 0, err
	}
	id, err := strconv.ParseUint(g.Gid, 10, 32)
	return uint32(id), err
}

// others reads what does not belong to the Spec.
func (s source) others(c *config) error {
	var errs []error
	one := func(flag, env, def string, parse func(string) error) {
		v, set := s.value(flag, []string{env}, false)
		if !set || v.Text == "" {
			v = redirect.Value{Source: "default", Text: def}
		}
		if err := parse(v.Text); err != nil {
			errs = append(errs, fmt.Errorf("%s: value %q: %w", v.Source, v.Text, err))
		}
	}
	one("iptables-probe-port", "IPTABLES_PROBE_PORT", defaultProbePort, func(text string) error {
		n, err := strconv.ParseUint(text, 10, 16)
		if err != nil || n == 0 {
			return errors.New("is not a port: want a decimal number from 1 to 65535")
		}
		c.probePort = uint16(n)
		return nil
	})
	one("probe-timeout", "PROBE_TIMEOUT", defaultProbeTimeout, func(text string) error {
		d, err := time.ParseDuration(text)
		if err != nil || d <= 0 || d > longestProbe {
			return fmt.Errorf("want a duration like 5s, longer than 0 and at most %s", longestProbe)
		}
		c.probeTimeout = d
		return nil
	})
	one("force-iptables-binary", "FORCE_IPTABLES_BINARY", "", func(text string) (err error) {
		c.forceIptables, err = iptables.ParseVariant(text)
		return err
	})
	one("backend", "CNI_BACKEND", "auto", func(text string) (err error) {
		c.backend, err = redirect.ParseBackend(text)
		return err
	})
	one("network-namespace", "NETWORK_NAMESPACE", "", func(text string) error {
		c.netns = text
		return nil
	})
	chosen, err := redirect.ChooseBackend(c.backend, c.native, string(c.forceIptables))
	if err != nil {
		errs = append(errs, fmt.Errorf("--backend, --native-nftables and --force-iptables-binary: %w", err))
	}
	c.backend = chosen
	return errors.Join(errs...)
}

// captureDNS completes the Spec: the servers are those of this container, as nobody else knows the pod's.
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

// nameservers reads resolv.conf(5). What is no plain address is left out: one with a zone (fe80::1%eth0) cannot be
// matched by a rule.
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
