package trace_test

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
	"github.com/meshcni/istio-cni/internal/role/trace"
	"github.com/meshcni/istio-cni/internal/test/check"
	"github.com/meshcni/istio-cni/internal/test/documenttest"
)

// run runs the role, and calls first after its first line.
func run(first func(), args ...string) (code int, stdout, stderr string) {
	out, errs := &check.Output{First: first}, &bytes.Buffer{}
	code = trace.Run(applet.Call{Args: args, Stdout: out, Stderr: errs, Getenv: os.LookupEnv})
	return code, out.String(), errs.String()
}

func TestTrace_Namespace(t *testing.T) {
	t.Parallel()
	l := labtest.New(t, ruleset.IPv4)
	l.StartProxy(t, l.Proxy(redirect.Redirect), redirect.Redirect)
	spec := redirect.Default()
	spec.OutboundPortsExclude = ruleset.PortList(443)
	space := redirection.Namespace{NetNS: l.NetNS(), Log: slog.New(slog.DiscardHandler)}
	check.OK(t, check.Err(space.Apply(t.Context(), spec, redirection.Reconcile)))
	send := func(port uint16) func() {
		return func() {
			labtest.Request{From: l.App(), Via: labtest.TCP, To: labtest.Far.Port(ruleset.IPv4, port)}.Send(t.Context())
		}
	}
	for name, test := range map[string]struct {
		args []string
		send func()
		code int
		text []string
	}{
		"redirected": {nil, send(80), 0, []string{
			"tracing namespace /", " (Ctrl-C ends it): the first packet of each TCP connection and UDP packets\n",
			"TCP 10.1.0.2:", " -> 10.2.0.9:80 is sent by the pod\n→ output nat/OUTPUT 1: ", "    # ",
			"\n✓ the packet is redirected to 127.0.0.1:15001: all other TCP", "\n1 packet: 1 as the mesh wants it, 0 past the mesh",
		}},
		"past":      {[]string{"--to", "10.2.0.0/16"}, send(443), 3, []string{"✗ the packet goes out unredirected, because excludeOutboundPorts=443", "1 past the mesh"}},
		"no packet": {[]string{"--to=10.2.0.9:81"}, send(80), 4, []string{"UDP packets to 10.2.0.9 with destination port 81", "no packet was seen: "}},
		"from":      {[]string{"--from=10.2.0.9", "--port", "80"}, send(80), 4, []string{"packets from 10.2.0.9 with destination port 80", "no packet was seen: "}},
	} {
		t.Run(name, func(t *testing.T) {
			code, stdout, stderr := run(test.send, append([]string{"--netns", l.Path(), "--for=1s"}, test.args...)...)
			if code != test.code || stderr != "" {
				t.Errorf("exit code %d, %s", code, stderr)
			}
			check.Contains(t, stdout, test.text...)
		})
	}
	_, stdout, _ := run(send(80), "--netns", l.Path(), "--for=1s", "-o", "json")
	lines := strings.Split(strings.TrimSpace(stdout), "\n")
	documenttest.Valid(t, "TraceEvent", stdout)
	var last document.TraceEvent
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &last); err != nil || len(lines) != 3 || last.End == nil || last.End.Wanted != 1 {
		t.Errorf("%v\n%s", err, stdout)
	}
	_, stdout, _ = run(send(80), "--netns", l.Path(), "--for=1s", "-o", "yaml")
	documenttest.Valid(t, "TraceEvent", stdout)
	check.Equal(t, strings.Count(stdout, "---\n"), 3, stdout)
}

