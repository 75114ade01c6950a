package doctor

import (
	"bytes"
	"os"
	"slices"
	"strings"
	"testing"
	"text/template"
	"time"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/agent/racerepair"
	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/repair"
)

// TestRights_ThoseOfTheAgent compares the reviewed rights with e2e/rights/agent.yaml, to which the agent's requests and the
// chart are held.
func TestRights_ThoseOfTheAgent(t *testing.T) {
	t.Parallel()
	const minutes = 5 * time.Minute
	for name, tc := range map[string]struct {
		granted  map[string]bool
		features features
	}{
		"installation":  {map[string]bool{}, features{}},
		"live":          {map[string]bool{"Live": true}, features{configMap: "istio-cni-config"}},
		"repair":        {map[string]bool{"Repair": true}, features{repairEnabled: true}},
		"delete":        {map[string]bool{"Repair": true, "Delete": true}, features{repairEnabled: true, repair: racerepair.Settings{Switches: repair.Switches{Delete: true, Label: true}}}},
		"evict":         {map[string]bool{"Repair": true, "Evict": true}, features{repairEnabled: true, repair: racerepair.Settings{Switches: repair.Switches{Delete: true}, Evict: true}}},
		"label":         {map[string]bool{"Repair": true, "Label": true}, features{repairEnabled: true, repair: racerepair.Settings{Switches: repair.Switches{Label: true}}}},
		"off with ways": {map[string]bool{}, features{repair: racerepair.Settings{Switches: repair.Switches{Delete: true}}}},
		"audit":         {map[string]bool{"Audit": true}, features{audit: auditor.Settings{Interval: minutes}}},
		"condition":     {map[string]bool{"Audit": true, "Condition": true}, features{audit: auditor.Settings{Interval: minutes, PodCondition: true}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tc.features.daemon = "istio-cni-node"
			var got []string
			for _, r := range tc.features.wanted("istio-system") {
				text := r.Verb + " " + r.Group + "/" + strings.TrimSuffix(r.Resource+"/"+r.Subresource, "/")
				if r.Name != "" {
					text += ":" + r.Name
				}
				got = append(got, text)
			}
			slices.Sort(got)
			if diff := cmp.Diff(granted(t, tc.granted), slices.Compact(got)); diff != "" {
				t.Errorf("-granted +reviewed:\n%s", diff)
			}
		})
	}
}

// granted are the rights of e2e/rights/agent.yaml.
func granted(t *testing.T, with map[string]bool) (all []string) {
	t.Helper()
	text, err := os.ReadFile("../../../e2e/rights/agent.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := template.Must(template.New("agent").Parse(string(text))).Execute(&out, with); err != nil {
		t.Fatal(err)
	}
	for document := range strings.SplitSeq(out.String(), "\n---\n") {
		var role struct {
			Rules []struct{ APIGroups, Resources, ResourceNames, Verbs []string }
		}
		if err := yaml.Unmarshal([]byte(document), &role); err != nil {
			t.Fatal(err)
		}
		for _, rule := range role.Rules {
			for _, verb := range rule.Verbs {
				all = append(all, verb+" "+rule.APIGroups[0]+"/"+rule.Resources[0]+strings.Join(append([]string{""}, rule.ResourceNames...), ":"))
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// TestRights_InTheAgentsContainer: its settings are those of the agent, which is the first process there.
func TestRights_InTheAgentsContainer(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		args, env, denied string
		want              output.Result
		text              string
	}{
		"a right that is missing":     {"install-cni", "", "list configmaps", output.Fail, "(system:serviceaccount:istio-system:istio-cni) may not: list configmaps istio-cni-config in namespace istio-system"},
		"without live settings":       {"/usr/local/bin/install-cni --log_output_level=debug --config-map=", "", "list configmaps", output.OK, "rights that its features need"},
		"the right of a feature":      {"istio-cni install", "REPAIR_DELETE_PODS", "delete pods", output.Fail, "may not: delete pods"},
		"a feature that is off":       {"istio-cni install", "", "delete pods", output.OK, "rights that its features need"},
		"an observer":                 {"install-cni", "CNI_OBSERVE", "get daemonsets", output.OK, "has the 8 rights"},
		"another one's first process": {"/sbin/init", "REPAIR_DELETE_PODS", "delete pods", output.Warn, "may not: delete pods, and whether"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.api.Deny(tc.denied)
			w.put("/p/1/cmdline", strings.ReplaceAll(tc.args, " ", "\x00")+"\x00")
			v := newView(config{hostRoot: w.root, runDir: "/var/run/istio-cni"}, func(string) (string, bool) { return "", false })
			defer v.close()
			v.proc = w.path("/p")
			v.readFeatures(func(name string) (string, bool) { return map[string]string{tc.env: "true"}[name], name == tc.env })
			if got := rights(t.Context(), v); got.Result != tc.want || !strings.Contains(got.Text, tc.text) {
				t.Errorf("got %+v", got)
			}
		})
	}
}

// TestDoctor_AsAJob: before the installation the command has the rights of its own account.
func TestDoctor_AsAJob(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.remove(runDir + "/istio-cni-kubeconfig")
	w.put("/account/token", w.api.Token())
	w.put("/account/ca.crt", string(w.api.CA()))
	w.env["KUBERNETES_SERVICE_HOST"], w.env["KUBERNETES_SERVICE_PORT"] = w.api.Address()
	w.args = []string{"--service-account-dir", w.path("/account")}
	code, all := w.checks()
	for name, want := range map[string]output.Result{"token": output.Warn, "rights": output.Warn, "injection": output.OK, "socket-lb": output.OK} {
		if all[name].Result != want {
			t.Errorf("%+v, want %s", all[name], want)
		}
	}
	if code != applet.ExitOK {
		t.Errorf("exit code %d", code)
	}
}
