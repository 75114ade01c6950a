package nodeagent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"

	"k8s.io/utils/clock"

	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/node/pluginlog"
)

// The scopes have Istio's names.
const (
	scopeAgent  = "cni-agent"
	scopePlugin = "cni-plugin"
)

// scopeInfo is a scope in the API of Istio's introspection port, which istioctl admin log uses.
type scopeInfo struct {
	Name            string `json:"name"`
	Description     string `json:"description"`
	OutputLevel     string `json:"output_level"`
	StackTraceLevel string `json:"stack_trace_level"`
	LogCallers      bool   `json:"log_callers"`
}

// maxScope bounds the body of a request, mostNamed a quoted part of it, in bytes.
const (
	maxScope  = 4 << 10
	mostNamed = 64
)

// levels are the levels of a configuration by scope.
func (c Config) levels() map[string]pluginlog.Level {
	return map[string]pluginlog.Level{scopeAgent: c.AgentLevel, scopePlugin: c.PluginLevel}
}

// configure puts a configuration in force. A level that a request set holds until the configured level changes. The caller
// holds n.live.mu.
func (n *node) configure(c Config) {
	before := n.live.config.levels()
	for scope, level := range c.levels() {
		if before[scope] != level {
			n.live.levels[scope] = level
		}
	}
	n.live.config = c
	n.enforce()
}

// enforce passes levels and stanza on. The caller holds n.live.mu.
func (n *node) enforce() {
	n.Level.Set(slog.Level(n.live.levels[scopeAgent]))
	n.relayLevel.Set(slog.Level(n.live.levels[scopePlugin]))
	written := n.live.config.Want.Stanza
	written.LogLevel = n.live.levels[scopePlugin].String()
	read, err := written.NetConf()
	read.Ambient = n.live.config.Ambient.Config
	selectors, bad := selector.ParseAmbient(read.EnablementSelectors)
	before := n.stanza.Load()
	if bad != nil && before != nil {
		selectors = before.selectors // none would release all pods
	}
	n.stanza.Store(&stanza{written, read, selectors, errors.Join(err, bad)})
	if n.pods != nil && string(before.read.EnablementSelectors) != string(read.EnablementSelectors) {
		n.pods.Reselect()
	}
	_ = n.checkVerdict() // reported as readiness
	if n.installation != nil {
		n.installation.Change(func(w *cniconf.Want) { w.Stanza = written })
	}
}

// scopeHandlers returns the handlers of the scopes' levels by their patterns.
func (n *node) scopeHandlers() map[string]http.Handler {
	all := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { answer(w, n.scopeInfos()) })
	return map[string]http.Handler{
		"GET /scopej": all, "GET /scopej/{$}": all,
		"GET /scopej/{scope}": http.HandlerFunc(n.getScope), "PUT /scopej/{scope}": http.HandlerFunc(n.putScope),
	}
}

func answer(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // the client can have closed the connection
}

func (n *node) scopeInfos() []scopeInfo {
	n.live.mu.Lock()
	defer n.live.mu.Unlock()
	var infos []scopeInfo
	for _, s := range [][2]string{ // in the order of their names
		{scopeAgent, "the node agent, with race repair and audit"},
		{scopePlugin, "the plugin on this node: what it logs from its next call on, and what is relayed"},
	} {
		infos = append(infos, scopeInfo{Name: s[0], Description: s[1], OutputLevel: n.live.levels[s[0]].String(), StackTraceLevel: "none"})
	}
	return infos
}

func (n *node) getScope(w http.ResponseWriter, r *http.Request) {
	for _, info := range n.scopeInfos() {
		if info.Name == r.PathValue("scope") {
			answer(w, info)
			return
		}
	}
	refuse(w, fmt.Errorf("scope %s: want %s or %s", printable.Quote(r.PathValue("scope"), mostNamed), scopeAgent, scopePlugin))
}

func refuse(w http.ResponseWriter, err error) { http.Error(w, err.Error(), http.StatusBadRequest) }

// putScope sets the level of a scope, or of both, until the agent ends or the configured level changes.
func (n *node) putScope(w http.ResponseWriter, r *http.Request) {
	var wanted scopeInfo
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxScope)).Decode(&wanted); err != nil {
		refuse(w, fmt.Errorf(`want a JSON object like {"output_level": "debug"}: %w`, err))
		return
	}
	var names []string
	switch name := r.PathValue("scope"); name {
	case scopeAgent, scopePlugin:
		names = []string{name}
	case "default", "all":
		names = []string{scopeAgent, scopePlugin}
	default:
		refuse(w, fmt.Errorf("scope %s: want %s, %s, default or all", printable.Quote(name, mostNamed), scopeAgent, scopePlugin))
		return
	}
	if wanted.OutputLevel == "" && wanted.StackTraceLevel != "" {
		w.WriteHeader(http.StatusAccepted) // no record has a stack trace
		return
	}
	level, err := pluginlog.ParseLevel(wanted.OutputLevel)
	if err != nil || wanted.OutputLevel == "" {
		refuse(w, fmt.Errorf("output_level %s: want debug, info, warn, error, fatal or none", printable.Quote(wanted.OutputLevel, mostNamed)))
		return
	}
	n.setLevels(r.Context(), names, level)
	w.WriteHeader(http.StatusAccepted)
}

func (n *node) setLevels(ctx context.Context, names []string, level pluginlog.Level) {
	n.live.mu.Lock()
	defer n.live.mu.Unlock()
	for _, name := range names {
		n.live.levels[name] = level
	}
	n.enforce()
	record := slog.NewRecord(clock.RealClock{}.Now(), slog.LevelInfo, "a request to the introspection port set the log level", 0)
	record.Add(slog.String("scopes", strings.Join(names, ", ")), slog.String("output_level", level.String()))
	_ = n.Log.Handler().Handle(ctx, record) // whatever the level is now
}
