// Command kubectl-istio_cni is the kubectl plugin "kubectl istio-cni"; see package fleet.
package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/completion"
	"github.com/meshcni/istio-cni/internal/applet/terminal"
	"github.com/meshcni/istio-cni/internal/role/fleet"
)

func main() {
	var progress io.Writer
	if terminal.Columns(os.Stderr) > 0 {
		progress = os.Stderr
	}
	args := os.Args[1:]
	if name := filepath.Base(os.Args[0]); strings.HasPrefix(name, "kubectl_complete-") { // kubectl's own completion calls it
		args = append([]string{completion.Command}, args...)
	}
	os.Exit(fleet.Run(applet.Call{
		Args: args, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Getenv: os.LookupEnv,
		Terminal: func() int { return terminal.Columns(os.Stdout) },
		Colours:  func() bool { return terminal.Colours(os.Stdout, os.LookupEnv) },
	}, progress))
}
