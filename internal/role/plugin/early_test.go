package plugin_test

import (
	"bytes"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
)

// heavy are packages that a call which needs no API server ends before. More of k8s.io cannot be expected: Go initialises what needs
// little of the standard library before package net, which the plugin needs.
var heavy = []string{"k8s.io/client-go/", "k8s.io/api/", "k8s.io/apimachinery/pkg/apis/", "k8s.io/apimachinery/pkg/runtime "}

// initialised returns the packages of heavy that a call initialises, by the runtime's own word.
func (s fixture) initialised(t *testing.T, name, command string) (found []string) {
	t.Helper()
	var stderr bytes.Buffer
	cmd := s.node.Command(command, s.pod, s.input, "GODEBUG=inittrace=1")
	cmd.Args[0], cmd.Stderr = name, &stderr
	var stdout []byte
	if err := netns.Do(s.node.Netns, func() (err error) { stdout, err = cmd.Output(); return err }); err != nil {
		t.Fatalf("%s: %v\n%s%s", command, err, stdout, stderr.Bytes())
	}
	all := 0
	for line := range strings.Lines(stderr.String()) {
		path, ours := strings.CutPrefix(line, "init ")
		if !ours {
			continue
		}
		all++
		if slices.ContainsFunc(heavy, func(prefix string) bool { return strings.HasPrefix(path, prefix) }) {
			found = append(found, strings.Fields(path)[0])
		}
	}
	if all < 10 {
		t.Fatalf("%d packages are initialised: the runtime's trace is not read\n%s", all, stderr.Bytes())
	}
	return found
}

// TestCommand_EndsBeforeClientGo: client-go is initialised for a call that needs the API server, and for no other.
func TestCommand_EndsBeforeClientGo(t *testing.T) {
	for _, test := range []struct {
		command   string
		withAgent bool
		name      string
		needed    bool
	}{
		{"ADD", true, "/opt/cni/bin/istio-cni", false},
		{"CHECK", true, "istio-cni", false},
		{"DEL", false, "istio-cni", false},
		{"GC", false, "istio-cni", false},
		{"VERSION", false, "istio-cni", false},
		{"ADD", false, "istio-cni", true},
		{"ADD", true, "another-name", true},
	} {
		t.Run(fmt.Sprintf("%s of %s with agent=%t", test.command, filepath.Base(test.name), test.withAgent), func(t *testing.T) {
			s := newFixture(t, test.withAgent, "shop", chaintest.Sidecar, nil)
			if test.command == "CHECK" {
				s.initialised(t, test.name, "ADD")
			}
			found := s.initialised(t, test.name, test.command)
			if slices.Contains(found, "k8s.io/client-go/rest") != test.needed || !test.needed && found != nil {
				t.Errorf("initialised are %q, want client-go %t", found, test.needed)
			}
			if test.command == "ADD" && !s.pod.Captured(t) {
				t.Error("the pod is not redirected")
			}
		})
	}
}
