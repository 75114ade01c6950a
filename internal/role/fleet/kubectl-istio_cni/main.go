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
	call := applet.Process()
	if name := filepath.Base(os.Args[0]); strings.HasPrefix(name, "kubectl_complete-") { // kubectl's own completion calls it
		call.Args = append([]string{completion.Command}, call.Args...)
	}
	os.Exit(fleet.Run(call, progress))
}
