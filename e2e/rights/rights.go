// Package rights has what the programs of istio-cni may ask of the API server.
//
// It promises the least that they need: the tests run them with these rights, refuse any request that is not covered, and
// compare what was used with what is here, rule by rule. The names are those of the chart. It never asks anybody.
//
// Start reading at taint.yaml.
package rights

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"text/template"

	rbac "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
)

//go:embed taint.yaml
var taint string

// Names of the taint controller's roles. The first is a ClusterRole, the others are Roles.
const (
	TaintNodes  = "istio-cni-taint-role"
	TaintPods   = "istio-cni-taint-pods"   // in each namespace of agents
	TaintLease  = "istio-cni-taint-lease"  // in the lease's namespace
	TaintEvents = "istio-cni-taint-events" // in default, where events of nodes are
	TaintConfig = "istio-cni-taint-config" // in the ConfigMap's namespace, in mode legacy
)

// Taint is what the roles of the taint controller depend on.
type Taint struct {
	// Lease and ConfigMap are names.
	Lease, ConfigMap string
	// Condition says that the controller publishes a condition.
	Condition bool
}

// Roles are those of the taint controller.
func (t Taint) Roles() ([]rbac.Role, error) {
	parsed, err := template.New("taint.yaml").Parse(taint)
	if err != nil {
		return nil, fmt.Errorf("reading taint.yaml: %w", err)
	}
	var out bytes.Buffer
	if err := parsed.Execute(&out, t); err != nil {
		return nil, fmt.Errorf("filling in taint.yaml: %w", err)
	}
	const window = 1 << 16
	decoder := yaml.NewYAMLOrJSONDecoder(&out, window)
	var all []rbac.Role
	for {
		var role rbac.Role
		err := decoder.Decode(&role)
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, fmt.Errorf("decoding taint.yaml: %w", err)
		}
		all = append(all, role)
	}
}
