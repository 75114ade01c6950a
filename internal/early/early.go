// Package early starts the CNI plugin before the rest of the program is initialised.
//
// The program links client-go, and initialising its packages takes a third of a start. A call of the plugin rarely needs them because
// the node agent answers. Go initialises packages in the order of their import paths, each after its imports. This package, below
// github.com, therefore precedes k8s.io/client-go and most of k8s.io, provided that it imports neither: main passes role/plugin the
// look-up at the API server. The plugin runs in init, and the process ends there. A call that needs the API server lets
// initialisation continue and completes in main.
//
// It promises that a call is the same either way. TestCommand_EndsBeforeClientGo of role/plugin tests the order.
package early

import (
	"os"
	"path/filepath"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/role/plugin"
)

// Variable is the environment variable that a container runtime sets for each call of the plugin.
const Variable = "CNI_COMMAND"

// begun is the call that began in init, or nil.
var begun *call //nolint:gochecknoglobals // init can pass it to main in no other way

// call is a call of the plugin during the program's initialisation.
type call struct {
	// lookup receives main's look-up, code the exit code.
	lookup chan plugin.Lookup
	code   chan int
}

// init runs the plugin if a runtime starts the program under the plugin's name. Otherwise main selects the role.
func init() { //nolint:gochecknoinits // before client-go's
	if filepath.Base(os.Args[0]) != cniconf.PluginType || os.Getenv(Variable) == "" { //nolint:forbidigo // as main
		return
	}
	c, needed := &call{lookup: make(chan plugin.Lookup), code: make(chan int, 1)}, make(chan struct{})
	go func() {
		c.code <- plugin.Run(applet.Process(), func() plugin.Lookup { close(needed); return <-c.lookup })
	}()
	select {
	case code := <-c.code:
		os.Exit(code) //nolint:forbidigo // the rest of the program is not needed
	case <-needed:
		begun = c
	}
}

// Run completes the call that began in init and needs the look-up, or else runs a call now.
func Run(c applet.Call, lookup plugin.Lookup) int {
	if begun == nil {
		return plugin.Run(c, func() plugin.Lookup { return lookup })
	}
	begun.lookup <- lookup
	return <-begun.code
}
