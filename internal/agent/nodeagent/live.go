package nodeagent

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/pluginlog"
)

// maxKey bounds a file of live configuration, in bytes.
const maxKey = 1 << 20

// live is the configuration that changes while the agent runs: a directory, whose values win over a ConfigMap.
type live struct {
	mu sync.Mutex
	// data has the content of each source, nil for a source that does not exist.
	data map[metrics.Source]map[string]string
	// seen are the keys that have ever been present.
	seen map[string]string
	// reported is the last message about each source, to avoid repetition.
	reported map[metrics.Source]string
	// levels are the levels in force by scope, and config has the configured ones.
	levels map[string]pluginlog.Level
	config Config
}

func newLive() live {
	return live{
		data: map[metrics.Source]map[string]string{}, seen: map[string]string{}, reported: map[metrics.Source]string{},
		levels: map[string]pluginlog.Level{},
	}
}

// startWatches starts the watches of live configuration and of the node's runtime, and race repair.
func (n *node) startWatches() {
	if n.Config.ConfigDir != "" {
		n.work.Go(func() { n.onChange([]string{n.Config.ConfigDir}, n.readDirectory) })
	}
	if n.api == nil {
		n.canAudit() // logs the reason
		return
	}
	if n.Config.ConfigMap != "" && n.Config.Namespace != "" {
		n.work.Go(n.watchConfigMap)
	}
	if n.Config.watchesRuntime() {
		n.work.Go(n.askRuntime)
	}
	n.startRepair()
}

// The pauses after a refusal of the ConfigMap: a role can arrive shortly after the agent, later requests are rare. Istio's chart
// grants no such right.
const (
	firstRefusalPause = time.Minute
	laterRefusalPause = time.Hour
)

// watchConfigMap follows the ConfigMap. It logs once that the agent may not read the ConfigMap.
func (n *node) watchConfigMap() {
	first := true
	pauses := wait.Backoff{Duration: firstRefusalPause, Factor: float64(laterRefusalPause / firstRefusalPause), Steps: 1}
	_ = pauses.DelayFunc().Until(n.background, true, true, func(ctx context.Context) (done bool, _ error) {
		refused := n.followConfigMap(ctx, first)
		first = false
		return !refused, nil
	})
}

// followConfigMap applies the ConfigMap until the agent ends. It returns true if the API server refuses access before the
// agent has read the ConfigMap.
func (n *node) followConfigMap(ctx context.Context, first bool) (refused bool) {
	ctx, end := context.WithCancel(ctx)
	defer end()
	read := false
	n.api.WatchConfigMap(ctx, n.Config.Namespace, n.Config.ConfigMap, func(data map[string]string) {
		read = true
		n.Log.InfoContext(ctx, "live configuration",
			slog.String("configmap", n.Config.ConfigMap), slog.Bool("present", data != nil))
		n.apply(metrics.SourceConfigMap, data)
	}, func(err error) {
		switch {
		case err == nil:
			n.Log.InfoContext(ctx, "the ConfigMap can be read again", slog.String("configmap", n.Config.ConfigMap))
		case !read && kube.ClassOf(err) == kube.Forbidden:
			refused = true
			end()
			if first {
				n.Log.InfoContext(ctx, "live configuration is off: the agent has no right to list and watch its ConfigMap, "+
					"whose changes take a restart of the agent", slog.String("configmap", n.Config.ConfigMap))
			}
		default:
			n.Log.WarnContext(ctx, "the ConfigMap cannot be read: its last content stays in force",
				slog.String("configmap", n.Config.ConfigMap), slog.String("error", err.Error()))
		}
	})
	return refused
}

// readDirectory applies the current content of the directory of live configuration, if one is set.
func (n *node) readDirectory() {
	if n.Config.ConfigDir == "" {
		return
	}
	data, err := readKeys(n.Config.ConfigDir)
	if err != nil {
		n.Log.Warn("the directory of live configuration cannot be read: its last content stays in force",
			slog.String("error", err.Error()))
		return
	}
	n.apply(metrics.SourceDirectory, data)
}

// readKeys reads a directory in the kubelet's layout of a ConfigMap volume: a file for each key.
func readKeys(dir string) (map[string]string, error) {
	names, err := hostfs.List(dir, func(name string) bool { return !strings.HasPrefix(name, ".") })
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // no directory has no keys
	}
	if err != nil {
		return nil, err
	}
	data := map[string]string{}
	for _, name := range names {
		text, _, err := hostfs.ReadFile(filepath.Join(dir, name), maxKey)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, hostfs.ErrNotRegular) {
			continue
		}
		if err != nil {
			return nil, err
		}
		data[name] = string(text)
	}
	return data, nil
}

// apply computes the configuration after a change of a source. Invalid content changes nothing.
func (n *node) apply(from metrics.Source, data map[string]string) {
	l := &n.live
	l.mu.Lock()
	defer l.mu.Unlock()
	before := l.data[from]
	l.data[from] = data
	cfg, frozen, err := n.Reload(
		settings.Layer{Name: "directory " + n.Config.ConfigDir, Data: l.data[metrics.SourceDirectory]},
		settings.Layer{Name: "ConfigMap " + n.Config.ConfigMap, Data: l.data[metrics.SourceConfigMap]},
		settings.Layer{Name: "previous live configuration", Data: l.removed()})
	if err != nil {
		l.data[from] = before
		if l.isNew(from, err.Error()) {
			n.metrics.ConfigRefused(from)
			n.Log.Error("live configuration is not usable: the last good one stays in force", slog.String("error", err.Error()))
			n.warn(eventRefused, "live configuration is not usable, the last good one stays in force: "+err.Error())
		}
		return
	}
	if keys := strings.Join(frozen, ", "); l.isNew(from, keys) && keys != "" {
		n.Log.Warn("live configuration differs in what takes a restart of the agent", slog.String("keys", keys))
	}
	n.configure(cfg)
}

// removed returns the keys that were removed from a source, without a value: the environment still has their values from the
// start of the container. A missing source removes nothing.
func (l *live) removed() map[string]string {
	var removed map[string]string
	for _, source := range l.data {
		for key := range source {
			l.seen[key] = ""
		}
		if source != nil {
			removed = l.seen
		}
	}
	return removed
}

// isNew reports whether a message differs from the last message about the same source.
func (l *live) isNew(from metrics.Source, message string) bool {
	last := l.reported[from]
	l.reported[from] = message
	return last != message
}
