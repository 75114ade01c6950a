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

	dryRun, explain, verify, reconcile, cleanup, force, skip, validate bool
	backend                                                            redirect.Backend
	dns, allDNS, dropInvalid, dualStack, cniMode, native               bool

	warnings []string
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
	return c, errors.Join(err, specErr, backendErr, c.captureDNS())
}

func groupID(name string) (uint32, error) {
	g, err := user.LookupGroup(name)
	if err != nil {
		return 0, err
	}
	id, err := strconv.ParseUint(g.Gid, 10, 32)
	return uint32(id), err
}

// captureDNS completes the Spec by the DNS servers of this container, as the pod's servers are not known elsewhere.
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
