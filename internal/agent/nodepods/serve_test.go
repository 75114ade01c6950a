package nodepods

import (
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/agent/auditor"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
)

// ask requests a pod in detail.
func (l *auditFixture) ask(name, query string) (status int, text string, e document.Explanation) {
	l.Helper()
	status, text = l.controller.ask(l.Context(), auditor.Socket, "/v1/audit/shop/"+name+"?"+query)
	if status == http.StatusOK {
		l.Do(json.Unmarshal([]byte(text), &e))
	}
	return status, text, e
}

// TestExplain: a pod is explained from injection to kernel, with the plugin's reported decision.
func TestExplain(t *testing.T) {
	t.Parallel()
	report := agentapi.Report{Command: "ADD", UID: "u1", Reason: string(sidecar.Captured), Captured: true, Source: agentapi.SourceAgent}
	l := newAuditFixture(t, auditor.Settings{}, cniconf.NetConf{}, func(o *Options) {
		o.Reported = func(is func(string) bool) (agentapi.Report, bool) { return report, is(report.UID) }
	})
	l.want(audit.Captured, "")
	_, text, e := l.ask("web", url.Values{"to": {"10.88.0.1:80"}}.Encode())
	switch {
	case e.State != audit.Captured || !e.Injected || e.Injection != (document.Injection{Proxy: "container", Setup: sidecar.ValidationContainer}):
		t.Error(text)
	case e.Added == nil || e.Added.Source != string(agentapi.SourceAgent) || !e.Decision.Captured || len(e.Chains) == 0:
		t.Error(text)
	case e.Answer == nil || !strings.HasPrefix(e.Answer.Sentence, "is redirected to port 15001") || e.Answer.Wanted != document.Past || !e.Answer.NoListener:
		t.Errorf("%+v", e.Answer)
	}
	netnstest.Run(t, l.path, "iptables-nft", "-t", "nat", "-I", "OUTPUT", "-p", "tcp", "--dport", "80", "-j", "RETURN")
	_, text, e = l.ask("web", url.Values{"to": {"10.88.0.1:80"}}.Encode())
	if e.State != audit.ForeignRule || e.Answer == nil || e.Answer.Wanted != document.Past || !strings.HasSuffix(e.Answer.Sentence, "is not the mesh's") {
		t.Error(text)
	}
	if _, text, e = l.ask("web", url.Values{"to": {"10.99.0.1:80"}}.Encode()); e.Answer == nil || e.Answer.Verdict != "not-sent" || e.Answer.Wanted != document.Past {
		t.Error(text)
	}
	if code, text, _ := l.ask("web", "to=x"); code != http.StatusBadRequest || !strings.Contains(text, "want ADDRESS:PORT") {
		t.Error(code, text)
	}
}

// TestExplainWithoutANamespace: the answer says why a pod is left alone, or why nothing of it can be read.
func TestExplainWithoutANamespace(t *testing.T) {
	t.Parallel()
	l := newAuditFixture(t, auditor.Settings{}, cniconf.NetConf{})
	for name, tt := range map[string]struct {
		pod  podSpec
		want audit.State
		text string
	}{
		"host":    {podSpec{uid: "u2", host: true, phase: "Running"}, audit.Outside, "the node's network namespace"},
		"plain":   {podSpec{uid: "u3", plain: true}, audit.Outside, "has no address yet"},
		"pending": {podSpec{uid: "u4"}, audit.NotInspected, "has no address yet"},
		"over":    {podSpec{uid: "u5", phase: "Failed"}, audit.NotInspected, "has ended"},
		"leaving": {podSpec{uid: "u6", deleting: true}, audit.NotInspected, "is being deleted"},
	} {
		tt.pod.name = name
		if tt.pod.host || name == "over" || name == "leaving" {
			tt.pod = tt.pod.at("10.88.0.9/24")
		}
		l.set(tt.pod)
		l.controller.statusOf(t, types.NamespacedName{Namespace: "shop", Name: name})
		_, text, e := l.ask(name, "")
		if e.State != tt.want || !strings.Contains(e.InspectionError, tt.text) || e.Sentence == "" || e.Added != nil {
			t.Errorf("%s: %s", name, text)
		}
	}
}

// TestWhereAPodIsThatTheNodeDoesNotHave: the agent queries the API server.
func TestWhereAPodIsThatTheNodeDoesNotHave(t *testing.T) {
	t.Parallel()
	l := newAuditFixture(t, auditor.Settings{}, cniconf.NetConf{})
	l.want(audit.Captured, "")
	l.set(podSpec{name: "far", uid: "u9", node: "n9"})
	for name, want := range map[string]string{
		"far":  "no such pod on this node: shop/far; it is on node n9, this one is " + node1,
		"none": "no such pod on this node: shop/none; the cluster has none either",
	} {
		if code, text, _ := l.ask(name, ""); code != http.StatusNotFound || strings.TrimSpace(text) != want {
			t.Errorf("%s: %d %q, want %q", name, code, text, want)
		}
	}
}
