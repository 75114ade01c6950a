package plugin_test

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
)

// answer is one run of the program with exactly this environment and input.
type answer struct {
	stdout, stderr string
	code           int
}

func ask(t *testing.T, input string, env ...string) answer {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(t.Context(), chaintest.Program(t))
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = env, strings.NewReader(input), &stdout, &stderr
	_ = cmd.Run()
	return answer{stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

func TestDelAndGC_Succeed(t *testing.T) {
	t.Parallel()
	for _, command := range []string{"DEL", "GC"} {
		for name, tc := range map[string]struct {
			input string
			env   []string
		}{
			"nothing at all":         {},
			"garbage for a stanza":   {"{{{", []string{"CNI_CONTAINERID=c", "CNI_IFNAME=eth0", "CNI_PATH=/nowhere"}},
			"a namespace that ended": {`{"cniVersion":"1.0.0","name":"n"}`, []string{"CNI_CONTAINERID=c", "CNI_NETNS=/run/netns/gone", "CNI_IFNAME=eth0", "CNI_PATH=/x"}},
			"an unknown version":     {`{"cniVersion":"9.9.9","name":"n"}`, []string{"CNI_CONTAINERID=c", "CNI_IFNAME=eth0", "CNI_PATH=/x"}},
			"unknown arguments":      {`{"cniVersion":"0.4.0","name":"n"}`, []string{"CNI_CONTAINERID=c", "CNI_IFNAME=eth0", "CNI_PATH=/x", "CNI_ARGS=a=b=c;;"}},
		} {
			t.Run(command+"/"+name, func(t *testing.T) {
				t.Parallel()
				got := ask(t, tc.input, slices.Concat(tc.env, []string{"CNI_COMMAND=" + command})...)
				if got.code != 0 || got.stdout != "" {
					t.Errorf("exit %d, stdout %q, stderr %q", got.code, got.stdout, got.stderr)
				}
			})
		}
	}
}

func TestErrors_OneCNIObject(t *testing.T) {
	t.Parallel()
	required := []string{"CNI_CONTAINERID=c", "CNI_NETNS=/run/netns/gone", "CNI_IFNAME=eth0", "CNI_PATH=/x"}
	for _, tc := range []struct {
		name, command, input string
		env                  []string
		code                 uint
		text                 string
	}{
		{"a stanza that is no JSON", "ADD", "{", required, 6, ""},
		{"a stanza without a name", "ADD", `{"cniVersion":"1.0.0"}`, required, 7, "missing network name"},
		{"an unknown version", "ADD", `{"cniVersion":"9.9.9","name":"n"}`, required, 1, "incompatible"},
		{"a missing variable", "ADD", `{"cniVersion":"1.0.0","name":"n"}`, required[:1], 4, "CNI_NETNS"},
		{"an unknown command", "FLY", `{"cniVersion":"1.0.0","name":"n"}`, required, 4, "FLY"},
		{"CHECK before 0.4.0", "CHECK", `{"cniVersion":"0.3.1","name":"n"}`, required, 1, ""},
		{"STATUS before 1.1.0", "STATUS", `{"cniVersion":"1.0.0","name":"n"}`, required, 1, ""},
		{"a broken prevResult", "ADD", `{"cniVersion":"1.0.0","name":"n","prevResult":{"ips":"no"}}`, required, 6, "prevResult"},
		{"an argument without value", "ADD", `{"cniVersion":"1.0.0","name":"n"}`, slices.Concat(required, []string{"CNI_ARGS=IgnoreUnknown"}), 4, "CNI_ARGS"},
		{"an unknown argument", "ADD", `{"cniVersion":"1.0.0","name":"n"}`, slices.Concat(required, []string{"CNI_ARGS=FOO=1"}), 4, "FOO"},
		// The CNI library checks the namespace after the command has run: no result may be printed besides its error.
		{
			"the plugin's own namespace", "ADD", `{"cniVersion":"1.0.0","name":"n"}`,
			[]string{"CNI_CONTAINERID=c", "CNI_NETNS=/proc/self/ns/net", "CNI_IFNAME=eth0", "CNI_PATH=/x"},
			8, "",
		},
		{
			"no kubeconfig", "ADD", `{"cniVersion":"1.0.0","name":"n","cni_agent_run_dir":"/nonexistent"}`,
			slices.Concat(required, []string{"CNI_ARGS=K8S_POD_NAMESPACE=apps;K8S_POD_NAME=web"}), 5, "/nonexistent/istio-cni-kubeconfig",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got := ask(t, tc.input, slices.Concat(tc.env, []string{"CNI_COMMAND=" + tc.command})...)
			var object struct {
				Code    uint   `json:"code"`
				Msg     string `json:"msg"`
				Details string `json:"details"`
			}
			if err := json.Unmarshal([]byte(got.stdout), &object); err != nil || got.code != 1 {
				t.Fatalf("exit %d, stdout is not one object (%v): %q", got.code, err, got.stdout)
			}
			if object.Code != tc.code || !strings.Contains(object.Msg+object.Details, tc.text) {
				t.Errorf("got %+v, want code %d and %q", object, tc.code, tc.text)
			}
			for line := range strings.Lines(got.stderr) {
				if !json.Valid([]byte(line)) {
					t.Errorf("stderr line is not JSON: %q", line)
				}
			}
		})
	}
}
