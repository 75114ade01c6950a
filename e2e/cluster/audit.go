package cluster

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"time"
)

// auditPolicy logs the requests of service accounts, with the request bodies for nodes and leases.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Request
  userGroups: ["system:serviceaccounts"]
  verbs: [patch, create, update]
  resources:
  - {group: "", resources: [nodes, nodes/status]}
  - {group: coordination.k8s.io, resources: [leases]}
- level: Metadata
  userGroups: ["system:serviceaccounts"]
- level: None
`

// Request is one request that the API server has responded to; a watch counts when its response starts.
type Request struct {
	// User is the authenticated user name, such as system:serviceaccount:istio-system:istio-cni-taint.
	User string
	// Verb is the RBAC verb. URI includes the query.
	Verb, URI                              string
	Resource, Subresource, Namespace, Name string
	// Received is requestReceivedTimestamp: the API server's clock, with microseconds.
	Received time.Time
	// Status is the HTTP status code.
	Status int
	// Body is set for patches, creates and updates of nodes and leases.
	Body json.RawMessage
}

// auditEvent is one line of the audit log, as in k8s.io/apiserver/pkg/apis/audit/v1.
type auditEvent struct {
	AuditID    string `json:"auditID"`
	Stage      string `json:"stage"`
	RequestURI string `json:"requestURI"`
	Verb       string `json:"verb"`
	User       struct {
		Username string `json:"username"`
	} `json:"user"`
	ObjectRef struct {
		Resource    string `json:"resource"`
		Subresource string `json:"subresource"`
		Namespace   string `json:"namespace"`
		Name        string `json:"name"`
	} `json:"objectRef"`
	ResponseStatus struct {
		Code int `json:"code"`
	} `json:"responseStatus"`
	RequestObject            json.RawMessage `json:"requestObject"`
	RequestReceivedTimestamp time.Time       `json:"requestReceivedTimestamp"`
}

// Requests returns the requests of a service account so far, in the order of the audit log.
func (c *Cluster) Requests(namespace, account string) ([]Request, error) {
	text, err := os.ReadFile(c.run.audit())
	if err != nil {
		return nil, fmt.Errorf("reading the audit log: %w", err)
	}
	return requests(text, "system:serviceaccount:"+namespace+":"+account)
}

// requests parses an audit log and skips an incomplete last line, which the API server is still writing. A watch is
// logged in two stages, and requests returns the first.
func requests(text []byte, user string) ([]Request, error) {
	const longest = 16 << 20
	if end := bytes.LastIndexByte(text, '\n'); end >= 0 {
		text = text[:end]
	} else {
		text = nil
	}
	var all []Request
	seen := map[string]bool{}
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, longest)
	for lines.Scan() {
		if !bytes.Contains(lines.Bytes(), []byte(`"`+user+`"`)) {
			continue
		}
		var event auditEvent
		if err := json.Unmarshal(lines.Bytes(), &event); err != nil {
			return nil, fmt.Errorf("reading the audit log: %w: %s", err, lines.Text())
		}
		if event.User.Username != user || seen[event.AuditID] {
			continue
		}
		seen[event.AuditID] = true
		all = append(all, Request{
			User: event.User.Username, Verb: event.Verb, URI: event.RequestURI,
			Resource: event.ObjectRef.Resource, Subresource: event.ObjectRef.Subresource,
			Namespace: event.ObjectRef.Namespace, Name: event.ObjectRef.Name,
			Received: event.RequestReceivedTimestamp, Status: event.ResponseStatus.Code, Body: event.RequestObject,
		})
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("reading the audit log: %w", err)
	}
	return all, nil
}
