package installer

import (
	"cmp"
	"errors"
	"maps"
	"slices"

	"github.com/meshcni/istio-cni/internal/node/pluginlog"
)

// scopes is the value of --log_output_level.
type scopes struct {
	text          string
	agent, plugin pluginlog.Level
	// pluginNamed reports whether the text names the plugin's scope and not only the default.
	pluginNamed bool
	// unknown are scopes of other programs: charts pass one text to all programs.
	unknown []string
}

// readScopes parses SCOPE:LEVEL pairs between commas, or one LEVEL. A scope's own level wins over "default", and "default" over
// "all", in any order; a scope's present name wins over its name before 1.23.
func readScopes(text string) (scopes, error) {
	read, err := pluginlog.ParseScopes(text)
	if err != nil {
		return scopes{}, errors.New(oneLine(err))
	}
	historic := map[string]string{"install": "cni-agent", "repair": "cni-agent", "cni": "cni-plugin"}
	levels := pluginlog.Scopes{}
	for _, scope := range slices.Sorted(maps.Keys(read)) {
		now := cmp.Or(historic[scope], scope)
		if _, named := read[now]; now == scope || !named {
			levels[now] = read[scope]
		}
	}
	out := scopes{text: text, agent: levels.Of("cni-agent"), plugin: levels.Of("cni-plugin")}
	_, out.pluginNamed = levels["cni-plugin"]
	for _, scope := range slices.Sorted(maps.Keys(levels)) {
		if !slices.Contains([]string{"all", "default", "cni-agent", "cni-plugin"}, scope) {
			out.unknown = append(out.unknown, scope)
		}
	}
	return out, nil
}

// liveLevels is the variable of levels that live configuration may change. It wins over the flag, which charts always pass.
const liveLevels = "LOG_OUTPUT_LEVEL"

// with returns the levels, replaced by others for the scopes that others names, or for all scopes if it names "default" or "all".
func (s scopes) with(others scopes) scopes {
	named, _ := pluginlog.ParseScopes(others.text)
	_, byDefault := named["default"]
	_, all := named["all"]
	switch {
	case others.text == "":
		return s
	case byDefault || all:
		return others
	}
	merged, _ := readScopes(s.text + "," + others.text) // both are valid
	return merged
}

func logLevel(s string) (pluginlog.Level, error) {
	l, err := pluginlog.ParseLevel(s)
	if err != nil || s == "" {
		return 0, errors.New("want debug, info, warn, error, fatal or none")
	}
	return l, nil
}
