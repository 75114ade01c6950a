package podwork

import (
	"path"
	"strings"

	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
)

// PathRows returns the settings of the directories with pods' namespaces; each variable is named after its flag.
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
		{
			Name: "sandboxed-runtimes", Arg: "PATTERNS",
			Use: "comma list of patterns of RuntimeClasses whose pods have a network stack of their own; by default " +
				strings.Join(cniconf.SandboxedRuntimes(), ","),
			Value: settings.List(&stanza.SandboxedRuntimes, ",", 0, func(pattern string) (string, error) {
				_, err := path.Match(pattern, "")
				return pattern, err
			}),
		},
		{Name: "native-nftables", Default: "false", Use: "same as --backend=native", Value: settings.Bool(&stanza.NativeNFTables)},
		{
			Name: "backend", Arg: "WAY", Env: []string{"CNI_BACKEND"}, Default: string(redirect.Auto),
			Use: "how rules get into a pod: auto, netlink (the rules of iptables-nft, without a process), native (tables of nftables' own) " +
				"or iptables (the programs of the host)",
			Value: settings.Of(&stanza.Backend, redirect.ParseBackend, func(b redirect.Backend) string { return string(b) }),
		},
		{
			Name: "force-iptables-binary", Arg: "VARIANT", Use: "legacy or nft, instead of detecting it; pods of ambient mode need neither",
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
