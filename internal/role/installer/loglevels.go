package installer

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

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
// level, in whatever order they are written.
func readScopes(text string) (scopes, error) {
	levels := map[string]pluginlog.Level{}
	var errs []error
	for pair := range strings.SplitSeq(text, ",") {
		scope, level, found := strings.Cut(strings.TrimSpace(pair), ":")
		if !found {
			scope, level = "default", scope
		}
		l, err := logLevel(level)
		if err != nil {
			errs = append(errs, fmt.Errorf("scope %q, level %q: %w", scope, level, err))
		}
		levels[scopeNow(scope)] = l
	}
	if len(errs) > 0 {
		return scopes{}, errors.New(oneLine(errors.Join(errs...)))
	}
	out := scopes{text: text}
	out.agent = firstLevel(levels, "cni-agent", "default", "all")
	out.plugin = firstLevel(levels, "cni-plugin", "default", "all")
	_, out.pluginNamed = levels["cni-plugin"]
	for _, scope := range slices.Sorted(maps.Keys(levels)) {
		if !slices.Contains([]string{"all", "default", "cni-agent", "cni-plugin"}, scope) {
			out.unknown = append(out.unknown, scope)
		}
	}
	return out, nil
}

// firstLevel is that of the first scope which has one; info is what remains.
func firstLevel(levels map[string]pluginlog.Level, of ...string) pluginlog.Level {
	for _, scope := range of {
		if l, ok := levels[scope]; ok {
			return l
		}
	}
	return pluginlog.LevelInfo
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
