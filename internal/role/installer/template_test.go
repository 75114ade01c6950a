package installer

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// chart2020 is a template of a chart from the shell-script era, with its colons in the wrong place.
const chart2020 = `
{
  "cniVersion:": "0.3.0",
  "name:": "istio-cni",
  "type": "istio-cni",
  "log_level": "__LOG_LEVEL__",
  "kubernetes": {
    "kubeconfig": "__KUBECONFIG_FILEPATH__",
    "cni_bin_dir": "/opt/cni/bin",
    "exclude_namespaces": ["istio-system"]
  }
}
`

func TestTemplate_Of2020(t *testing.T) {
	t.Parallel()
	c := mustLoad(t, cluster("LOG_LEVEL=info"), "--cni-network-config="+chart2020)
	conf, err := cniconf.Parse(c.Want.Stanza.Template)
	if err != nil || conf.Problems != nil {
		t.Fatal(err, conf.Problems)
	}
	if conf.CNIVersion != "0.3.0" || conf.Name != "istio-cni" || conf.LogLevel != "info" ||
		conf.Kubeconfig != "/etc/cni/net.d/ZZZ-istio-cni-kubeconfig" ||
		!slices.Equal(conf.ExcludeNamespaces, []string{"istio-system"}) {
		t.Errorf("the plugin reads %+v", conf)
	}
	if strings.Contains(string(c.Want.Stanza.Template), `:"`+`:`) || strings.Contains(string(c.Want.Stanza.Template), `cniVersion:`) {
		t.Errorf("a key with a colon is left: %s", c.Want.Stanza.Template)
	}
	if c.OldKubeconfig != "/host/etc/cni/net.d/ZZZ-istio-cni-kubeconfig" ||
		len(c.warnings) > 0 {
		t.Errorf("kubeconfig %+v, warnings %q", c.OldKubeconfig, c.warnings)
	}
}

// TestTemplate_Placeholders: install-template.txtar shows that every placeholder is filled.
func TestTemplate_Placeholders(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, "aaa.bbb__POD_NAMESPACE__ccc\n", dir, "token")
	c := mustLoad(t, cluster("LOG_LEVEL=debug"), "--service-account-dir="+dir,
		`--cni-network-config={"type":"istio-cni","x":["__SERVICEACCOUNT_TOKEN__","___LOG_LEVEL___","__dirname__","__POD_NAMESPACE__"]}`)
	want := `{"type":"istio-cni","x":["aaa.bbb__POD_NAMESPACE__ccc","_debug_","__dirname__","istio-system"]}` // a replacement is not expanded
	check.Diff(t, "result", want, string(c.Want.Stanza.Template))
}

func TestTemplate_StaysAsWritten(t *testing.T) {
	t.Parallel()
	const text = `{ "type" : "istio-cni",  "b": 12345678901234567890, "a": "<&>" }`
	if c := mustLoad(t, cluster(), "--cni-network-config=\n"+text+"\n"); string(c.Want.Stanza.Template) != text {
		t.Errorf("it became %s", c.Want.Stanza.Template)
	}
}

// TestTemplate_Files: install-template.txtar shows that a file wins over the variable, and which files are refused.
func TestTemplate_Files(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	inline := `--cni-network-config={"type":"istio-cni","from":"variable"}`
	if c := mustLoad(t, cluster(), inline, "--cni-network-config-file="+filepath.Join(dir, "none")); !strings.Contains(string(c.Want.Stanza.Template), "variable") {
		t.Errorf("without the file: %s", c.Want.Stanza.Template)
	}
	mustFail(t, cluster(), []string{inline, "--cni-network-config-file=" + dir}, "not a regular file")
	mustFail(t, cluster(), []string{"--cni-network-config-file=" + write(t, " \n", dir, "empty")}, "the file is empty")
}

// TestTemplate_Problems: install-template.txtar has the others.
func TestTemplate_Problems(t *testing.T) {
	t.Parallel()
	for template, want := range map[string]string{
		`[]`:                                "want a JSON object",
		`null`:                              `want a JSON object with "type": "istio-cni"`,
		`{"name":"istio-cni"}`:              `want a JSON object with "type": "istio-cni"`,
		`{"type":"istio-cni","plugins":[]}`: `want one plugin's object, not a list with "plugins"`,
		`{"type":"istio-cni","a":"__A____B____A__"}`:          "placeholder __A__, __B__: nothing",
		`{"type":"istio-cni","a":__LOG_LEVEL__}`:              "want a JSON object: invalid character",
		`{"type":"istio-cni","api_timeout":"9h"}`:             `network configuration key "api_timeout": value "9h"`,
		`{"type":"istio-cni","a":"__SERVICEACCOUNT_TOKEN__"}`: "reading the token for __SERVICEACCOUNT_TOKEN__",
		`{"type":"istio-cni","a":__SERVICEACCOUNT_TOKEN__}`:   "want a JSON object: invalid character",
	} {
		mustFail(t, cluster(), []string{"--service-account-dir=/none", "--cni-network-config=" + template}, "flag --cni-network-config: "+want)
	}
}

