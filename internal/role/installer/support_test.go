package installer

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/test/check"
)

// cluster is the environment that Kubernetes gives to each container.
func cluster(more ...string) map[string]string {
	env := map[string]string{
		"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443", "POD_NAMESPACE": "istio-system",
		"REPAIR_ENABLED": "false",
	}
	for _, pair := range more {
		name, value, _ := strings.Cut(pair, "=")
		env[name] = value
	}
	return env
}

// around is an environment with a host and a program of fixed names.
func around(env map[string]string) environment {
	return environment{
		getenv:     func(name string) (string, bool) { v, ok := env[name]; return v, ok },
		hostname:   func() (string, error) { return "host-1", nil },
		executable: func() (string, error) { return "/usr/local/bin/istio-cni", nil },
	}
}

// build makes the configuration of arguments and an environment.
func build(args []string, env map[string]string) (draft, error) {
	return buildAround(args, around(env))
}

func buildAround(args []string, env environment) (draft, error) {
	in, err := parse(args, env)
	if err != nil {
		return draft{}, err
	}
	return in.build()
}

func mustLoad(t *testing.T, env map[string]string, args ...string) draft {
	t.Helper()
	d, err := build(args, env)
	check.OK(t, err, args)
	return d
}

func mustFail(t *testing.T, env map[string]string, args []string, wants ...string) {
	t.Helper()
	_, err := build(args, env)
	for _, want := range wants {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q with %v: error lacks %q:\n%v", args, env, want, err)
		}
	}
}

func write(tb testing.TB, text string, path ...string) string {
	tb.Helper()
	name := filepath.Join(path...)
	check.OK(tb, os.WriteFile(name, []byte(text), 0o600))
	return name
}
