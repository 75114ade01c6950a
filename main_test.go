package main

import (
	"errors"
	"os"
	"os/exec"
	"strconv"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/role/fleet"
	"github.com/meshcni/istio-cni/internal/test/documenttest"
)

// Every name that the program answers to is the program itself, as on a node.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"istio-cni": main, "istio-iptables": main, "install-cni": main, "istio-cni-taint": main, "istio-cni-repair": main,
		"some-other-name": main, "kubectl-istio_cni": func() { os.Exit(fleet.Run(applet.Process(), nil)) },
	})
}

func TestScripts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("these tests work on network namespaces and need root")
	}
	testscript.Run(t, testscript.Params{
		Cmds: map[string]func(*testscript.TestScript, bool, []string){"status": status, "document": isDocument},
		Dir:  "internal/applet/testdata/script", RequireExplicitExec: true, RequireUniqueNames: true,
	})
}

// isDocument is the script command "document KIND FILE": the file has documents of that kind, as their schema wants.
func isDocument(ts *testscript.TestScript, _ bool, args []string) {
	ts.Check(documenttest.Err(args[0], ts.ReadFile(args[1])))
}

// status is the script command "status CODE PROGRAM ARGS…": the program must end with that exit code.
func status(ts *testscript.TestScript, _ bool, args []string) {
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	var exit *exec.ExitError
	if err := ts.Exec(args[1], args[2:]...); errors.As(err, &exit) {
		got = exit.ExitCode()
	} else {
		ts.Check(err)
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d", got, want)
	}
}
