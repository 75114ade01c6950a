// Command kubectl-istio_cni is the kubectl plugin "kubectl istio-cni"; see package fleet.
package main

import (
	"io"
	"os"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/terminal"
	"github.com/meshcni/istio-cni/internal/role/fleet"
)

func main() {
	var progress io.Writer
	if terminal.Columns(os.Stderr) > 0 {
		progress = os.Stderr
	}
	os.Exit(fleet.Run(applet.Call{
		Args: os.Args[1:], Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.LookupEnv,
		Terminal: func() int { return terminal.Columns(os.Stdout) },
		Colours:  func() bool { return terminal.Colours(os.Stdout, os.LookupEnv) },
	}, progress))
}
