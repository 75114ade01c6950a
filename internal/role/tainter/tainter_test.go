package tainter

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/meshcni/istio-cni/internal/agent/standalone"
	"github.com/meshcni/istio-cni/internal/agent/taint"
	"github.com/meshcni/istio-cni/internal/core/readiness"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// cluster returns the environment of a container in Kubernetes, with additional variables.
func cluster(more ...string) func(string) (string, bool) {
	env := map[string]string{"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443", "HOSTNAME": "pod-1"}
	for _, pair := range more {
		name, value, _ := strings.Cut(pair, "=")
		env[name] = value
	}
	return func(name string) (string, bool) { v, ok := env[name]; return v, ok }
}

func nothing(string) (string, bool) { return "", false }

func legacyDefaults() Config {
	return Config{
		Process: standalone.Process{HealthPort: 8001, MonitoringPort: 15024}, Mode: Legacy, Daemon: true, LeaderElect: true,
		Taint: taint.Options{ConfigMap: taint.ConfigMap{Namespace: "kube-system", Name: "single"}, Policy: readiness.Policy{
			Taint: readiness.Taint{Key: "NodeReadiness", Effect: "NoSchedule"}, AddTaint: true,
			RequireNodeReady: true, GracePeriod: 2 * time.Minute, Settle: 2 * time.Minute,
		}},
		Lease: taint.Lease{
			Namespace: "kube-system", Name: "istio-taint-lock", Identity: "pod-1",
			Duration: 60 * time.Second, Deadline: 15 * time.Second, Retry: 5 * time.Second,
		},
	}
}

func untaintDefaults() Config {
	return Config{
		Process: standalone.Process{HealthPort: 8001, MonitoringPort: 15024}, Mode: Untaint, Daemon: true, LeaderElect: true,
		Taint: taint.Options{Policy: readiness.Policy{
			Taint:     readiness.Taint{Key: "cni.istio.io/not-ready", Value: "true", Effect: "NoSchedule"},
			AnyEffect: true, GracePeriod: 2 * time.Minute, Settle: 2 * time.Minute,
			Requirements: []readiness.Requirement{{
				Name: "k8s-app=istio-cni-node", Namespaces: []string{"istio-system"}, Selector: "k8s-app=istio-cni-node",
			}},
		}},
		Lease: taint.Lease{
			Namespace: "istio-system", Name: "istio-node-untaint", Identity: "pod-1",
			Duration: 30 * time.Second, Deadline: 15 * time.Second, Retry: 7500 * time.Millisecond,
		},
	}
}

func TestLoad_Settings(t *testing.T) {
	legacy := func(change func(*Config)) Config { c := legacyDefaults(); change(&c); return c }
	untaint := func(change func(*Config)) Config { c := untaintDefaults(); change(&c); return c }
	for _, test := range []struct {
		name string
		env  func(string) (string, bool)
		args []string
		want Config
	}{
		{"nothing given", cluster(), nil, untaintDefaults()},
		{"legacy defaults", cluster(), []string{"--mode=legacy"}, legacyDefaults()},
		{"legacy by a flag", cluster(), []string{"--configmap-name", "x"}, legacy(func(c *Config) { c.Taint.ConfigMap.Name = "x" })},
		{
			"legacy by the chart's variables, which have dashes",
			cluster("TAINT_RUN-AS-DAEMON=false", "TAINT_CONFIGMAP-NAME=istio-cni-taint-configmap", "TAINT_CONFIGMAP-NAMESPACE=istio-system"), nil,
			legacy(func(c *Config) {
				c.Daemon, c.Taint.ConfigMap = false, taint.ConfigMap{Namespace: "istio-system", Name: "istio-cni-taint-configmap"}
			}),
		},
		{
			"the same with underscores, and a flag that wins over them",
			cluster("TAINT_RUN_AS_DAEMON=false", "TAINT_CONFIGMAP_NAME=x", "TAINT_CONFIGMAP_NAMESPACE=y"),
			[]string{"--configmap-name=z", "--run-as-daemon"},
			legacy(func(c *Config) { c.Taint.ConfigMap = taint.ConfigMap{Namespace: "y", Name: "z"} }),
		},
		{
			"the variable of istiod",
			cluster("PILOT_NODE_UNTAINT_CONTROLLERS_TAINT_NAME=example.com/x"), nil,
			untaint(func(c *Config) { c.Taint.Policy.Taint.Key = "example.com/x" }),
		},
		{
			"the pod's namespace",
			cluster("POD_NAMESPACE=mesh"), nil,
			untaint(func(c *Config) {
				c.Lease.Namespace, c.Taint.Policy.Requirements[0].Namespaces = "mesh", []string{"mesh"}
			}),
		},
		{"the pod's namespace does not change mode legacy", cluster("POD_NAMESPACE=mesh"), []string{"--mode", "legacy"}, legacyDefaults()},
		{
			"several namespaces, a selector and an effect",
			cluster(),
			[]string{"--namespace=a,b", "--namespaces=ignored", "--namespace", "c", "--selector", "app in (x,y)", "--effect=NoExecute", "--add", "--hysteresis=0"},
			untaint(func(c *Config) {
				p := &c.Taint.Policy
				p.Requirements = []readiness.Requirement{{Name: "app in (x,y)", Namespaces: []string{"a", "b", "c"}, Selector: "app in (x,y)"}}
				p.Taint.Effect, p.AnyEffect, p.AddTaint, p.GracePeriod = "NoExecute", false, true, 0
			}),
		},
		{"all namespaces", cluster(), []string{"--namespace=*"}, untaint(func(c *Config) { c.Taint.Policy.Requirements[0].Namespaces = []string{""} })},
		{
			"other settings",
			cluster("LOG_LEVEL=x:error,default:debug"),
			[]string{
				"--dry-run", "--leader-elect=false", "--node-condition=cni.istio.io/MeshCNIReady", "--require-node-ready", "--kubeconfig=/k",
				"--health-port=0", "--monitoring-port=0", "--log_as_json", "--taint-value=",
			},
			untaint(func(c *Config) {
				c.DryRun, c.LeaderElect, c.Process = true, false, standalone.Process{Kubeconfig: "/k", LogJSON: true, LogLevel: -4}
				c.Taint.Condition, c.Taint.Policy.RequireNodeReady, c.Taint.Policy.Taint.Value = "cni.istio.io/MeshCNIReady", true, ""
			}),
		},
		{
			"settings of the other mode are reported", cluster(),
			[]string{"--mode=legacy", "--namespace=x"},
			legacy(func(c *Config) { c.Warnings = []string{"flag --namespace has no effect in mode legacy"} }),
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := load(test.args, test.env)
			check.OK(t, err)
			check.Diff(t, "result", test.want, got, cmpopts.IgnoreUnexported(Config{}))
		})
	}
}

