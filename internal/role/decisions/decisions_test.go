package decisions_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	ring "github.com/meshcni/istio-cni/internal/agent/decisions"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podcache"
	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/role/decisions"
	"github.com/meshcni/istio-cni/internal/test/check"
	"github.com/meshcni/istio-cni/internal/test/documenttest"
)

// hostile is a text that a pod's author may write where an error quotes it.
const hostile = "<\x1b[2J\u009b2J\x7f\u202e\u200b\r\n2026-11-22T00:00:00Z  shop/forged  true  captured\tx\"\\"

// serve returns the socket of an agent that has reports of plugins.
func serve(t *testing.T, reports ...agentapi.Report) string {
	t.Helper()
	service := podcache.Service{Ring: &ring.Ring{}, Metrics: metrics.New("")}
	for _, r := range reports {
		r.Trim() // like the plugin
		body, err := json.Marshal(r)
		check.OK(t, err)
		report := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/report", bytes.NewReader(body))
		service.Handler().ServeHTTP(httptest.NewRecorder(), report)
	}
	return agenttest.Serve(t, service.Handler(), nil).Path
}

func run(t *testing.T, socket string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	return on(0, socket, args...)
}

// on runs the command on a terminal with a number of columns, 0 without a terminal.
func on(columns int, socket string, args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = decisions.Run(applet.Call{
		Args: append([]string{"--socket=" + socket}, args...), Stdout: &out, Stderr: &errs, Terminal: func() int { return columns },
		Getenv: func(string) (string, bool) { return "", false },
	})
	return code, out.String(), errs.String()
}

