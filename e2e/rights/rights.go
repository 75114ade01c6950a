// Package rights has the RBAC rules of the programs of istio-cni.
//
// It promises the minimal rules: the tests run the programs with these rules, fail for each request that is not covered, and
// compare the requests with the rules one by one. The names are the chart's. It never calls an API server.
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
	TaintEvents = "istio-cni-taint-events" // in default, where events of nodes are; in the chart a part of the ClusterRole
	TaintConfig = "istio-cni-taint-config" // in the ConfigMap's namespace, in mode legacy
)

// Taint has the parameters of the taint controller's roles.
type Taint struct {
	// Lease and ConfigMap are the names of these objects.
	Lease, ConfigMap string
	// Condition adds the right to patch the status of nodes, for a node condition.
	Condition bool
}

// Roles returns the roles of the taint controller.
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
