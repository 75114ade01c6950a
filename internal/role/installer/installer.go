// Package installer is the role "istio-cni install", also called install-cni: the flags and variables of the node agent.
//
// It promises every flag and variable of Istio's agent in one table, that all problems are reported together before any change,
// and that neither an error nor the printed configuration has a token. Reading the configuration reads no files except
// a template.
//
// It never works on the node itself: package nodeagent does.
//
// Start at Run; the table is in settings.go, values that depend on several settings in complete.go.
package installer

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"os"

	"github.com/meshcni/istio-cni/internal/agent/logbuffer"
	"github.com/meshcni/istio-cni/internal/agent/nodeagent"
	"github.com/meshcni/istio-cni/internal/agent/standalone"
	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/settings"
)

// recentLog bounds the log that the agent remembers for bug reports, in bytes.
const recentLog = 2 << 20

// Run runs the role. It ends when the work is done or, for the agent that stays, with a signal.
func Run(c applet.Call) int {
	return service.Run(c, "install", helpHead, new(draft).groups(), func() (service.Service, error) {
		in, err := parse(c.Args, environment{getenv: c.Getenv, hostname: os.Hostname, executable: os.Executable})
		if err != nil {
			return service.Service{}, err
		}
		d, err := in.build()
		if err == nil && d.Install && d.Action != nodeagent.Uninstall {
			_, err = d.KubeconfigFile()
		}
		if err != nil {
			return service.Service{}, err
		}
		path, _ := c.Getenv("PATH")
		recent := logbuffer.New(recentLog)
		level := &slog.LevelVar{}
		level.Set(d.AgentLevel.Level())
		options := nodeagent.Options{
			Config: d.Config, Log: standalone.Logger(io.MultiWriter(recent, c.Stderr), level, d.logJSON), Level: level, Recent: recent, Stdout: c.Stdout,
			Version: applet.Version(), ToolPath: path, Reload: in.reload,
		}
		return service.Service{
			Config: d.Lines, Warnings: d.warnings, Log: options.Log,
			Work: func(ctx context.Context) error { return nodeagent.Run(ctx, options) },
		}, nil
	})
}

// environment has the sources of the configuration besides arguments.
type environment struct {
	getenv func(string) (string, bool)
	// hostname returns the host's name, which replaces an unknown node name in a template.
	hostname func() (string, error)
	// executable returns the path of this program.
	executable func() (string, error)
}

// input has the arguments and environment of the program. Each change of live configuration builds the configuration from it.
type input struct {
	environment
	settings.Input
}

// draft is an incomplete configuration, with settings that only help to complete it.
type draft struct {
	nodeagent.Config

	once, uninstall, chained, owned, groupRead bool

	scopes, liveScopes scopes
	logJSON            bool

	oldKubeconfig, serviceAccountDir, caFile string
	skipTLSVerify                            bool
	serverPort                               uint16

	ambientEnabled, unsafeUpgrade         bool
	ambientPods                           string
	template, templateFile, templateLevel string
	eventAddress, kubernetesNode          string
	// shownTemplate is the plugin configuration of the template without the token.
	shownTemplate json.RawMessage

	origins  settings.Origins
	warnings []string
}

// parse parses arguments. The only error is settings.ErrHelp: build reports invalid arguments with all other problems.
func parse(args []string, env environment) (input, error) {
	parsed, err := settings.Parse(settings.All(Settings()), args, env.getenv)
	return input{env, parsed}, err
}

// build builds a configuration. The error joins all problems, each with the flag or variable, the value and the cause.
func (in input) build(layers ...settings.Layer) (draft, error) {
	d := draft{}
	rows := settings.All(d.groups())
	var problems error
	d.origins, problems = in.Read(rows, layers...)
	for _, s := range rows {
		d.warn(in.Disagreement(s, d.origins[s.String()]))
	}
	problems = errors.Join(problems, in.complete(&d))
	d.Lines = settings.Lines(rows, d.origins)
	return d, problems
}

// reload builds the configuration with live values; the first layer that has a key counts. Layers affect only the plugin's
// configuration. Frozen lists the other keys whose values differ from those in force.
func (in input) reload(layers ...settings.Layer) (c nodeagent.Config, frozen []string, err error) {
	d, err := in.build(layers...)
	if err != nil {
		return nodeagent.Config{}, nil, err
	}
	if frozen, err = in.Frozen(settings.All(d.groups()), settings.All(Settings()), layers); err != nil {
		return nodeagent.Config{}, nil, err
	}
	return d.Config, frozen, nil
}

func (d *draft) warn(sentence string) {
	if sentence != "" {
		d.warnings = append(d.warnings, sentence)
	}
}

// at returns the origin of a setting, by its flag.
func (d *draft) at(name string) settings.Origin { return d.origins.Flag(name) }

// helpHead has verbs for the three exit codes.
const helpHead = `NAME:
   istio-cni install - node agent: installs the plugin on this node, keeps it installed and uninstalls it

USAGE:
   istio-cni install [flags]   (also: install-cni [flags])

EXAMPLES:
   install-cni --log_output_level=info --log_as_json
      entrypoint of the DaemonSet's container; settings come from the environment
   istio-cni install --once --uninstall-on-exit=never
      init container: install, leave everything in place, exit
   istio-cni install --dry-run --mounted-cni-net-dir=/etc/cni/net.d --mounted-cni-bin-dirs=/opt/cni/bin
      by hand on a node: print the changes without making them
   istio-cni install --uninstall --mounted-cni-net-dir=/etc/cni/net.d --mounted-cni-bin-dirs=/opt/cni/bin
      by hand on a node: uninstall

EXIT CODES:
   %d  done
   %d  failed: the node differs from the desired state
   %d  a bad value or flag; nothing was touched

A flag beats live configuration (--config-map, --config-dir; configuration of the plugin only), that beats the
environment, and that beats the default. An empty variable counts as unset. All problems are reported together.

`
