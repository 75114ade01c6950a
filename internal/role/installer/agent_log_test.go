package installer_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// awaitLevels waits for the levels that the introspection port shows, and for the plugin's in the stanza that the runtime loads.
func awaitLevels(t *testing.T, n *nodetest.Node, a *nodetest.Agent, agent, plugin string) {
	t.Helper()
	nodetest.Await(t, "levels "+agent+" and "+plugin, func() error {
		var infos []struct {
			Name  string `json:"name"`
			Level string `json:"output_level"`
		}
		code, body, err := a.Ask("9876", "/scopej")
		if err != nil || code != http.StatusOK || json.Unmarshal([]byte(body), &infos) != nil || len(infos) != 2 ||
			infos[0].Name != "cni-agent" || infos[0].Level != agent || infos[1].Name != "cni-plugin" || infos[1].Level != plugin {
			return notYet("%d %s %v", code, body, err)
		}
		list, err := n.Load()
		if err != nil {
			return err
		}
		if last := string(list.Plugins[len(list.Plugins)-1].Bytes); !strings.Contains(last, `"plugin_log_level":"`+plugin+`"`) {
			return notYet("the last plugin is %s", last)
		}
		return nil
	})
}

// put sets a level by the introspection port, and returns the answer.
func put(t *testing.T, a *nodetest.Agent, scope, body string) (code int, text string) {
	t.Helper()
	code, text, err := a.Send(http.MethodPut, "9876", "/scopej/"+scope, body)
	check.OK(t, err)
	return code, text
}

// TestLevels_RunningAgent are set by requests, in the form of the reference's introspection port and of istioctl.
func TestLevels_RunningAgent(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := n.Start("--log_output_level=info")
	a.AwaitReady()
	awaitLevels(t, n, a, "info", "info")
	if code, text := put(t, a, "cni-plugin", `{"name":"cni-plugin","output_level":"debug"}`); code != http.StatusAccepted {
		t.Fatal(code, text)
	}
	awaitLevels(t, n, a, "info", "debug")
	a.AwaitLog("a request to the introspection port set the log level")
	check.OK(t, check.Err(n.Add(n.NewPod("apps", "web", chaintest.Sidecar))))
	nodetest.Await(t, "a debug record of the plugin in the agent's log", func() error {
		for line := range strings.Lines(a.Log()) {
			if strings.Contains(line, "level=DEBUG") && strings.Contains(line, "scope=cni-plugin") {
				return nil
			}
		}
		return notYet("%s", a.Log())
	})
	for _, all := range []string{"all", "default"} {
		level := map[string]string{"all": "none", "default": "warn"}[all]
		if code, text := put(t, a, all, `{"output_level":"`+level+`"}`); code != http.StatusAccepted {
			t.Fatal(code, text)
		}
		awaitLevels(t, n, a, level, level)
	}
	// istioctl admin log --stack-trace-reset
	if code, text := put(t, a, "cni-agent", `{"name":"cni-agent","stack_trace_level":"none"}`); code != http.StatusAccepted {
		t.Error(code, text)
	}
	for _, bad := range [][3]string{
		{"cni-agent", `{"output_level":"loud"}`, `output_level "loud": want debug, info, warn, error, fatal or none`},
		{"cni-agent", `{}`, "want debug, info, warn, error, fatal or none"},
		{"cni-agent", "debug", "want a JSON object"},
		{"cni-agent", `{"output_level":"` + strings.Repeat("x", 1<<20) + `"}`, "want a JSON object"},
		{"ztunnel", `{"output_level":"debug"}`, `scope "ztunnel": want cni-agent, cni-plugin, default or all`},
	} {
		if code, text := put(t, a, bad[0], bad[1]); code != http.StatusBadRequest || !strings.Contains(text, bad[2]) || len(text) > 400 {
			t.Errorf("%.80q: %d %.400s", bad, code, text)
		}
	}
	for path, want := range map[string]int{"": http.StatusOK, "cni-agent": http.StatusOK, "ztunnel": http.StatusBadRequest} {
		if code, text, err := a.Ask("9876", "/scopej/"+path); err != nil || code != want {
			t.Error(path, code, text, err)
		}
	}
	awaitLevels(t, n, a, "warn", "warn")
	// A restart has the configured levels again.
	a.Kill()
	a = n.Start("--log_output_level=info")
	a.AwaitReady()
	awaitLevels(t, n, a, "info", "info")
}

// TestLevels_ConfigMap apply without a restart, although charts always pass the flag. A level that a request set holds until
// the configured one changes.
func TestLevels_ConfigMap(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := n.Start("--log_output_level=info")
	a.AwaitReady()
	set := func(levels string) { n.API.Set(configMap(map[string]string{"LOG_OUTPUT_LEVEL": levels})) }
	set("cni-agent:debug,cni-plugin:error")
	awaitLevels(t, n, a, "debug", "error")
	set("cni-plugin:warn")
	awaitLevels(t, n, a, "info", "warn")
	if code, text := put(t, a, "cni-plugin", `{"output_level":"debug"}`); code != http.StatusAccepted {
		t.Fatal(code, text)
	}
	awaitLevels(t, n, a, "info", "debug")
	n.API.Set(configMap(map[string]string{"LOG_OUTPUT_LEVEL": "cni-plugin:warn", "EXCLUDE_NAMESPACES": "shop"}))
	awaitExcluded(t, n, "shop")
	awaitLevels(t, n, a, "info", "debug")
	set("error")
	awaitLevels(t, n, a, "error", "error")
	set("loud")
	a.AwaitLog(`key LOG_OUTPUT_LEVEL: value \"loud\"`)
	awaitLevels(t, n, a, "error", "error")
	n.API.Set(configMap(map[string]string{"UNRELATED": "key"}))
	awaitLevels(t, n, a, "info", "info")
}
