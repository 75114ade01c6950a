package podrepair

import (
	"errors"
	"log/slog"
	"strconv"

	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// Settings are what a person decides about race repair.
type Settings struct {
	Switches repair.Switches
	// Evict deletes by eviction, which a PodDisruptionBudget can stand against.
	Evict     bool
	Predicate repair.Predicate
	// LabelKey and LabelValue are the mark of mode label.
	LabelKey, LabelValue string
	// Node is the node whose pods are looked after; "" is every node.
	Node string
	// LabelSelectors and FieldSelectors pick pods, on the API server's side.
	LabelSelectors, FieldSelectors string
}

// LogValue is what is looked for, and what is done about it.
func (s Settings) LogValue() slog.Value {
	var modes []string
	for _, mode := range s.Switches.Modes() {
		modes = append(modes, string(mode))
	}
	return slog.GroupValue(slog.Any("modes", modes), slog.Bool("evict", s.Evict), slog.String("node", s.Node),
		slog.String("label-selectors", s.LabelSelectors), slog.String("field-selectors", s.FieldSelectors))
}

// Row is one setting, as the agent and the command "repair" have it, under a prefix or without one.
type Row struct {
	// Name has dashes, as a flag; Arg is what it takes, "" for a switch.
	Name, Arg, Default, Use string
	// Set reads a text; its error says what is wanted. Show spells what is in force.
	Set  func(*Settings, string) error
	Show func(*Settings) string
}

// Rows are all settings with the reference's names and defaults. Evict is ours.
func Rows() []Row { return append(actionRows(), podRows()...) }

func actionRows() []Row {
	return []Row{
		flag("repair-pods", "redirect them in place, which works on the pod's own node", func(s *Settings) *bool { return &s.Switches.InPlace }),
		flag("delete-pods", "delete them, unless redirecting in place is switched on and can help",
			func(s *Settings) *bool { return &s.Switches.Delete }),
		flag("label-pods", "label them, unless one of the others is switched on and can help",
			func(s *Settings) *bool { return &s.Switches.Label }),
		flag("evict", "delete by eviction, which heeds a PodDisruptionBudget", func(s *Settings) *bool { return &s.Evict }),
		word("broken-pod-label-key", "KEY", repair.BrokenLabel, "key of that label",
			func(s *Settings) *string { return &s.LabelKey }, labelKey),
		word("broken-pod-label-value", "VALUE", repair.BrokenLabelValue, "value of that label",
			func(s *Settings) *string { return &s.LabelValue }, labelValue),
	}
}

func podRows() []Row {
	return []Row{
		word("node-name", "NAME", "", "only pods of this node", func(s *Settings) *string { return &s.Node }, optional(selector.CheckName)),
		word("sidecar-annotation", "KEY", sidecar.StatusKey, "only pods with this annotation; an empty flag: all",
			func(s *Settings) *string { return &s.Predicate.Annotation }, optional(labelKey)),
		word("init-container-name", "NAME", sidecar.ValidationContainer, "only this init container; an empty flag: all",
			func(s *Settings) *string { return &s.Predicate.Container }, optional(selector.CheckName)),
		word("init-container-termination-message", "TEXT", "", "only with this termination message",
			func(s *Settings) *string { return &s.Predicate.Message }, func(string) error { return nil }),
		{
			Name: "init-container-exit-code", Arg: "CODE", Default: strconv.Itoa(repair.NotRedirectedCode), Use: "only with this exit code; 0: any",
			Set: func(s *Settings, text string) error {
				n, err := strconv.ParseUint(text, 10, 8)
				if err != nil {
					return errors.New("want an exit code from 0 to 255")
				}
				s.Predicate.ExitCode = int(n)
				return nil
			},
			Show: func(s *Settings) string { return strconv.Itoa(s.Predicate.ExitCode) },
		},
		word("label-selectors", "SELECTOR", "", "only pods with these labels",
			func(s *Settings) *string { return &s.LabelSelectors }, optional(selector.Check)),
		word("field-selectors", "SELECTOR", "", "only pods with these fields",
			func(s *Settings) *string { return &s.FieldSelectors }, selector.CheckFields),
	}
}

func flag(name, use string, of func(*Settings) *bool) Row {
	return Row{
		Name: name, Default: "false", Use: use,
		Set: func(s *Settings, text string) error {
			on, err := strconv.ParseBool(text)
			if err != nil {
				return errors.New("want true or false")
			}
			*of(s) = on
			return nil
		},
		Show: func(s *Settings) string { return strconv.FormatBool(*of(s)) },
	}
}

func word(name, arg, by, use string, of func(*Settings) *string, check func(string) error) Row {
	return Row{
		Name: name, Arg: arg, Default: by, Use: use,
		Set: func(s *Settings, text string) error {
			if err := check(text); err != nil {
				return err
			}
			*of(s) = text
			return nil
		},
		Show: func(s *Settings) string { return *of(s) },
	}
}

func optional(check func(string) error) func(string) error {
	return func(text string) error {
		if text == "" {
			return nil
		}
		return check(text)
	}
}

func labelKey(text string) error   { return selector.CheckLabel(text, "") }
func labelValue(text string) error { return selector.CheckLabel("key", text) }
