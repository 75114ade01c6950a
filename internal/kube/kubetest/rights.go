package kubetest

import (
	"bytes"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"text/template"

	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"

	"github.com/meshcni/istio-cni/internal/test/check"
)

// AgentRights returns the rights of an agent with some features, from e2e/rights/agent.yaml, to tests of a role: VERB GROUP/RESOURCE or
// VERB GROUP/RESOURCE:NAME, in order.
func AgentRights(tb testing.TB, features map[string]bool) []string {
	tb.Helper()
	text, err := os.ReadFile("../../../e2e/rights/agent.yaml")
	check.OK(tb, err)
	var out bytes.Buffer
	check.OK(tb, template.Must(template.New("agent").Parse(string(text))).Execute(&out, features))
	all := map[string]bool{}
	for document := range strings.SplitSeq(out.String(), "\n---\n") {
		var role rbacv1.Role
		check.OK(tb, yaml.Unmarshal([]byte(document), &role), document)
		for _, rule := range role.Rules {
			for _, verb := range rule.Verbs {
				all[verb+" "+rule.APIGroups[0]+"/"+rule.Resources[0]+strings.Join(append([]string{""}, rule.ResourceNames...), ":")] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(all))
}