func TestTrace_BadInput(t *testing.T) {
	t.Parallel()
	none := filepath.Join(t.TempDir(), "none")
	for name, test := range map[string]struct {
		args []string
		code int
		text string
	}{
		"no subject":    {nil, 2, "name one of a pod (NAMESPACE/NAME, or NAME and -n NAMESPACE), --pid and --netns"},
		"address":       {[]string{"a/b", "--to=db"}, 2, `to: value "db": want ADDRESS`},
		"two ports":     {[]string{"a/b", "--to=1.2.3.4:5", "--port=6"}, 2, `port: value "6": want one port`},
		"two families":  {[]string{"a/b", "--to=1.2.3.4", "--from=::1"}, 2, `from: value "::1": want an address of the family of to`},
		"too long":      {[]string{"a/b", "--for=1h"}, 2, `for: value "1h": want a duration from 1s to 10m0s`},
		"no agent":      {[]string{"a/b", "--socket", none}, 1, "--pid and --netns need none"},
		"no file":       {[]string{"--netns", none}, 1, none},
		"no namespaces": {[]string{"--netns", "/dev/null"}, 1, "/dev/null"},
	} {
		if code, stdout, stderr := run(nil, test.args...); code != test.code || !strings.Contains(stderr, test.text) || stdout != "" {
			t.Errorf("%s: exit code %d, %q, %q", name, code, stdout, stderr)
		}
	}
	if code, stdout, _ := run(nil, "--help"); code != 0 || !strings.Contains(stdout, "3  some packets went past the mesh") {
		t.Errorf("%d:\n%s", code, stdout)
	}
}

// TestTrace_Agent has an agent with each kind of answer, also with a pod's hostile text.
func TestTrace_Agent(t *testing.T) {
	t.Parallel()
	const legacy = `{"end":{"reason":"the time is over","packets":2,"wanted":1,"byLegacy":1,"counted":7,"countedWanted":2,"countedPast":1}}`
	const legacyText = "\n2 packets: 1 as the mesh wants it, 0 past the mesh, 0 unknown, 1 by rules of legacy tables; ended because the time is over\n" +
		"rules of legacy tables counted 2 packets as the mesh wants it, 1 past the mesh\n"
	const begin, end = `{"begin":{"subject":"pod a/b","until":"2026-01-01T00:00:00Z"}}`, `{"end":{"packets":1,"wanted":1,"lost":2}}`
	for name, test := range map[string]struct {
		status     int
		body       string
		code       int
		text, errs string
	}{
		"whole":            {200, begin + "\n" + end + "\n", 0, "the kernel dropped messages 2 times", ""},
		"hostile":          {200, `{"packet":{"sentence":"a\u001b[2Jb\u0007","wanted":"past-the-mesh","hops":[{"rule":"\u001b]0;x"}]}}` + "\n" + end + "\n", 0, `b`, ""},
		"legacy tables":    {200, begin + "\n" + legacy + "\n", 3, legacyText, ""},
		"a failed reading": {200, begin + "\n" + legacy + "\n" + `{"error":"reading the counters"}` + "\n", 1, legacyText, ": reading the counters"},
		"cut":              {200, begin + "\n", 1, "", "the node agent ended the trace before its time"},
		"an error":         {200, begin + "\n" + `{"error":"no route"}` + "\n", 1, "", "no route"},
		"no JSON":          {200, "x\n", 1, "", "invalid character"},
		"unknown":          {404, "no such pod on this node", 1, "", "see kubectl get pod -o wide for its node"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mux := http.NewServeMux()
			mux.HandleFunc(agentapi.TracePattern, func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Query().Get("to") != "10.0.0.1" || r.PathValue("name") != "b" {
					t.Errorf("the request is %s", r.URL)
				}
				w.WriteHeader(test.status)
				_, _ = w.Write([]byte(test.body))
			})
			code, stdout, stderr := run(nil, "a/b", "--to=10.0.0.1", "--socket", agenttest.Serve(t, mux, nil).Path)
			if code != test.code || !strings.Contains(stdout, test.text) || !strings.Contains(stderr, test.errs) || strings.ContainsAny(stdout, "\x1b\a") {
				t.Errorf("exit code %d, %q, %q", code, stdout, stderr)
			}
		})
	}
}