func TestLoad_AllProblems(t *testing.T) {
	_, err := load([]string{
		"--configmap-name=x", "--namespace=a", "stray", "--effect=Sometimes", "--hysteresis", "-1s", "--nope", "--selector=a in b", "--taint-name=a b",
		"--health-port=99999", "--lease-duration=10s", "--add=perhaps", "--node-condition=/",
	}, nothing)
	check.Fails(t, err,
		"flag --configmap-name is of mode legacy and flag --namespace of mode untaint: choose one by --mode", `stray argument "stray"`,
		`flag --effect: value "Sometimes": want one of NoSchedule`, `flag --hysteresis: value "-1s"`, "-nope", `flag --selector: value "a in b"`,
		`flag --taint-name: value "a b"`, `flag --health-port: value "99999"`, "longer than --renew-deadline", `flag --add: value "perhaps"`,
		"flag --node-condition", "KUBERNETES_SERVICE_HOST")
	if _, err := load([]string{"--mode=x"}, cluster()); err == nil || !strings.Contains(err.Error(), `value "x": want one of auto, legacy, untaint`) ||
		strings.Contains(err.Error(), "\n") {
		t.Errorf("a bad mode: %v", err)
	}
}

// TestLoad_Variables: variables that a chart of any release sets keep their meaning.
func TestLoad_Variables(t *testing.T) {
	var got []string
	for _, s := range new(Config).rows() {
		got = append(got, s.Env...)
	}
	want := strings.Fields(`TAINT_MODE TAINT_DRY_RUN TAINT_RUN-AS-DAEMON TAINT_RUN_AS_DAEMON TAINT_CONFIGMAP-NAMESPACE TAINT_CONFIGMAP_NAMESPACE
		TAINT_CONFIGMAP-NAME TAINT_CONFIGMAP_NAME TAINT_NAMESPACE TAINT_NAMESPACES TAINT_SELECTOR TAINT_NAME
		PILOT_NODE_UNTAINT_CONTROLLERS_TAINT_NAME TAINT_VALUE TAINT_EFFECT TAINT_ADD TAINT_HYSTERESIS TAINT_SETTLE TAINT_REQUIRE_NODE_READY
		TAINT_NODE_CONDITION TAINT_LEADER_ELECT TAINT_LEASE_NAMESPACE TAINT_LEASE_NAME TAINT_LEASE_DURATION TAINT_RENEW_DEADLINE
		TAINT_RETRY_PERIOD KUBECONFIG TAINT_HEALTH_PORT TAINT_MONITORING_PORT LOG_LEVEL LOG_AS_JSON POD_NAMESPACE POD_NAME HOSTNAME
		KUBERNETES_NODE_NAME NODE_NAME`)
	check.Diff(t, "result", want, got)
}
