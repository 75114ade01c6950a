package main

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"maps"
	"math/big"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
)

// variablesOf returns the environment variables in the help of a role.
func variablesOf(t *testing.T, role string) (variables []string) {
	t.Helper()
	text, code := output(t, nil, nil, product(t), role, "--help")
	for _, match := range regexp.MustCompile(`\$([A-Z][A-Z0-9_-]+)`).FindAllStringSubmatch(text, -1) {
		variables = append(variables, match[1])
	}
	if code != 0 || len(variables) < 20 {
		t.Fatalf("help of %s: exit %d, %q\n%s", role, code, variables, text)
	}
	return variables
}

// TestProgram_Variables compares the chart's environment variables with the help of the program.
func TestProgram_Variables(t *testing.T) {
	t.Parallel()
	variables, taintVariables := variablesOf(t, "install"), variablesOf(t, "taint")
	known := func(t *testing.T, variables, names []string, c corev1.Container) {
		t.Helper()
		for _, e := range c.Env {
			names = append(names, e.Name)
		}
		for _, name := range names {
			if !slices.Contains(variables, name) {
				t.Errorf("unknown variable of %s: %s", c.Name, name)
			}
		}
	}
	eachRendering(t, func(t *testing.T, r rendering) {
		if r.hasAgent() {
			known(t, variables, slices.Collect(maps.Keys(agentConfig(t, r))), agent(t, r).Spec.Template.Spec.Containers[0])
		}
		if r.has("Deployment/istio-system/istio-cni-taint") {
			known(t, taintVariables, nil, tainter(t, r).Spec.Template.Spec.Containers[0])
		}
	})
}

// environment returns the environment that the kubelet would set for the agent's container.
func environment(t *testing.T, r rendering) []string {
	t.Helper()
	all := agentConfig(t, r)
	for _, e := range agent(t, r).Spec.Template.Spec.Containers[0].Env {
		all[e.Name] = filled(e)
	}
	all["KUBERNETES_SERVICE_HOST"], all["KUBERNETES_SERVICE_PORT"] = "10.96.0.1", "443"
	var out []string
	for _, name := range slices.Sorted(maps.Keys(all)) {
		out = append(out, name+"="+all[name])
	}
	return out
}

// filled returns the value that the kubelet would set for a variable.
func filled(e corev1.EnvVar) string {
	switch {
	case e.ValueFrom == nil:
		return e.Value
	case e.ValueFrom.ResourceFieldRef != nil:
		return "268435456"
	}
	switch e.ValueFrom.FieldRef.FieldPath {
	case "spec.nodeName":
		return "node-1"
	case "metadata.name":
		return "istio-cni-node-abcde"
	case "metadata.namespace":
		return "istio-system"
	}
	return "unknown field " + e.ValueFrom.FieldRef.FieldPath
}

