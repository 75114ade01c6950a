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
	LogLevel       string // plugin_log_level
	RunDir         string // cni_agent_run_dir, as the plugin sees it on the host
	AgentNamespace string // pod_namespace

	ExcludeNamespaces []string

	AmbientEnabled        bool
	AmbientDetectionRetry bool            // enable_ambient_detection_retry
	EnablementSelectors   json.RawMessage // a JSON list; nil for none

	NativeNFTables bool

	SecondFamily  redirect.SecondFamily // second_ip_family; left out when it is the default
	APITimeout    time.Duration         // api_timeout; 0 leaves it out
	Backend       redirect.Backend      // backend; redirect.Auto leaves it out
	ForceIptables string                // force_iptables_binary; "" leaves it out

	// Template, when not nil, is a whole stanza as a JSON object and replaces everything above: an installation of the kind
	// that hands the agent a template (CNI_NETWORK_CONFIG).
	Template json.RawMessage
}

// NetConf is the stanza as the plugin reads it, so that the agent decides about pods as the plugin does.
func (s Stanza) NetConf() (NetConf, error) { return Parse(s.Element()) }