func TestTemplate_Tokens(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"", "\n", `se"cret`, "se\\cret", "se cret", "secré", "se\x00cret"} {
		dir := t.TempDir()
		write(t, text, dir, "token")
		_, err := build([]string{
			"--service-account-dir=" + dir, `--cni-network-config={"type":"istio-cni","a":"__SERVICEACCOUNT_TOKEN__"}`,
		}, cluster())
		if err == nil || !strings.Contains(err.Error(), "holds no token") || strings.Contains(err.Error(), "cr") {
			t.Errorf("token %q: error %v", text, err)
		}
	}
}

func TestTemplate_HostName(t *testing.T) {
	t.Parallel()
	env := around(cluster())
	env.hostname = func() (string, error) { return "", errors.New("no name") }
	check.OK(t, check.Err(buildAround(nil, env)))
	args := []string{`--cni-network-config={"type":"istio-cni","a":"__KUBERNETES_NODE_NAME__"}`}
	check.Fails(t, check.Err(buildAround(args, env)), "no name")
	check.OK(t, check.Err(buildAround(append(args, "--uninstall"), env)), "an uninstall reads no template")
}

func TestTemplate_Caveats(t *testing.T) {
	t.Parallel()
	c := mustLoad(t, cluster("EXCLUDE_NAMESPACES=a", "API_TIMEOUT=3s"),
		`--cni-network-config={"type":"istio-cni","kubernetes":{"kubeconfig":"/elsewhere"}}`)
	want := []string{
		"environment variable EXCLUDE_NAMESPACES: has no effect: a template replaces the stanza",
		"environment variable API_TIMEOUT: has no effect: a template replaces the stanza",
		`the template makes the plugin read kubeconfig "/elsewhere"; the agent writes "/var/run/istio-cni/istio-cni-kubeconfig" ` +
			`and, on the host, "/etc/cni/net.d/ZZZ-istio-cni-kubeconfig"`,
	}
	check.Diff(t, "result", want, c.warnings)
}

// FuzzTemplate: no template causes a panic, puts the token into an error, a warning or the printed configuration,
// or gives the plugin a stanza of another plugin.
func FuzzTemplate(f *testing.F) {
	const token = "s3cr3t-t0ken.QmFzZTY0__LOG_LEVEL__"
	f.Add(chart2020, "info")
	f.Add(`{"type":"istio-cni","plugin_log_level":{"a":"__SERVICEACCOUNT_TOKEN__"}}`, "warn")
	f.Add(`{"type":"istio-cni","__SERVICEACCOUNT_TOKEN__":"x","api_timeout":"__SERVICEACCOUNT_TOKEN__"}`, `"`)
	f.Add(`{"type":"istio-cni","kubernetes":{"kubeconfig":"__SERVICEACCOUNT_TOKEN__"}}`, "")
	f.Add(`{"type":"istio-cni","policy":{"k8s_auth_token":"__SERVICEACCOUNT_TOKEN__"},"kubernetes":{"kubeconfig":"/x"}}`, "")
	f.Add(`{"type":"istio-cni" __SERVICEACCOUNT_TOKEN__}`, "__X__")
	f.Add("__A____B______KUBECONFIG_FILEPATH__", "__SERVICEACCOUNT_TOKEN__")
	dir := f.TempDir()
	write(f, token+"\n", dir, "token")
	f.Fuzz(func(t *testing.T, template, level string) {
		if strings.Contains(template+level, "s3cr3t") {
			return // the token is in the template itself
		}
		c, err := build([]string{"--service-account-dir=" + dir}, cluster("CNI_NETWORK_CONFIG="+template, "LOG_LEVEL="+level))
		if err != nil {
			if strings.Contains(err.Error(), "s3cr3t") {
				t.Fatalf("the error holds the token: %v", err)
			}
			return
		}
		var log strings.Builder
		slog.New(slog.NewJSONHandler(&log, nil)).Info("configuration", slog.Any("config", c))
		slog.New(slog.NewTextHandler(&log, nil)).Info("configuration", slog.Any("config", &c))
		if text := fmt.Sprintf("%s %v %+v %s %v %q", &log, c, c, c, &c, c.warnings); strings.Contains(text, "s3cr3t") {
			t.Fatalf("the token is printed: %s", text)
		}
		if template == "" {
			return
		}
		var stanza map[string]json.RawMessage
		if err := json.Unmarshal(c.Want.Stanza.Template, &stanza); err != nil || string(stanza["type"]) == "" {
			t.Fatalf("template %q gives stanza %q: %v", template, c.Want.Stanza.Template, err)
		}
		if strings.Contains(template, tokenPlaceholder) && strings.Contains(string(c.Want.Stanza.Template), redacted) &&
			!strings.Contains(template+level, redacted) {
			t.Fatalf("the token's stand-in is left: %s", c.Want.Stanza.Template)
		}
	})
}