// node creates a directory with the files that an agent needs: CNI configurations and a ServiceAccount token.
func node(t *testing.T) (dir string, flags []string) {
	t.Helper()
	dir = t.TempDir()
	for name, text := range map[string]string{
		"net/10-bridge.conflist": `{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"bridge"}]}`,
		"net/10-calico.conflist": `{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"calico"}]}`,
		"sa/token":               "token", "bin/.keep": "",
		"sa/ca.crt": authority(t),
	} {
		path := filepath.Join(dir, name)
		noError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		noError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	return dir, []string{
		"--mounted-cni-net-dir=" + dir + "/net", "--mounted-cni-bin-dirs=" + dir + "/bin", "--service-account-dir=" + dir + "/sa",
		"--cni-agent-run-dir=" + dir + "/run",
	}
}

// authority returns a CA certificate. No test connects with it.
func authority(t *testing.T) string {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	noError(t, err)
	template := x509.Certificate{SerialNumber: big.NewInt(1), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, &template, &template, key.Public(), key)
	noError(t, err)
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

// TestProgram_AcceptsEveryRendering runs the agent and the controller with the settings of each rendering. The
// program validates all settings and exits with 2 if one is invalid.
func TestProgram_AcceptsEveryRendering(t *testing.T) {
	t.Parallel()
	program := product(t)
	eachRendering(t, func(t *testing.T, r rendering) {
		if r.hasAgent() {
			_, flags := node(t)
			args := slices.Concat([]string{"install", "--dry-run"}, flags, agent(t, r).Spec.Template.Spec.Containers[0].Args)
			if text, code := output(t, environment(t, r), nil, program, args...); code != 0 {
				t.Errorf("agent: exit %d\n%s", code, text)
			}
		}
		if r.has("Deployment/istio-system/istio-cni-taint") {
			args := slices.Concat([]string{"taint", "--dry-run", "--kubeconfig=/nonexistent"},
				tainter(t, r).Spec.Template.Spec.Containers[0].Args)
			for i := range args { // as the kubelet does
				args[i] = strings.ReplaceAll(args[i], "$(POD_NAMESPACE)", "istio-system")
			}
			// The settings are valid if it fails only at reading the kubeconfig.
			text, code := output(t, []string{"POD_NAMESPACE=istio-system", "POD_NAME=a", "NODE_NAME=b"}, nil, program, args...)
			if code != 1 || !strings.Contains(text, "/nonexistent") {
				t.Errorf("taint controller: exit %d\n%s", code, text)
			}
		}
	})
}

// TestProgram_SettingsReachTheNode checks the effect of some settings on the node's files.
func TestProgram_SettingsReachTheNode(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		values, file string
		want         []string
	}{
		"inline": {`excludeNamespaces: [kube-system, x]`, "10-bridge.conflist", []string{`"kube-system"`, `"x"`, `"istio-cni"`}},
		"owned": {
			`{confMode: owned, istioOwnedCNIConfigFileName: 01-m.conflist}`, "01-m.conflist", []string{`"bridge"`, `"istio-cni"`},
		},
		"standalone": {`{provider: multus, chained: false}`, "YYY-istio-cni.conf", []string{`"type": "istio-cni"`}},
		"openshift":  {`platform: openshift`, "istio-cni.conf", []string{`"type": "istio-cni"`}},
		"drop-in":    {`confMode: dropin`, "net/zzz-istio-cni.conf", []string{`"type": "istio-cni"`}},
		"settings":   {`{secondIPFamily: reject, sandboxedRuntimes: ["vm-*"], apiTimeout: 3s}`, "10-bridge.conflist", []string{`"reject"`, `"vm-*"`, `"3s"`}},
		"named":      {`cniConfFileName: 10-calico.conflist`, "10-calico.conflist", []string{`"istio-cni"`}},
		"template": {
			`networkConfig: '{"type": "istio-cni", "mine": "__KUBERNETES_NODE_NAME__",
"kubernetes": {"kubeconfig": "__KUBECONFIG_FILEPATH__"}}'`,
			"10-bridge.conflist",
			[]string{`"mine":"node-1"`},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, flags := node(t)
			r := mustRender(t, c.values)
			args := slices.Concat([]string{"install", "--once", "--uninstall-on-exit=never"}, flags)
			if text, code := output(t, environment(t, r), nil, product(t), args...); code != 0 {
				t.Fatalf("exit %d\n%s", code, text)
			}
			text, err := os.ReadFile(filepath.Join(dir, "net", c.file))
			noError(t, err)
			contains(t, string(text), c.want...)
		})
	}
}

// TestProgram_Ports compares probes, ports and policies with the program's settings.
func TestProgram_Ports(t *testing.T) {
	t.Parallel()
	text, _ := output(t, nil, nil, product(t), "taint", "--help")
	contains(t, text, "(default: 8001)", "(default: 15024)")
	r := mustRender(t, `{healthPort: 8123, monitoringPort: 9123, hostNetwork: true}`)
	c, config := agent(t, r).Spec.Template.Spec.Containers[0], agentConfig(t, r)
	if c.ReadinessProbe.HTTPGet.Port.IntValue() != 8123 || c.LivenessProbe.HTTPGet.Port.IntValue() != 8123 ||
		config["HEALTH_PORT"] != "8123" || config["MONITORING_PORT"] != "9123" || c.Ports[0].ContainerPort != 9123 ||
		agent(t, r).Spec.Template.Annotations["prometheus.io/port"] != "9123" {
		t.Errorf("container %+v, configuration %q", c, config)
	}
	if p := c.LivenessProbe; p.HTTPGet.Path != "/healthz" || p.TimeoutSeconds*p.PeriodSeconds*p.FailureThreshold < 5*20*6 {
		t.Errorf("the liveness probe is too strict: %+v", p)
	}
	if off := agent(t, mustRender(t, `livenessProbe: {enabled: false}`)); off.Spec.Template.Spec.Containers[0].LivenessProbe != nil {
		t.Error("a liveness probe that is switched off")
	}
	if off := agent(t, mustRender(t, `monitoringPort: 0`)); len(off.Spec.Template.Spec.Containers[0].Ports) != 0 ||
		off.Spec.Template.Annotations["prometheus.io/scrape"] != "" {
		t.Errorf("metrics are off: %+v", off.Spec.Template)
	}
}

