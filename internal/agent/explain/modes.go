package explain

import (
	"fmt"
	"maps"
	"slices"

	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// The label and its value by which the chart's selectors put a pod, or the pods of a namespace, into ambient mode.
const modeKey, modeAmbient = "istio.io/dataplane-mode", "ambient"

// modes says what would put the pod into the modes of the mesh that it is not in. It is nil for a pod that no label puts into any.
func modes(d sidecar.Decision, f sidecar.Facts, conf cniconf.NetConf) *document.Modes {
	if slices.Contains([]sidecar.Reason{sidecar.NotKubernetes, sidecar.ExcludedNamespace, sidecar.OwnAgent, sidecar.HostNetwork}, d.Reason) {
		return nil
	}
	m := &document.Modes{}
	if d.Outcome == sidecar.Pass || d.Outcome.OfSidecar() && conf.AmbientEnabled {
		m.Ambient = toAmbient(f, conf)
	}
	if !d.Outcome.OfSidecar() {
		m.Sidecar = "label its namespace istio-injection=enabled, or the pod sidecar.istio.io/inject=true (revisions: istio.io/rev=REVISION), and restart the pod"
	}
	return m
}

// toAmbient says which labels the enablement selectors of this node want.
func toAmbient(f sidecar.Facts, conf cniconf.NetConf) string {
	selectors, err := selector.ParseAmbient(conf.EnablementSelectors)
	if !conf.AmbientEnabled || err != nil {
		return "not on this node: its agent does not serve ambient mode (ambient.enabled)"
	}
	with := func(value string) map[string]string {
		labels := map[string]string{}
		maps.Copy(labels, f.Labels)
		if labels[modeKey] = value; value == "" {
			delete(labels, modeKey)
		}
		return labels
	}
	namespace, label := map[string]string{modeKey: modeAmbient}, modeKey+"="+modeAmbient
	byPod, byNamespace := selectors.Select(with(modeAmbient), nil), selectors.Select(f.Labels, namespace)
	text := fmt.Sprintf("labels that its selectors want (ambient.enablementSelectors): %s", conf.EnablementSelectors)
	switch {
	case f.Selected:
		text = "it is selected already"
	case byPod && byNamespace:
		text = "label the pod or its namespace " + label
	case byPod && selectors.Select(with(""), namespace):
		text = fmt.Sprintf("label the pod %s; its label %s=%s outweighs its namespace's", label, modeKey, f.Labels[modeKey])
	case byPod:
		text = "label the pod " + label
	case byNamespace:
		text = "label its namespace " + label
	}
	if f.Eligible() {
		return text + "; the agent enrols the running pod"
	}
	return text + "; then end the injection (remove istio-injection or istio.io/rev of the namespace, sidecar.istio.io/inject of the pod), and restart the pod: " +
		"a pod with a sidecar is never enrolled"
}
