package installer

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
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

// around is an environment with real files.
func around(env map[string]string) environment {
	return environment{
		getenv:     func(name string) (string, bool) { v, ok := env[name]; return v, ok },
		readFile:   os.ReadFile,
		hostname:   func() (string, error) { return "host-1", nil },
		executable: func() (string, error) { return "/usr/local/bin/istio-cni", nil },
		selectors: func(text string) (json.RawMessage, error) {
			if !strings.HasPrefix(text, "- ") {
				return nil, errors.New("want a YAML list")
			}
			return json.RawMessage(`[{"podSelector":{},"namespaceSelector":{}}]`), nil
		},
	}
}

func mustLoad(t *testing.T, env map[string]string, args ...string) Config {
	t.Helper()
	c, err := load(args, around(env))
	if err != nil {
		t.Fatalf("load %q: %v", args, err)
	}
	return c
}

func mustFail(t *testing.T, env map[string]string, args []string, wants ...string) {
	t.Helper()
	_, err := load(args, around(env))
	if err == nil {
		t.Fatalf("load %q with %v: no error", args, env)
	}
	for _, want := range wants {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q:\n%v", want, err)
		}
	}
}

func write(t *testing.T, text string, path ...string) string {
	t.Helper()
	name := filepath.Join(path...)
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}
