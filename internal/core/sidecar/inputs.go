package sidecar

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"unicode"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/redirect"
)

// Keys of annotations (InjectKey is a label, too). All are protocol.
const (
	InjectKey = "sidecar.istio.io/inject"
	StatusKey = "sidecar.istio.io/status"
	ModeKey   = "sidecar.istio.io/interceptionMode"

	OutboundKey             = "traffic.sidecar.istio.io/includeOutboundIPRanges"
	OutboundExcludeKey      = "traffic.sidecar.istio.io/excludeOutboundIPRanges"
	InboundPortsKey         = "traffic.sidecar.istio.io/includeInboundPorts"
	InboundPortsExcludeKey  = "traffic.sidecar.istio.io/excludeInboundPorts"
	OutboundPortsKey        = "traffic.sidecar.istio.io/includeOutboundPorts"
	OutboundPortsExcludeKey = "traffic.sidecar.istio.io/excludeOutboundPorts"
	// Keys of this program: ports and port ranges, which are added to the value of Istio's key with the same name.
	MoreInboundPortsKey         = redirect.OwnPrefix + "includeInboundPorts"
	MoreInboundPortsExcludeKey  = redirect.OwnPrefix + "excludeInboundPorts"
	MoreOutboundPortsKey        = redirect.OwnPrefix + "includeOutboundPorts"
	MoreOutboundPortsExcludeKey = redirect.OwnPrefix + "excludeOutboundPorts"

	ExcludeInterfacesKey = "traffic.sidecar.istio.io/excludeInterfaces"
	RerouteInterfacesKey = "istio.io/reroute-virtual-interfaces"
	// KubevirtInterfacesKey is the old name of RerouteInterfacesKey. It is read only if RerouteInterfacesKey is absent.
	KubevirtInterfacesKey = "traffic.sidecar.istio.io/kubevirtInterfaces"

	disableEnvoy = "DISABLE_ENVOY"
)

// Names of containers that decisions depend on.
const (
	initContainer = "istio-init"
	// ProxyContainer is the sidecar.
	ProxyContainer = "istio-proxy"
	// ValidationContainer is the init container that checks whether the traffic is redirected.
	ValidationContainer = "istio-validation"
)

// kind is the part of a pod that has an input.
type kind uint8

const (
	label      kind = iota
	annotation      // that a rule of this package reads
	setting         // an annotation that is a field of the Spec
	variable        // of the proxy's environment
	container       // by its name
	field           // of the pod's spec, or of what the agent derives
)

// input is a value of a pod that a decision reads.
type input struct {
	kind kind
	key  string
	// since is the first version of the facts (see [FactsVersion]) in which agents deliver it.
	since int
	// field is the field that a setting sets. If two keys set one field, the earlier row wins.
	field redirect.Field
	// enable changes the Spec if a boolean variable of the proxy is true; nil if a rule reads the variable.
	enable func(*redirect.Spec)
}

// inputs has all inputs: agents drop other keys, so no rule may read them. A new row has the next version.
var inputs = []input{ //nolint:gochecknoglobals // a constant table
	{kind: label, key: InjectKey, since: 1},
	{kind: annotation, key: InjectKey, since: 1},
	{kind: annotation, key: StatusKey, since: 1},
	{kind: container, key: initContainer, since: 1},
	{kind: container, key: ProxyContainer, since: 1},
	{kind: container, key: ValidationContainer, since: 1},
	{kind: field, key: "runtimeClassName", since: 3},
	{kind: field, key: "selected", since: 4},
	{kind: annotation, key: ambient.BypassInboundKey, since: 4},
	{kind: annotation, key: ambient.DNSCaptureKey, since: 4},
	{kind: setting, key: ModeKey, since: 1, field: redirect.FieldMode},
	{kind: setting, key: OutboundKey, since: 1, field: redirect.FieldOutbound},
	{kind: setting, key: OutboundExcludeKey, since: 1, field: redirect.FieldOutboundExclude},
	{kind: setting, key: InboundPortsKey, since: 1, field: redirect.FieldInbound},
	{kind: setting, key: InboundPortsExcludeKey, since: 1, field: redirect.FieldInboundExclude},
	{kind: setting, key: OutboundPortsKey, since: 1, field: redirect.FieldOutboundPorts},
	{kind: setting, key: OutboundPortsExcludeKey, since: 1, field: redirect.FieldOutboundPortsExclude},
	{kind: setting, key: MoreInboundPortsKey, since: 2, field: redirect.FieldMoreInbound},
	{kind: setting, key: MoreInboundPortsExcludeKey, since: 2, field: redirect.FieldMoreInboundExclude},
	{kind: setting, key: MoreOutboundPortsKey, since: 2, field: redirect.FieldMoreOutboundPorts},
	{kind: setting, key: MoreOutboundPortsExcludeKey, since: 2, field: redirect.FieldMoreOutboundPortsExclude},
	{kind: setting, key: ExcludeInterfacesKey, since: 1, field: redirect.FieldExcludeInterfaces},
	{kind: setting, key: RerouteInterfacesKey, since: 1, field: redirect.FieldRerouteInterfaces},
	{kind: setting, key: KubevirtInterfacesKey, since: 1, field: redirect.FieldRerouteInterfaces},
	{kind: variable, key: disableEnvoy, since: 1},
	{kind: variable, key: "ISTIO_META_DNS_CAPTURE", since: 1, enable: func(s *redirect.Spec) { s.DNS = redirect.DNSAll }},
	{kind: variable, key: "ISTIO_DUAL_STACK", since: 1, enable: func(s *redirect.Spec) { s.DualStack = true }},
	{kind: variable, key: "INVALID_DROP", since: 1, enable: func(s *redirect.Spec) { s.DropInvalid = true }},
}

