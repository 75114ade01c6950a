package agentapi

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/meshcni/istio-cni/internal/core/audit"
)

// AuditPattern is the path of the status of all pods of the node, a JSON array of audit.Status. With CheckParam every pod is
// inspected before the answer.
const AuditPattern = "GET " + auditPath

const auditPath = "/v1/audit"

// CheckParam is a boolean parameter of AuditPattern.
const CheckParam = "check"

// Audit requests the status of all pods of the node, by an inspection of each if check is set.
func (a *Agent) Audit(ctx context.Context, check bool) (all []audit.Status, err error) {
	path := auditPath
	if check {
		path += "?" + CheckParam + "=true"
	}
	text, err := a.call(ctx, http.MethodGet, path, nil)
	if err == nil {
		err = json.Unmarshal(text, &all)
	}
	if err != nil {
		return nil, fmt.Errorf("asking the node agent for the state of its pods: %w", err)
	}
	return all, nil
}
