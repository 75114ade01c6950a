package installer

import (
	"errors"
	"maps"
	"slices"

	"github.com/meshcni/istio-cni/internal/node/pluginlog"
)

// scopes is the value of --log_output_level.
type scopes struct {
	text          string
	agent, plugin pluginlog.Level
	// pluginNamed tells that the plugin's scope was named and not only the default.
	pluginNamed bool
	// unknown are scopes of other programs: charts pass one text to all of them.
	unknown []string
}

// readScopes reads SCOPE:LEVEL pairs between commas, or one LEVEL. "all" gives way to "default" and that to a scope's own
// level, in whatever order they are written; so does the name of before 1.23 to that of today.
func readScopes(text string) (scopes, error) {
	read, err := pluginlog.ParseScopes(text)
	if err != nil {
		return scopes{}, errors.New(oneLine(err))
	}
	levels := pluginlog.Scopes{}
	for _, scope := range slices.Sorted(maps.Keys(read)) {
		now := scopeNow(scope)
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

// scopeNow gives the name that a scope of versions before 1.23 has today.
func scopeNow(scope string) string {
	switch scope {
	case "install", "repair":
		return "cni-agent"
	case "cni":
		return "cni-plugin"
	}
	return scope
}

func logLevel(s string) (pluginlog.Level, error) {
	l, err := pluginlog.ParseLevel(s)
	if err != nil || s == "" {
		return 0, errors.New("want debug, info, warn, error, fatal or none")
	}
	return l, nil
}
