package racerepair

import (
	"strconv"

	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
)

// Settings are the user's settings of race repair.
type Settings struct {
	Switches repair.Switches
	// Evict deletes pods by eviction, which respects a PodDisruptionBudget.
	Evict     bool
	Predicate repair.Predicate
	// LabelKey and LabelValue are the label for broken pods.
	LabelKey, LabelValue string
	// Node is the node whose pods are repaired; "" is every node.
	Node string
	// LabelSelectors and FieldSelectors select pods in the API server.
	LabelSelectors, FieldSelectors string
}

// Rows returns the settings, without variables, that the agent and the command "repair" share. Names and defaults are the
// reference's, except evict.
func Rows(s *Settings) []settings.Setting {
	labelKey := func(text string) error { return selector.CheckLabel(text, "") }
	labelValue := func(text string) error { return selector.CheckLabel("key", text) }
	optional := func(into *string, check func(string) error) settings.Value {
		return settings.Text(into, settings.Optional(settings.Check(check)))
	}
	const maxExitCode = 255
	return []settings.Setting{
		{
			Name: "repair-pods", Default: "false", Use: "redirect them in place, which works on the pod's own node",
			Value: settings.Bool(&s.Switches.InPlace),
		},
		{
			Name: "delete-pods", Default: "false", Use: "delete them, unless redirecting in place is switched on and can help",
			Value: settings.Bool(&s.Switches.Delete),
		},
		{
			Name: "label-pods", Default: "false", Use: "label them, unless one of the others is switched on and can help",
			Value: settings.Bool(&s.Switches.Label),
		},
		{Name: "evict", Default: "false", Use: "delete by eviction, which respects a PodDisruptionBudget", Value: settings.Bool(&s.Evict)},
		{
			Name: "broken-pod-label-key", Arg: "KEY", Default: repair.BrokenLabel, Use: "key of that label",
			Value: settings.Checked(&s.LabelKey, labelKey),
		},
		{
			Name: "broken-pod-label-value", Arg: "VALUE", Default: repair.BrokenLabelValue, Use: "value of that label",
			Value: settings.Checked(&s.LabelValue, labelValue),
		},
		{Name: "node-name", Arg: "NAME", Use: "only pods of this node", Value: optional(&s.Node, selector.CheckName)},
		{
			Name: "sidecar-annotation", Arg: "KEY", Chart: true, Default: sidecar.StatusKey, Use: "only pods with this annotation; an empty flag: all",
			Value: optional(&s.Predicate.Annotation, labelKey),
		},
		{
			Name: "init-container-name", Arg: "NAME", Default: sidecar.ValidationContainer, Use: "only this init container; an empty flag: all",
			Value: optional(&s.Predicate.Container, selector.CheckName),
		},
		{
			Name: "init-container-termination-message", Arg: "TEXT", Chart: true, Use: "only with this termination message",
			Value: settings.Text(&s.Predicate.Message, nil),
		},
		{
			Name: "init-container-exit-code", Arg: "CODE", Chart: true, Default: strconv.Itoa(repair.NotRedirectedCode), Use: "only with this exit code; 0: any",
			Value: settings.Number(&s.Predicate.ExitCode, maxExitCode),
		},
		{Name: "label-selectors", Arg: "SELECTOR", Chart: true, Use: "only pods with these labels", Value: optional(&s.LabelSelectors, selector.Check)},
		{
			Name: "field-selectors", Arg: "SELECTOR", Chart: true, Use: "only pods with these fields",
			Value: settings.Checked(&s.FieldSelectors, checkFields),
		},
	}
}

// pods returns the selector of the settings.
func (s *Settings) pods() (selector.Pods, error) {
	return selector.ForPods(s.LabelSelectors, s.FieldSelectors, new(kube.Pod).Fields())
}

// checkFields checks that a field selector is valid and uses only fields that pods can be selected by.
func checkFields(text string) error {
	_, err := (&Settings{FieldSelectors: text}).pods()
	return err
}

// Keeps returns the keys of annotations and labels that race repair reads in addition to the plugin's keys, for podcache.Trim.
func (s *Settings) Keeps() []string {
	keys := []string{s.LabelKey, s.Predicate.Annotation}
	if pods, err := s.pods(); err == nil { // otherwise nothing is repaired
		keys = append(keys, pods.Keys()...)
	}
	return keys
}
