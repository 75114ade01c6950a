package main

import (
	"bytes"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"text/template"
	"time"

	"github.com/google/go-cmp/cmp"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"
)

// TestRights_UsedAndEnough compares the roles of each rendering with e2e/rights. Other tests
// compare these with the requests of running programs: internal/role/installer for the agent, e2e/taint for the
// controller. An unused rule fails the test, and so does a request without a rule.
func TestRights_UsedAndEnough(t *testing.T) {
	t.Parallel()
	eachRendering(t, func(t *testing.T, r rendering) {
		accounts := []string{"istio-cni"}
		if !r.has("ConfigMap/istio-system/istio-cni-config") || !r.has("ClusterRole//istio-cni") {
			return // global.resourceScope: see TestParts_AreTheWhole
		}
		want := map[string][]string{"istio-cni": requests(t, "agent", agentFeatures(t, r))}
		if r.has("Deployment/istio-system/istio-cni-taint") {
			accounts = append(accounts, "istio-cni-taint")
			want["istio-cni-taint"] = requests(t, "taint", taintFeatures(t, r))
		}
		for _, account := range accounts {
			equal(t, cmp.Diff(want[account], granted(t, r, account)), "", "account", account, "(-asked for +granted)")
		}
	})
}

// agentFeatures returns the template values for e2e/rights/agent.yaml, from the agent's settings.
func agentFeatures(t *testing.T, r rendering) any {
	t.Helper()
	config, args := agentConfig(t, r), agent(t, r).Spec.Template.Spec.Containers[0].Args
	on := func(name string) bool { return config[name] == "true" }
	repair := on("REPAIR_ENABLED")
	remove := repair && on("REPAIR_DELETE_PODS")
	interval, err := time.ParseDuration(config["AUDIT_INTERVAL"])
	noError(t, err)
	return map[string]bool{
		"Live": !slices.Contains(args, "--config-map="), "Repair": repair, "Delete": remove && !on("REPAIR_EVICT"),
		"Evict": remove && on("REPAIR_EVICT"), "Label": repair && !remove && on("REPAIR_LABEL_PODS"),
		"Ambient": on("AMBIENT_ENABLED") && config["AMBIENT_PODS"] != "ignore", "Audit": interval > 0, "Condition": interval > 0 && on("AUDIT_POD_CONDITION"),
	}
}

// taintFeatures returns the template values for e2e/rights/taint.yaml, from the controller's flags.
func taintFeatures(t *testing.T, r rendering) any {
	t.Helper()
	flags := map[string]string{}
	for _, arg := range tainter(t, r).Spec.Template.Spec.Containers[0].Args {
		name, value, _ := strings.Cut(arg, "=")
		flags[name] = value
	}
	lease, config := flags["--lease-name"], flags["--configmap-name"]
	if lease == "" {
		lease = "istio-node-untaint"
		if config != "" {
			lease = "istio-taint-lock"
		}
	}
	return map[string]any{"Lease": lease, "ConfigMap": config, "Condition": flags["--node-condition"] != ""}
}

// requests returns the rules in a file of e2e/rights.
func requests(t *testing.T, name string, features any) []string {
	t.Helper()
	text, err := os.ReadFile(top + "/e2e/rights/" + name + ".yaml")
	noError(t, err)
	parsed, err := template.New(name).Parse(string(text))
	noError(t, err)
	var out bytes.Buffer
	noError(t, parsed.Execute(&out, features))
	var all []string
	for document := range strings.SplitSeq(out.String(), "\n---\n") {
		var role rbacv1.Role
		if err := yaml.Unmarshal([]byte(document), &role); err != nil {
			t.Fatalf("%v\n%s", err, document)
		}
		all = append(all, verbs(role.Rules)...)
	}
	return slices.Compact(slices.Sorted(slices.Values(all)))
}

// granted returns the rules of all roles that are bound to an account, except "use" of a SecurityContextConstraints,
// which is not a request.
func granted(t *testing.T, r rendering, account string) []string {
	t.Helper()
	all := map[string]bool{}
	for _, o := range r.Objects {
		if o.Kind != "RoleBinding" && o.Kind != "ClusterRoleBinding" {
			continue
		}
		binding := get[rbacv1.RoleBinding](t, r, o.id())
		for _, subject := range binding.Subjects {
			if subject.Name != account {
				continue
			}
			role := binding.RoleRef.Kind + "/" + binding.Namespace + "/" + binding.RoleRef.Name
			for _, right := range verbs(get[rbacv1.Role](t, r, role).Rules) {
				all[right] = !strings.HasPrefix(right, "use security.openshift.io/securitycontextconstraints:")
			}
		}
	}
	maps.DeleteFunc(all, func(_ string, counts bool) bool { return !counts })
	return slices.Sorted(maps.Keys(all))
}
