package installer_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// events returns the events that the API server has.
func events(t *testing.T, n *nodetest.Node) []corev1.Event {
	t.Helper()
	var all []corev1.Event
	for _, text := range n.API.Events() {
		var one corev1.Event
		check.OK(t, json.Unmarshal(text, &one))
		all = append(all, one)
	}
	return all
}

// background repeats a check until its returned function is called, which fails the test with the first error.
func background(t *testing.T, what string, check func() error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	objection := make(chan error, 1)
	go func() {
		var err error
		for ; err == nil && ctx.Err() == nil; time.Sleep(300 * time.Microsecond) {
			err = check()
		}
		objection <- err
	}()
	return func() {
		t.Helper()
		cancel()
		if err := <-objection; err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestAgent_ConfigMapChanges: race repair follows the ConfigMap, too; its pod waits while its namespace is excluded.
func TestAgent_ConfigMapChanges(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := newUnredirected(t, n)
	p.register(n)
	a := n.Start("EXCLUDE_NAMESPACES=apps", "REPAIR_ENABLED=true", "REPAIR_REPAIR_PODS=true")
	a.AwaitReady()
	if p.Captured(t) {
		t.Fatal("a pod of an excluded namespace was redirected")
	}
	followsConfiguration(t, n, a, "configmap", func(excluded string) {
		n.API.Set(configMap(map[string]string{"EXCLUDE_NAMESPACES": excluded}))
	})
	awaitMetric(t, a, repairedInPlace, "1")
	// A removed key has its default, whatever the environment was at the start; without the object the environment
	// applies again.
	n.API.Set(configMap(map[string]string{"UNRELATED": "key"}))
	awaitExcluded(t, n)
	n.API.Delete("/api/v1/namespaces/" + nodetest.Namespace + "/configmaps/istio-cni-config")
	awaitExcluded(t, n, "apps")
}

func TestAgent_ConfigDirectoryChanges(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.Project("/etc/config", map[string]string{"EXCLUDE_NAMESPACES": "before-the-start"})
	args := []string{"EXCLUDE_NAMESPACES=kube-system", "--config-dir=/etc/config", "--config-map="}
	a := n.Start(args...)
	a.AwaitReady()
	awaitExcluded(t, n, "before-the-start")
	followsConfiguration(t, n, a, "directory", func(excluded string) {
		n.Project("/etc/config", map[string]string{"EXCLUDE_NAMESPACES": excluded})
	})
	// A restart reverts nothing: the first stanza has the configuration that the agent can read at its start.
	stop := background(t, "the stanza", func() error { return excluded(n, "shop") })
	for range 3 {
		a.Kill()
		a = n.Start(args...)
		a.AwaitLog("agent is ready")
	}
	stop()
	// The environment has the value of a key at the start of the container.
	n.Project("/etc/config", map[string]string{"UNRELATED": "key"})
	awaitExcluded(t, n)
}

// followsConfiguration gives an agent valid and invalid content.
func followsConfiguration(t *testing.T, n *nodetest.Node, a *nodetest.Agent, source string, set func(excluded string)) {
	t.Helper()
	stopAsking := background(t, "readiness", a.Ready)
	set("shop,bank")
	awaitExcluded(t, n, "shop", "bank")

	set("Not_A_Namespace")
	a.AwaitLog("live configuration is not usable: the last good one stays in force")
	a.Await("the event", func() bool {
		return slices.ContainsFunc(events(t, n), func(e corev1.Event) bool {
			return e.Reason == "CNIConfigRefused" && strings.Contains(e.Message, "Not_A_Namespace") &&
				e.InvolvedObject.Kind == "Node" && e.InvolvedObject.Name == nodetest.NodeName
		})
	})
	awaitExcluded(t, n, "shop", "bank")

	set("shop")
	awaitExcluded(t, n, "shop")
	check.OK(t, a.Running())
	// One invalid content is one problem, however many events the kubelet's exchange causes.
	check.Equal(t, a.Metric(`istio_cni_config_problems_total{source="`+source+`"}`), "1", "1 bad content was counted as")
	stopAsking()
}

// awaitExcluded waits for namespaces in the stanza that the runtime loads.
func awaitExcluded(t *testing.T, n *nodetest.Node, want ...string) {
	t.Helper()
	nodetest.Await(t, fmt.Sprintf("%q in the stanza", want), func() error { return excluded(n, want...) })
}

// excluded returns nil if the stanza excludes exactly these namespaces.
func excluded(n *nodetest.Node, want ...string) error {
	list, err := n.Load()
	if err != nil {
		return err
	}
	var stanza struct {
		Excluded []string `json:"exclude_namespaces"`
	}
	last := list.Plugins[len(list.Plugins)-1]
	if err := json.Unmarshal(last.Bytes, &stanza); err != nil {
		return err
	}
	if last.Network.Type != "istio-cni" || !slices.Equal(stanza.Excluded, want) {
		return notYet("the last plugin is %s", last.Bytes)
	}
	return nil
}

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

// put sets a level through the introspection port, and returns the answer.
func put(t *testing.T, a *nodetest.Agent, scope, body string) (code int, text string) {
	t.Helper()
	code, text, err := a.Send(http.MethodPut, "9876", "/scopej/"+scope, body)
	check.OK(t, err)
	return code, text
}

func accepted(t *testing.T, a *nodetest.Agent, scope, body string) {
	t.Helper()
	code, text := put(t, a, scope, body)
	check.Equal(t, code, http.StatusAccepted, text)
}

// TestLevels_RunningAgent sets the levels by requests, in the form of Istio's introspection port and of istioctl.
func TestLevels_RunningAgent(t *testing.T) {
	t.Parallel()
	n, a := running(t, "--log_output_level=info")
	awaitLevels(t, n, a, "info", "info")
	accepted(t, a, "cni-plugin", `{"name":"cni-plugin","output_level":"debug"}`)
	awaitLevels(t, n, a, "info", "debug")
	a.AwaitLog("a request to the introspection port set the log level")
	check.OK(t, check.Err(n.Add(n.NewPod("apps", "web", chaintest.Sidecar))))
	record := regexp.MustCompile(`level=DEBUG .*scope=cni-plugin`)
	a.Await("a debug record of the plugin in the agent's log", func() bool { return record.MatchString(a.Log()) })
	for _, all := range []string{"all", "default"} {
		level := map[string]string{"all": "none", "default": "warn"}[all]
		accepted(t, a, all, `{"output_level":"`+level+`"}`)
		awaitLevels(t, n, a, level, level)
	}
	// istioctl admin log --stack-trace-reset
	accepted(t, a, "cni-agent", `{"name":"cni-agent","stack_trace_level":"none"}`)
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
	// A restart restores the configured levels.
	a.Kill()
	a = n.Start("--log_output_level=info")
	a.AwaitReady()
	awaitLevels(t, n, a, "info", "info")
}

// TestLevels_ConfigMap: levels apply without a restart, although charts always pass the flag. A level that a request set holds until
// the configured level changes.
func TestLevels_ConfigMap(t *testing.T) {
	t.Parallel()
	n, a := running(t, "--log_output_level=info")
	set := func(levels string) { n.API.Set(configMap(map[string]string{"LOG_OUTPUT_LEVEL": levels})) }
	set("cni-agent:debug,cni-plugin:error")
	awaitLevels(t, n, a, "debug", "error")
	set("cni-plugin:warn")
	awaitLevels(t, n, a, "info", "warn")
	accepted(t, a, "cni-plugin", `{"output_level":"debug"}`)
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

// TestAgent_DecisionsOutliveIt: decisions survive a killed agent and include pods without a report; uninstall removes their file.
func TestAgent_DecisionsOutliveIt(t *testing.T) {
	t.Parallel()
	n, first := running(t)
	mesh := n.NewPod("apps", "mesh", chaintest.Sidecar)
	check.OK(t, check.Err(n.Add(mesh)))
	// The plugin does not report a pod that the runtime's annotations show to be outside.
	plain := n.NewPod("apps", "plain", nil)
	plain.Annotations = map[string]string{"some": "thing"}
	check.OK(t, check.Err(n.Add(plain)))
	n.API.Set(fmt.Appendf(nil, `{"kind":"Pod","apiVersion":"v1","metadata":{"namespace":"apps","name":"plain","uid":%q},"spec":{"nodeName":%q,
		"containers":[{"name":"istio-proxy"}]},"status":{"startTime":"2026-01-02T03:04:05Z","podIP":"10.0.0.1"}}`, plain.UID, nodetest.NodeName))
	want := []string{"mesh captured agent", "plain not-injected watch"}
	decisions := func() error {
		agent, err := agentapi.Dial(t.Context(), n.Path(nodetest.RunDir)+"/"+agentapi.SocketName)
		if err != nil {
			return err
		}
		defer agent.Close() //nolint:errcheck // the request has ended
		all, err := agent.Decisions(t.Context())
		var got []string
		for _, r := range all {
			got = append(got, fmt.Sprint(r.Pod, " ", r.Reason, " ", r.Source))
		}
		if slices.Sort(got); err != nil || !slices.Equal(got, want) {
			return notYet("decisions %q, %w", got, err)
		}
		return nil
	}
	nodetest.Await(t, "the decisions", decisions)
	first.Await("the file", func() bool {
		text := n.Tree(nodetest.RunDir)["decisions.json"]
		return strings.HasPrefix(text, "-rw------- ") && strings.Count(text, `"uid"`) == 2
	})
	first.Kill()
	second := n.Start("UNINSTALL_ON_EXIT=always")
	second.AwaitReady()
	nodetest.Await(t, "the decisions of the killed agent", decisions)
	for _, p := range []chaintest.Pod{mesh, plain} {
		check.OK(t, n.Del(p, "pods"))
	}
	if ends(t, second) {
		restored(t, n, map[string]string{"10-bridge.conflist": n.Tree(nodetest.NetDir)["10-bridge.conflist"]})
	}
}