// FactsVersion is the version of the facts that decisions need: the highest of all inputs. An agent with a lower version
// does not deliver all of them. A new field of [Facts] needs a row as well.
func FactsVersion() int {
	version := 0
	for _, in := range inputs {
		version = max(version, in.since)
	}
	return version
}

// OfTheMesh reports whether the injector adds a container: the proxy, or an init container of the redirection.
func OfTheMesh(container string, init bool) bool {
	return container == ProxyContainer || init && (container == initContainer || container == ValidationContainer)
}

// KeyOf returns the annotation that sets a field, or "".
func KeyOf(field redirect.Field) string {
	if i := slices.IndexFunc(inputs, func(in input) bool { return in.kind == setting && in.field == field }); i >= 0 {
		return inputs[i].key
	}
	return ""
}

// KeysOf returns a function like KeyOf that prefers the annotations that set the field in the Spec.
func KeysOf(s redirect.Spec) func(redirect.Field) string {
	return func(field redirect.Field) string { return cmp.Or(s.Annotations[field], KeyOf(field)) }
}

// added maps the fields of this program's annotations to the fields they add to.
var added = map[redirect.Field]redirect.Field{ //nolint:gochecknoglobals // a constant table
	redirect.FieldMoreInbound: redirect.FieldInbound, redirect.FieldMoreInboundExclude: redirect.FieldInboundExclude,
	redirect.FieldMoreOutboundPorts: redirect.FieldOutboundPorts, redirect.FieldMoreOutboundPortsExclude: redirect.FieldOutboundPortsExclude,
}

// reads reports whether some rule reads an input.
func reads(of kind, key string) bool {
	return slices.ContainsFunc(inputs, func(in input) bool { return in.kind == of && in.key == key })
}

// Trim returns facts with the same decision, without the parts that no rule reads but with the annotations and labels of
// the keys besides. It does not change f, and the result does not hold the dropped parts in memory.
func (f Facts) Trim(besides ...string) Facts {
	trimmed := f
	trimmed.Labels = only(f.Labels, besides, label)
	trimmed.Annotations = only(f.Annotations, besides, annotation, setting)
	if text, injected := trimmed.Annotations[StatusKey]; injected { // decisions read only its presence; the revision is shown
		trimmed.Annotations[StatusKey] = ""
		if revision := Revision(text); revision != "" {
			trimmed.Annotations[StatusKey] = fmt.Sprintf(`{"revision":%q}`, revision)
		}
	}
	trimmed.Containers = nil
	for _, c := range f.Containers {
		switch {
		case c.Name == ProxyContainer:
			c.Args = slices.Clone(c.Args[:min(2, len(c.Args))])
			c.Env = slices.Clip(slices.DeleteFunc(slices.Clone(c.Env), func(e EnvVar) bool { return !reads(variable, e.Name) }))
			trimmed.Containers = append(trimmed.Containers, c)
		case reads(container, c.Name):
			trimmed.Containers = append(trimmed.Containers, Container{Name: c.Name, Init: c.Init})
		}
	}
	return trimmed
}

// Revision returns the revision of istiod from the value of the annotation StatusKey, "" if it has none or is not a valid label
// value.
func Revision(status string) string {
	var s struct {
		Revision string `json:"revision"`
	}
	const longest = 63
	odd := func(r rune) bool {
		return !strings.ContainsRune("-_.", r) && (r > 'z' || !unicode.IsLetter(r) && !unicode.IsDigit(r))
	}
	if json.Unmarshal([]byte(status), &s) != nil || len(s.Revision) > longest || strings.ContainsFunc(s.Revision, odd) {
		return ""
	}
	return s.Revision
}

// only returns the entries that some rule reads and those with the keys besides; nil without any.
func only(all map[string]string, besides []string, kinds ...kind) map[string]string {
	var some map[string]string // a new map: a Go map keeps its size when keys are deleted
	for key, text := range all {
		if slices.Contains(besides, key) || slices.ContainsFunc(kinds, func(of kind) bool { return reads(of, key) }) {
			if some == nil {
				some = map[string]string{}
			}
			some[key] = text
		}
	}
	return some
}
