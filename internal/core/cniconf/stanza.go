package cniconf

import (
	"encoding/json"
	"time"

	"github.com/meshcni/istio-cni/internal/core/redirect"
)

// PluginType is the name of this program in a CNI configuration: the "type" of its stanza and the base name of the binary.
const PluginType = "istio-cni"

// Stanza is the plugin configuration that the node agent writes into the node's CNI configuration. The zero value of a field that
// only this program has leaves its key out.
type Stanza struct {
	LogLevel string `json:"plugin_log_level"`
	// RunDir is the run directory as the plugin sees it on the host.
	RunDir         string `json:"cni_agent_run_dir"`
	AmbientEnabled bool   `json:"ambient_enabled"`
	// EnablementSelectors is a JSON list; nil is the empty one.
	EnablementSelectors   json.RawMessage `json:"enablement_selectors"`
	ExcludeNamespaces     []string        `json:"exclude_namespaces"`
	AgentNamespace        string          `json:"pod_namespace"`
	NativeNFTables        bool            `json:"native_nftables"`
	AmbientDetectionRetry bool            `json:"enable_ambient_detection_retry"`

	SecondFamily  redirect.SecondFamily `json:"-"` // second_ip_family; the default leaves it out
	APITimeout    time.Duration         `json:"-"` // api_timeout
	Backend       redirect.Backend      `json:"backend,omitempty"`
	ForceIptables string                `json:"force_iptables_binary,omitempty"`
	// SandboxedRuntimes is nil for the default.
	SandboxedRuntimes []string `json:"sandboxed_runtimes,omitempty"`

	// CNIVersion is that of a file with the stanza alone, "" StandaloneVersion. In a list and beside one it is the list's.
	CNIVersion string `json:"-"`
	// Template, when not nil, is a whole stanza as a JSON object and replaces everything above: an installation of the kind
	// that hands the agent a template (CNI_NETWORK_CONFIG).
	Template json.RawMessage `json:"-"`
}

// NetConf is the stanza as the plugin reads it, so that the agent decides about pods as the plugin does.
func (s Stanza) NetConf() (NetConf, error) { return Parse(s.Element()) }
