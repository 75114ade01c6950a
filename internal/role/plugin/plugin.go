// Package plugin is the CNI plugin: it answers one command of the container runtime and ends.
//
// It promises that a pod of the mesh never starts unredirected, that every other pod passes without waiting for steps that only
// the mesh needs, that DEL and STATUS always succeed, and that stdout carries nothing but the CNI result or error. It keeps no state: the
// end of the namespace removes the rules.
//
// Start at Run, then add.go. enrol.go has the agent enrol a pod of the ambient mesh.
package plugin

import (
	"bytes"
	"context"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"k8s.io/utils/clock"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/pluginlog"
)

// wholeCall bounds an invocation: it is shorter than the runtimes' own limits, so that the pod's events have this plugin's error,
// which names the cause.
const wholeCall = 100 * time.Second

// logScope is the scope of the plugin's records in the node agent's log.
const logScope = "cni-plugin"

// Lookup requests a pod from the API server within a budget, and evaluates the enablement selectors of the stanza if ambient mode is
// enabled. It returns the number of requests that it sent, and a [KubeconfigError] if the kubeconfig cannot be used. Package early has
// the reason for this indirection.
type Lookup func(ctx context.Context, conf *cniconf.NetConf, pod agentapi.Key, budget time.Duration) (sidecar.Facts, int, error)

// KubeconfigError is the error of an unusable kubeconfig.
type KubeconfigError struct{ Err error }

// Error returns the text of the cause.
func (e KubeconfigError) Error() string { return e.Err.Error() }

// plugin is one invocation.
type plugin struct {
	// getenv returns a variable, "" without it.
	getenv func(name string) string
	// server returns the look-up when it is ready.
	server func() Lookup
	// answer buffers the result until no step can fail any more: stdout must have exactly one document.
	answer bytes.Buffer
	log    *pluginlog.Log
	// began is the start time of the call.
	began time.Time
}

// softMemoryLimit is the total in bytes above which the garbage collector works harder. Only pods with very long lists reach it.
const softMemoryLimit = 64 << 20

// Run runs the command in the environment and returns the exit code. It calls server at most once, if it needs the API server.
func Run(c applet.Call, server func() Lookup) int {
	// docs/parity.md promises a bound for pods with very long lists. The garbage collector's default pace does not keep it.
	debug.SetMemoryLimit(softMemoryLimit)
	getenv := func(name string) string { value, _ := c.Getenv(name); return value }
	p := &plugin{getenv: getenv, server: server, began: clock.RealClock{}.Now()}
	command, container := getenv("CNI_COMMAND"), printable.Text(getenv("CNI_CONTAINERID"), maxNamed)
	if command == "" {
		return usage(c)
	}
	p.log = pluginlog.New(c.Stderr, logScope)
	defer p.log.Close()
	log := p.log.Logger()
	if command == "DEL" || command == "GC" {
		// The kernel removes the rules with the namespace. DEL and GC read nothing, so they cannot fail on a missing input.
		log.Debug("nothing to do", "command", command, "container", container)
		return applet.ExitOK
	}
	failed := skel.PluginMainFuncsWithError(skel.CNIFuncs{
		Add:   p.guarded("ADD", p.add),
		Check: p.guarded("CHECK", p.check),
		// A failure would block all pods on the pod network, including the agent, which fixes most causes. A pod of the mesh
		// fails by its own ADD, and the agent reports the node.
		Status: func(*skel.CmdArgs) error { return nil },
	}, version.PluginSupports(cniconf.Versions()...), "")
	if failed == nil {
		if _, err := p.answer.WriteTo(c.Stdout); err != nil {
			log.Error("printing the result", "cause", err.Error())
			return applet.ExitError
		}
		return applet.ExitOK
	}
	failed = presentable(*failed)
	log.Error("failing", "command", command, "container", container,
		"code", failed.Code, "cause", failed.Msg, "details", failed.Details)
	if err := failed.Print(); err != nil {
		log.Error("printing the error", "cause", err.Error())
	}
	return applet.ExitError
}

const usageText = `istio-cni plugin: a CNI plugin, run by the container runtime, last in a chain.

The runtime starts it with CNI_COMMAND (ADD, DEL, CHECK, STATUS, GC or VERSION) and the other variables of the CNI
specification, reads its configuration from stdin, and answers on stdout. Its log goes to stderr, to the node agent
(log.sock) and to istio-cni.log, both in cni_agent_run_dir.

Configuration, as the last entry of "plugins" in the node's conflist:
  {"type": "istio-cni", "cni_agent_run_dir": "/var/run/istio-cni", "exclude_namespaces": ["kube-system"]}

EXIT CODES:
   %d  done
   %d  failed: the CNI error object is on stdout
   %d  a wrong argument

CODES OF THE CNI ERROR OBJECT:
%s
Supported CNI versions: %s
`

// usage prints the usage for a start without CNI_COMMAND, by hand.
func usage(c applet.Call) int {
	w, code := c.Stdout, applet.ExitOK
	if len(c.Args) > 0 && !slices.Contains([]string{"--help", "-h", "help"}, c.Args[0]) {
		w, code = c.Stderr, applet.ExitUsage
		_, _ = fmt.Fprintf(w, "istio-cni plugin takes no arguments, got %q\n\n", c.Args)
	}
	var lines strings.Builder
	for _, row := range codes {
		fmt.Fprintf(&lines, "   %-3d  %s\n", row.code, row.means)
	}
	_, _ = fmt.Fprintf(w, usageText, applet.ExitOK, applet.ExitError, applet.ExitUsage, lines.String(), strings.Join(cniconf.Versions(), " "))
	return code
}

// guarded bounds a command in time and converts a panic to an error: a runtime that gets no JSON shows nothing useful to the
// pod's owner.
func (p *plugin) guarded(name string, command func(context.Context, *skel.CmdArgs) error) func(*skel.CmdArgs) error {
	return func(args *skel.CmdArgs) (err error) {
		ctx, cancel := context.WithTimeoutCause(context.Background(), wholeCall,
			fmt.Errorf("the whole %s took longer than %s", name, wholeCall))
		defer cancel()
		defer func() {
			if r := recover(); r != nil {
				err = types.NewError(types.ErrInternal, fmt.Sprintf("istio-cni panicked in %s: %v", name, r), string(debug.Stack()))
			}
		}()
		return command(ctx, args)
	}
}

// configure parses the stanza and configures the log by it.
func (p *plugin) configure(stanza []byte) (cniconf.NetConf, error) {
	conf, err := cniconf.Parse(stanza)
	if err != nil {
		return conf, failure(types.ErrDecodingFailure, "istio-cni cannot read its configuration", err)
	}
	level, err := pluginlog.ParseLevel(conf.LogLevel)
	if err != nil {
		p.log.Logger().Warn("logging at level info", "cause", err.Error())
	}
	p.log.Configure(conf.RunDir, level)
	if conf.Problems != nil {
		p.log.Logger().Warn("the configuration cannot be used for pods of the mesh", "cause", conf.Problems.Error())
	}
	return conf, nil
}
