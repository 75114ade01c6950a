package tainter

import (
	"fmt"
	"strings"

	"github.com/meshcni/istio-cni/internal/applet/settings"
)

// helpHead has verbs for the three exit codes.
const helpHead = `NAME:
   istio-cni taint - controller: keeps nodes free of new pods by a taint until the CNI agent is ready there

USAGE:
   istio-cni taint [flags]   (also: istio-cni-taint [flags])

EXAMPLES:
   istio-cni taint --namespace=kube-system
      instead of istiod's untaint controller: removes cni.istio.io/not-ready from nodes whose agent is ready
   istio-cni taint --add
      the same, and puts it back when a node is rebooted or its agent is gone for longer than --hysteresis
   istio-cni-taint --configmap-namespace=istio-system --configmap-name=istio-cni-taint-configmap
      instead of the taint controller of Istio 1.8 to 1.17
   istio-cni taint --kubeconfig=$HOME/.kube/config --dry-run
      by hand: say what would be done

EXIT CODES:
   %d  done
   %d  failed: some node is not as wanted
   %d  a bad value or flag; nothing was asked or changed

A flag beats the environment, and that beats the default. An empty variable counts as unset. All problems are reported
together.

FLAGS:
`

// help is the text of --help.
func help() string {
	var b strings.Builder
	fmt.Fprintf(&b, helpHead, exitOK, exitFailed, exitUsage)
	settings.Help(&b, (&draft{}).rows())
	return b.String()
}