// TestDecisions_RefusedPods: neither the number of refused pods nor the text of their errors hides a decision.
func TestDecisions_RefusedPods(t *testing.T) {
	refused := make([]agentapi.Report, 512)
	for i := range refused {
		refused[i] = agentapi.Report{
			Time: time.Now(), Namespace: "shop", Pod: fmt.Sprint("web-", i), Reason: "invalid-settings", Source: agentapi.SourceAPI,
			Detail: hostile, Error: hostile + strings.Repeat("<", 16<<10), Container: strings.Repeat("c", 4<<10),
		}
	}
	socket := serve(t, refused...)
	code, stdout, stderr := run(t, socket)
	lines := strings.Split(strings.TrimSuffix(stdout, "\n"), "\n")
	if code != applet.ExitOK || len(lines) != 513 || stderr != "" {
		t.Fatalf("exit code %d, %d lines, %s", code, len(lines), stderr)
	}
	for _, line := range lines {
		if strings.ContainsFunc(line, func(r rune) bool { return !printable.Is(r) }) {
			t.Fatalf("%q", line)
		}
	}
	if row := lines[1]; !strings.Contains(row, "shop/web-511  false     invalid-settings  api     0   ") ||
		!strings.Contains(row, `  "<\\u001b[2J\\u009b2J\\u007f\\u202e\\u200b\\u000d\\n2026-11-22T00:00:00Z  shop/forged  true  captured\\tx\"\\<<`) ||
		!strings.HasSuffix(row, `bytes more)"`) {
		t.Errorf("%s", row)
	}
	_, stdout, _ = on(80, socket)
	for line := range strings.Lines(stdout) {
		if n := printable.Width(strings.TrimSuffix(line, "\n")); n > 80 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
	code, stdout, _ = run(t, socket, "--json")
	var all document.DecisionList
	if err := json.Unmarshal([]byte(stdout), &all); err != nil || code != applet.ExitOK || len(all.Items) != 512 {
		t.Fatalf("exit code %d, %d decisions, %v", code, len(all.Items), err)
	}
	documenttest.Valid(t, "DecisionList", stdout)
	_, stdout, _ = run(t, socket, "-o", "json")
	documenttest.Valid(t, "DecisionList", stdout)
	if strings.ContainsFunc(strings.ReplaceAll(stdout, "\n", ""), func(r rune) bool { return !printable.Is(r) }) {
		t.Error("the JSON is not printable")
	}
}

func TestDecisions_Filters(t *testing.T) {
	now := time.Now()
	socket := serve(t,
		agentapi.Report{
			Time: now.Add(-2 * time.Hour), Namespace: "a", Pod: "old", Command: "ADD", UID: "1", Container: "c", Reason: "captured", Captured: true, Detail: "d", Source: agentapi.SourceAPI,
			Backend: "netlink,netlink", Error: "e", Seconds: map[agentapi.Phase]float64{agentapi.PhaseTotal: 0.5}, Changed: true, Processes: 1, Requests: 1, Number: 7,
		}, agentapi.Report{Time: now, Namespace: "a", Pod: "x"},
		agentapi.Report{Time: now, Namespace: "b", Pod: "y"}, agentapi.Report{Time: now, Namespace: "b", Pod: "z"},
		agentapi.Report{Time: now.Add(-3 * time.Hour), Namespace: "b", Pod: "entered-late", Source: agentapi.SourceWatch})
	for _, test := range []struct {
		args, pods []string
		code       int
	}{
		{nil, []string{"z", "y", "x", "old", "entered-late"}, applet.ExitOK},
		{[]string{"--limit=2"}, []string{"z", "y"}, applet.ExitOK},
		{[]string{"--limit=0"}, []string{"z", "y", "x", "old", "entered-late"}, applet.ExitOK},
		{[]string{"--since=1h"}, []string{"z", "y", "x"}, applet.ExitOK},
		{[]string{"--pod=a/", "--limit=1"}, []string{"x"}, applet.ExitOK},
		{[]string{"--limit=-1"}, nil, applet.ExitUsage},
		{[]string{"--since=soon"}, nil, applet.ExitUsage},
		{[]string{"--since=-1h"}, nil, applet.ExitUsage},
	} {
		code, stdout, stderr := run(t, socket, append(test.args, "--json")...)
		var all document.DecisionList
		if code == applet.ExitOK {
			documenttest.Valid(t, "DecisionList", stdout)
			check.OK(t, json.Unmarshal([]byte(stdout), &all))
			check.Equal(t, all.Omitted, 5-len(test.pods), test.args)
		}
		var pods []string
		for _, r := range all.Items {
			pods = append(pods, r.Pod)
		}
		if code != test.code || !slices.Equal(pods, test.pods) || (code != 0) != strings.Contains(stderr, "want a") {
			t.Errorf("%q: exit code %d, pods %q, %s", test.args, code, pods, stderr)
		}
	}
}

func TestDecisions_NoneListed(t *testing.T) {
	socket := serve(t, agentapi.Report{Time: time.Now().Add(-time.Hour), Namespace: "a", Pod: "old"})
	const nobody = "error: the agent of this node holds no such decision about a pod with \"nobody\" in its NAMESPACE/NAME\n"
	for _, test := range []struct {
		args           []string
		code           int
		stdout, stderr string
	}{
		{[]string{"--pod=nobody"}, applet.ExitError, "", nobody},
		{[]string{"--pod=nobody", "--json"}, applet.ExitError, "\"items\": []\n}\n", nobody},
		{[]string{"--since=1m"}, applet.ExitOK, "", "the agent of this node holds no such decision\n"},
		{[]string{"--since=1m", "--json"}, applet.ExitOK, "\"items\": []\n}\n", ""},
	} {
		if code, stdout, stderr := run(t, socket, test.args...); code != test.code || !strings.HasSuffix(stdout, test.stdout) || (stdout == "") != (test.stdout == "") || stderr != test.stderr {
			t.Errorf("%q: exit code %d, stdout %q, stderr %q", test.args, code, stdout, stderr)
		}
	}
	if code, _, stderr := run(t, filepath.Join(t.TempDir(), "none")); code != applet.ExitError || !strings.Contains(stderr, "is the node agent running") {
		t.Errorf("no agent: exit code %d, %s", code, stderr)
	}
}
