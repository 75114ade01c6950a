package installer

import (
	"encoding/json"
	"errors"

	"github.com/meshcni/istio-cni/internal/agent/nodeagent"
	"github.com/meshcni/istio-cni/internal/core/settings"
)

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