// inTheManual checks that docs/reference.md lists each metric that PromQL expressions query, of which there are a number at least.
func inTheManual(t *testing.T, atLeast int, expressions string) {
	t.Helper()
	docs, err := os.ReadFile(top + "/docs/reference.md")
	noError(t, err)
	all := regexp.MustCompile(`(istio_cni_[a-z_]+?)(_sum|_count|_bucket)?\b`).FindAllStringSubmatch(expressions, -1)
	for _, metric := range all {
		if !strings.Contains(string(docs), "`"+metric[1]+"`") && !strings.Contains(string(docs), "`"+metric[1]+"{") {
			t.Errorf("%s is queried, and docs/reference.md does not list it", metric[0])
		}
	}
	if len(all) < atLeast {
		t.Errorf("only %d metrics are queried", len(all))
	}
}

// TestDashboard_MetricsInTheManual: docs/reference.md lists each metric of the dashboard.
func TestDashboard_MetricsInTheManual(t *testing.T) {
	t.Parallel()
	config := get[corev1.ConfigMap](t, mustRender(t, `monitoring: {dashboard: {enabled: true}}`),
		"ConfigMap/istio-system/istio-cni-dashboard")
	expressions := regexp.MustCompile(`"expr": .*`).FindAllString(config.Data["istio-cni.json"], -1)
	inTheManual(t, 15, strings.Join(expressions, "\n"))
}

// TestAlerts_KnownMetrics: the rules are of the operator's API, docs/reference.md lists each of their metrics, and each rule names the
// heading of a page; TestPages_Links of internal looks for these headings.
func TestAlerts_KnownMetrics(t *testing.T) {
	t.Parallel()
	rule := get[monitoringv1.PrometheusRule](t, example(t, "prometheus-rules.yaml"), "PrometheusRule/istio-system/istio-cni")
	var expressions strings.Builder
	for _, r := range rule.Spec.Groups[0].Rules {
		if url := r.Annotations["runbook_url"]; !regexp.MustCompile(`^https://github\.com/meshcni/istio-cni/blob/main/docs/[a-z]+\.md#[a-z-]+$`).MatchString(url) {
			t.Errorf("%s: runbook_url %q", r.Alert, url)
		}
		expressions.WriteString(r.Expr.String() + "\n")
	}
	inTheManual(t, 20, expressions.String())
}

// example returns the objects of a file in manifests/examples.
func example(t *testing.T, name string) rendering {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(top, "manifests/examples", name))
	noError(t, err)
	r, err := collect(map[string]string{name: string(text)})
	noError(t, err)
	return r
}

// TestExamples_Doctor: the objects are valid, the Job's command line too, and it has the rights for what it asks.
func TestExamples_Doctor(t *testing.T) {
	t.Parallel()
	r := example(t, "doctor.yaml")
	job := get[batchv1.Job](t, r, "Job/kube-system/istio-cni-doctor-worker-1").Spec.Template.Spec
	checkVolumes(t, job)
	container := job.Containers[0]
	args := slices.Clone(container.Args)
	for i := range args {
		args[i] = strings.Replace(args[i], container.VolumeMounts[0].MountPath, t.TempDir(), 1)
	}
	text, code := output(t, nil, nil, product(t), args...)
	if code != 0 || !strings.Contains(text, "! directories: there is neither a socket nor a configuration file of containerd or CRI-O") {
		t.Errorf("exit %d\n%s", code, text)
	}
}

// TestExamples_Values: the examples are among the samples, of which TestProgram_AcceptsEveryRendering runs the agent.
func TestExamples_Values(t *testing.T) {
	t.Parallel()
	all, err := samples(theChart(t), chartDir)
	noError(t, err)
	examples := map[string]string{}
	for _, s := range all {
		if strings.HasPrefix(s.Name, "examples/") {
			examples[s.Name] = s.Values[0]
		}
	}
	if len(examples) < 3 {
		t.Errorf("examples %q", slices.Collect(maps.Keys(examples)))
	}
	least, is := examples["examples/values-least-privilege.yaml"]
	if added := capabilities(t, least); !is || len(added) != 0 {
		t.Errorf("least privilege is an example: %t, capabilities %q", is, added)
	}
}
