package agentapi

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"

	"github.com/meshcni/istio-cni/internal/core/audit"
)

// AuditPattern is the path of the status of all pods of the node, a JSON array of audit.Status. With CheckParam every pod is
// inspected before the answer, unless such requests have used up their budget: then the pods have their last results.
const AuditPattern = "GET " + auditPath

const auditPath = "/v1/audit"

// AuditPodPattern is the path of one pod in detail, an inspect.Explanation. The parameters of inspect.Parse add the way of a packet.
const AuditPodPattern = AuditPattern + "/{namespace}/{name}"

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
	return all, asked(err, "the state of its pods")
}

// AuditPod requests one pod in detail. The answer is JSON.
func (a *Agent) AuditPod(ctx context.Context, namespace, name string, query url.Values) ([]byte, error) {
	path := url.URL{Path: auditPath + "/" + namespace + "/" + name, RawQuery: query.Encode()}
	text, err := a.call(ctx, http.MethodGet, path.String(), nil)
	return text, asked(err, "pod %s/%s", namespace, name)
}
