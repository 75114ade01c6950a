package cniconf

import (
	"bytes"
	"cmp"
	"encoding/json"
	"time"

	"github.com/meshcni/istio-cni/internal/core/redirect"
)

// PluginType is the name of this program in a CNI configuration: the "type" of its stanza and the base name of the binary.
const PluginType = "istio-cni"

// Stanza is the plugin configuration that the node agent writes into the node's CNI configuration. The zero value and the default of a
// field that only this program has leave its key out.
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

// StandaloneVersion is the CNI version of the reference's standalone file.
const StandaloneVersion = "0.3.1"

// members are those of the stanza in the order of the reference's standalone file.
type members struct {
	CNIVersion   string          `json:"cniVersion"`
	Name         string          `json:"name"`
	Type         string          `json:"type"`
	Capabilities map[string]bool `json:"capabilities"`
	IPAM         struct{}        `json:"ipam"`
	DNS          struct{}        `json:"dns"`
	Stanza
	SecondFamily string `json:"second_ip_family,omitempty"`
	APITimeout   string `json:"api_timeout,omitempty"`
}

func (s Stanza) members() members {
	if len(s.EnablementSelectors) == 0 {
		s.EnablementSelectors = json.RawMessage("[]")
	}
	if s.Backend == redirect.Auto {
		s.Backend = ""
	}
	m := members{
		CNIVersion: s.version(), Name: PluginType, Type: PluginType, Capabilities: map[string]bool{PodAnnotations: true}, Stanza: s,
	}
	if s.SecondFamily != redirect.Bypass {
		m.SecondFamily = s.SecondFamily.String()
	}
	if s.APITimeout > 0 && s.APITimeout != DefaultAPITimeout {
		m.APITimeout = s.APITimeout.String()
	}
	return m
}

func (s Stanza) version() string { return cmp.Or(s.CNIVersion, StandaloneVersion) }

// Single is the stanza as a file of its own, for a runtime or a meta plugin that runs it alone.
func (s Stanza) Single() []byte {
	if s.Template == nil {
		return encoded(s.members(), "  ")
	}
	sorted := s.sorted()
	for key, value := range map[string]string{"name": PluginType, "cniVersion": s.version()} {
		if !bytes.HasPrefix(sorted[key], []byte{'"'}) {
			sorted[key] = json.RawMessage(quoted(value))
		}
	}
	return encoded(sorted, "  ")
}

// sorted are the members by key, those of a template with the type that a runtime needs.
func (s Stanza) sorted() map[string]json.RawMessage {
	text := s.Template
	if text == nil {
		text = encoded(s.members(), "")
	}
	sorted := map[string]json.RawMessage{}
	_ = json.Unmarshal(text, &sorted) // an object, as the settings make sure
	sorted["type"] = json.RawMessage(quoted(PluginType))
	return sorted
}

// element are the members as a list has them: without a version, which is the list's.
func (s Stanza) element(indent string) []byte {
	sorted := s.sorted()
	delete(sorted, "cniVersion")
	return encoded(sorted, indent)
}

// Element is the stanza as an element of a list, with sorted keys, as the reference writes it.
func (s Stanza) Element() []byte { return bytes.TrimSpace(s.element("")) }

// DropIn returns the stanza as a file that libcni adds to a network: it has the name and version of the network.
func (s Stanza) DropIn() []byte { return s.element("  ") }

// encoded is a value in JSON with a newline behind it. Values are strings, truth values, lists of strings and JSON text,
// none of which fails to encode.
func encoded(value any, indent string) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", indent)
	_ = e.Encode(value)
	return b.Bytes()
}

func quoted(text string) string { return string(bytes.TrimSpace(encoded(text, ""))) }
