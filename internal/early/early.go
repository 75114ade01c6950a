// Package early starts the CNI plugin before the rest of the program is initialised.
//
// The program links client-go, whose packages take a third of a start to initialise, and a call of the plugin rarely needs them: the
// node agent answers. Go initialises packages in the order of their import paths, each one after its imports. So this package, below
// github.com, comes before k8s.io/client-go and most of k8s.io, if nothing that it imports imports those: role/plugin is given its
// look-up at the API server. The plugin runs in init, and the process ends with it. Only a call that needs the API server lets
// initialisation go on, and goes on itself in main.
//
// It promises that a call is the same either way. TestCommand_EndsBeforeClientGo of role/plugin holds the order.
package early

import (
	"os"
	"path/filepath"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/role/plugin"
)

// Variable is the environment variable that every start of the plugin by a container runtime has.
const Variable = "CNI_COMMAND"

// begun is the call that began in init, nil for none.
var begun *call //nolint:gochecknoglobals // init has no other way to main

// call is a call of the plugin that runs while the program is initialised.
type call struct {
	// lookup is sent by main, code is the exit code.
	lookup chan plugin.Lookup
	code   chan int
}

// init runs the plugin if a runtime starts the program by its own name. Under another name main selects the role.
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

// Run ends the call that began in init, which needs the look-up, or runs a call now.
func Run(c applet.Call, lookup plugin.Lookup) int {
	if begun == nil {
		return plugin.Run(c, func() plugin.Lookup { return lookup })
	}
	begun.lookup <- lookup
	return <-begun.code
}
