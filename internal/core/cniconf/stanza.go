package cniconf

import (
	"bytes"
	"cmp"
	"encoding/json"
	"time"

	"github.com/meshcni/istio-cni/internal/core/redirect"
)

// PluginType is this program's name in a CNI configuration: the "type" of its stanza and the base name of the binary.
const PluginType = "istio-cni"

// Stanza is the plugin configuration that the node agent writes into the node's CNI configuration. If a field that the reference
// lacks has its zero value or default, the key is omitted.
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

	// CNIVersion is for a file with only the stanza; "" is StandaloneVersion. Elsewhere the list's version applies.
	CNIVersion string `json:"-"`
	// Template, if not nil, is a whole stanza as a JSON object and replaces all fields above: older installations pass the
	// agent a template (CNI_NETWORK_CONFIG).
	Template json.RawMessage `json:"-"`
}

// NetConf returns the stanza as the plugin reads it, so that the agent decides about pods as the plugin does.
func (s Stanza) NetConf() (NetConf, error) { return Parse(s.Element()) }

// StandaloneVersion is the CNI version of the reference's standalone file.
const StandaloneVersion = "0.3.1"

// members are the keys of the stanza in the order of the reference's standalone file.
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

// Single returns a file with only the stanza, for a runtime or a meta plugin that runs it alone.
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

// sorted returns the members by key, and adds to a template the type that a runtime needs.
func (s Stanza) sorted() map[string]json.RawMessage {
	text := s.Template
	if text == nil {
		text = encoded(s.members(), "")
	}
	sorted := map[string]json.RawMessage{}
	_ = json.Unmarshal(text, &sorted) // the settings ensure that it is an object
	sorted["type"] = json.RawMessage(quoted(PluginType))
	return sorted
}

// element returns the members as an element of a list, without a version: the list has it.
func (s Stanza) element(indent string) []byte {
	sorted := s.sorted()
	delete(sorted, "cniVersion")
	return encoded(sorted, indent)
}

// Element returns the stanza as an element of a list, with sorted keys, as the reference writes it.
func (s Stanza) Element() []byte { return bytes.TrimSpace(s.element("")) }

// DropIn returns the stanza as a file that libcni adds to a network: it has the name and version of the network.
func (s Stanza) DropIn() []byte { return s.element("  ") }

// encoded returns a value as JSON with a newline. Values are strings, booleans, lists of strings and JSON text, so
// encoding never fails.
func encoded(value any, indent string) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", indent)
	_ = e.Encode(value)
	return b.Bytes()
}

func quoted(text string) string { return string(bytes.TrimSpace(encoded(text, ""))) }
