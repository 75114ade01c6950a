package cniconf

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/redirect"
)

// standaloneVersion is the CNI version of the reference's standalone file.
const standaloneVersion = "0.3.1"

// key is a member of the stanza and what stands there.
type key struct {
	name  string
	value any
}

// keys are those of the stanza, in the order of the reference's standalone file.
func (s Stanza) keys() []key {
	selectors := s.EnablementSelectors
	if len(selectors) == 0 {
		selectors = json.RawMessage("[]")
	}
	out := []key{
		{"name", PluginType},
		{"type", PluginType},
		{"capabilities", map[string]bool{PodAnnotations: true}},
		{"ipam", struct{}{}},
		{"dns", struct{}{}},
		{"plugin_log_level", s.LogLevel},
		{"cni_agent_run_dir", s.RunDir},
		{"ambient_enabled", s.AmbientEnabled},
		{"enablement_selectors", selectors},
		{"exclude_namespaces", s.ExcludeNamespaces},
		{"pod_namespace", s.AgentNamespace},
		{"native_nftables", s.NativeNFTables},
		{"enable_ambient_detection_retry", s.AmbientDetectionRetry},
	}
	if s.SecondFamily != redirect.Bypass {
		out = append(out, key{"second_ip_family", s.SecondFamily.String()})
	}
	if s.APITimeout > 0 {
		out = append(out, key{"api_timeout", s.APITimeout.String()})
	}
	if s.Backend != "" && s.Backend != redirect.Auto {
		out = append(out, key{"backend", string(s.Backend)})
	}
	if s.ForceIptables != "" {
		out = append(out, key{"force_iptables_binary", s.ForceIptables})
	}
	return out
}

// Element is the stanza as an element of a list: without a version, as the list has it, and with sorted keys, as the
// reference writes it.
func (s Stanza) Element() []byte {
	if s.Template != nil {
		return s.template()
	}
	keys := s.keys()
	slices.SortFunc(keys, func(a, b key) int { return strings.Compare(a.name, b.name) })
	return printed(keys)
}

// template is the element of a template: its keys less the version, named and typed as the runtime must find it.
func (s Stanza) template() []byte {
	members := map[string]json.RawMessage{}
	if json.Unmarshal(s.Template, &members) != nil {
		return s.Template
	}
	delete(members, "cniVersion")
	members["type"] = json.RawMessage(quoted(PluginType))
	keys := make([]key, 0, len(members))
	for _, name := range slices.Sorted(maps.Keys(members)) {
		keys = append(keys, key{name, members[name]})
	}
	return printed(keys)
}

// Single is the stanza as a file of its own, for a runtime or a meta plugin that runs it alone.
func (s Stanza) Single() []byte {
	keys := []key{{"cniVersion", standaloneVersion}}
	if s.Template == nil {
		keys = append(keys, s.keys()...)
		return indentedObject(keys)
	}
	members := map[string]json.RawMessage{}
	if json.Unmarshal(s.Template, &members) != nil {
		return s.Template
	}
	if version, there := members["cniVersion"]; there && isString(version) {
		keys[0].value = version
	}
	delete(members, "cniVersion")
	members["type"] = json.RawMessage(quoted(PluginType))
	if _, there := members["name"]; !there {
		members["name"] = json.RawMessage(quoted(PluginType))
	}
	for _, name := range slices.Sorted(maps.Keys(members)) {
		keys = append(keys, key{name, members[name]})
	}
	return indentedObject(keys)
}

// DropIn is the stanza as a file that libcni adds to a network: name and version come from the network.
func (s Stanza) DropIn() []byte {
	var b bytes.Buffer
	if json.Indent(&b, s.Element(), "", "  ") != nil {
		return s.Element()
	}
	b.WriteByte('\n')
	return b.Bytes()
}

// list is a list that runs the stanza alone, which is what a standalone file must hold if its name asks for a list.
func (s Stanza) list() []byte {
	list, err := Convert(s.Single())
	if err != nil {
		return s.Single()
	}
	return list
}

func indentedObject(keys []key) []byte {
	var b bytes.Buffer
	if json.Indent(&b, printed(keys), "", "  ") != nil {
		return printed(keys)
	}
	b.WriteByte('\n')
	return b.Bytes()
}

// printed prints an object in the order of its keys. Values are strings, truth values, lists of strings and JSON text,
// none of which fails to encode.
func printed(keys []key) []byte {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, k := range keys {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(quoted(k.name))
		b.WriteByte(':')
		e := json.NewEncoder(&b)
		e.SetEscapeHTML(false)
		if e.Encode(k.value) != nil {
			b.WriteString("null")
		}
	}
	b.WriteByte('}')
	var out bytes.Buffer
	if json.Compact(&out, b.Bytes()) != nil {
		return b.Bytes()
	}
	return out.Bytes()
}
