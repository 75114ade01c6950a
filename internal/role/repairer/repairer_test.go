package repairer

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/agent/racerepair"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func environment(pairs ...string) func(string) (string, bool) {
	env := map[string]string{"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
	for _, pair := range pairs {
		name, value, _ := strings.Cut(pair, "=")
		env[name] = value
	}
	return func(name string) (string, bool) { v, ok := env[name]; return v, ok }
}

func reference() racerepair.Settings {
	return racerepair.Settings{
		Predicate: repair.Predicate{Annotation: "sidecar.istio.io/status", Container: "istio-validation", ExitCode: 126},
		LabelKey:  "cni.istio.io/uninitialized", LabelValue: "true",
	}
}

// TestLoad_Defaults tests the settings of Istio's command in all their spellings.
func TestLoad_Defaults(t *testing.T) {
	t.Parallel()
	changed := func(change func(*racerepair.Settings)) racerepair.Settings { s := reference(); change(&s); return s }
	for _, test := range []struct {
		name   string
		env    []string
		args   []string
		daemon bool
		want   racerepair.Settings
	}{
		{"nothing given", nil, nil, false, reference()},
		{
			"old variables, with dashes",
			[]string{
				"REPAIR_NODE-NAME=n1", "REPAIR_DELETE-PODS=true", "REPAIR_LABEL-PODS=true", "REPAIR_RUN-AS-DAEMON=true",
				"REPAIR_SIDECAR-ANNOTATION=a/b", "REPAIR_INIT-CONTAINER-NAME=init", "REPAIR_INIT-CONTAINER-TERMINATION-MESSAGE=no way",
				"REPAIR_INIT-CONTAINER-EXIT-CODE=0", "REPAIR_LABEL-SELECTORS=app=x", "REPAIR_FIELD-SELECTORS=metadata.name!=y",
				"REPAIR_BROKEN-POD-LABEL-KEY=k", "REPAIR_BROKEN-POD-LABEL-VALUE=v",
			},
			nil, true,
			racerepair.Settings{
				Node: "n1", Switches: repair.Switches{Delete: true, Label: true}, LabelSelectors: "app=x", FieldSelectors: "metadata.name!=y",
				Predicate: repair.Predicate{Annotation: "a/b", Container: "init", Message: "no way"}, LabelKey: "k", LabelValue: "v",
			},
		},
		{
			"present variables",
			[]string{"REPAIR_NODE_NAME=n1", "REPAIR_REPAIR_PODS=true", "REPAIR_EVICT=true"},
			nil, false,
			changed(func(s *racerepair.Settings) { s.Node, s.Switches.InPlace, s.Evict = "n1", true, true }),
		},
		{
			"a flag wins over a variable",
			[]string{"REPAIR_NODE-NAME=n1", "REPAIR_DELETE-PODS=true"},
			[]string{"--node-name=n2", "--delete-pods=false"},
			false,
			changed(func(s *racerepair.Settings) { s.Node = "n2" }),
		},
		{
			"empty flags match anything", nil,
			[]string{"--sidecar-annotation=", "--init-container-name=", "--init-container-exit-code=0"},
			false,
			changed(func(s *racerepair.Settings) { s.Predicate = repair.Predicate{} }),
		},
		{"empty variables are unset", []string{"REPAIR_SIDECAR-ANNOTATION=", "REPAIR_LABEL_PODS="}, nil, false, reference()},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			cfg, err := load(test.args, environment(test.env...))
			check.OK(t, err)
			if diff := cmp.Diff(test.want, cfg.Repair); diff != "" || cfg.Daemon != test.daemon {
				t.Errorf("daemon %v; (-want +got):\n%s", cfg.Daemon, diff)
			}
		})
	}
}

func TestLoad_Warnings(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		args, env []string
		want      string
		elsewhere bool
	}{
		{[]string{"--repair-pods"}, nil, "--repair-pods without --node-name", false},
		{[]string{"--repair-pods", "--node-name=a"}, []string{"NODE_NAME=b"}, "--node-name a is not this node, b", true},
		{[]string{"--delete-pods", "--node-name=a"}, []string{"NODE_NAME=b"}, "", true},
		{[]string{"--repair-pods", "--node-name=a"}, []string{"KUBERNETES_NODE_NAME=a"}, "", false},
		{[]string{"--repair-pods", "--node-name=a"}, nil, "", false},
	} {
		cfg, err := load(test.args, environment(test.env...))
		check.OK(t, err)
		if got := strings.Join(cfg.Warnings, "\n"); !strings.Contains(got, test.want) || test.want == "" && got != "" || cfg.elsewhere() != test.elsewhere {
			t.Errorf("%q: warnings %q, elsewhere %v", test.args, got, cfg.elsewhere())
		}
	}
}

// TestLoad_AllProblems: package service starts no work after that.
func TestLoad_AllProblems(t *testing.T) {
	t.Parallel()
	_, err := load([]string{"--node-name=Bad"}, environment("REPAIR_EVICT=x"))
	check.Fails(t, err, "REPAIR_EVICT", "--node-name")
}
