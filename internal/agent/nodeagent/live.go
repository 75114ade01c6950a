package nodeagent

import (
	"errors"
	"io/fs"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// maxKey bounds a file of live configuration, in bytes.
const maxKey = 1 << 20

// live is the configuration that changes while the agent runs: a directory, and below it a ConfigMap.
type live struct {
	mu                   sync.Mutex
	directory, configMap map[string]string
	// seen are the keys that were present at any time.
	seen map[string]string
	// reported is the last message about each source, so that reportOnce does not repeat it.
	reported map[metrics.Source]string
}

// startWatches starts the watches of live configuration and of the node's runtime, and race repair.
func (n *node) startWatches() {
	if n.cfg.ConfigDir != "" {
		n.start(n.watchDirectory)
	}
	if n.api == nil {
		return
	}
	if n.cfg.ConfigMap != "" && n.cfg.Namespace != "" {
		n.start(n.watchConfigMap)
	}
	if n.cfg.watchesRuntime() {
		n.start(n.askRuntime)
	}
	if n.cfg.RepairEnabled && n.cfg.Repair.Node != "" {
		n.start(n.repair)
	}
}

func (n *node) watchConfigMap() {
	n.api.WatchConfigMap(n.background, n.cfg.Namespace, n.cfg.ConfigMap, func(data map[string]string) {
		n.log.Info("live configuration", slog.String("configmap", n.cfg.ConfigMap), slog.Bool("present", data != nil))
		n.apply(metrics.SourceConfigMap, func(l *live) { l.configMap = data })
	}, func(err error) {
		if err == nil {
			n.log.Info("the ConfigMap can be read again", slog.String("configmap", n.cfg.ConfigMap))
			return
		}
		n.log.Warn("the ConfigMap cannot be read: its last content stays in force",
			slog.String("configmap", n.cfg.ConfigMap), slog.String("error", err.Error()))
	})
}

func (n *node) watchDirectory() {
	watch := n.watch()
	defer watch.Close()
	watch.Set(hostfs.Path{Name: n.cfg.ConfigDir}) // logged, and polled
	for {
		select {
		case <-n.background.Done():
			return
		case <-watch.Changed():
		}
		n.readDirectory()
	}
}

// readDirectory applies the current content of the directory of live configuration, if one is set.
func (n *node) readDirectory() {
	if n.cfg.ConfigDir == "" {
		return
	}
	data, err := readKeys(n.cfg.ConfigDir)
	if err != nil {
		n.log.Warn("the directory of live configuration cannot be read: its last content stays in force",
			slog.String("error", err.Error()))
		return
	}
	n.apply(metrics.SourceDirectory, func(l *live) { l.directory = data })
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
func (n *node) apply(from metrics.Source, change func(*live)) {
	n.live.mu.Lock()
	defer n.live.mu.Unlock()
	before := live{directory: n.live.directory, configMap: n.live.configMap}
	change(&n.live)
	cfg, frozen, err := n.Reload(
		settings.Layer{Name: "directory " + n.cfg.ConfigDir, Data: n.live.directory},
		settings.Layer{Name: "ConfigMap " + n.cfg.ConfigMap, Data: n.live.configMap},
		settings.Layer{Name: "live configuration of before", Data: n.live.removed()})
	if err != nil {
		n.live.directory, n.live.configMap = before.directory, before.configMap
		n.reportOnce(from, err.Error(), func(text string) {
			n.metrics.ConfigRefused(from)
			n.log.Error("live configuration is not usable: the last good one stays in force", slog.String("error", text))
			n.warn("CNIConfigRefused", "live configuration is not usable, the last good one stays in force: "+text)
		})
		return
	}
	n.reportOnce(from, strings.Join(frozen, ", "), func(keys string) {
		if keys != "" {
			n.log.Warn("live configuration differs in what takes a restart of the agent", slog.String("keys", keys))
		}
	})
	n.relayLevel.Set(slog.Level(cfg.PluginLevel))
	n.stanza.Store(&cfg.Want.Stanza)
	_ = n.checkVerdict() // reported as readiness
	if n.installation != nil {
		n.installation.Update(cfg.Want.Stanza)
	}
}

// removed returns the keys that were removed from a source, without a value: the environment still has their values from the
// start of the container. A missing source removes nothing.
func (l *live) removed() map[string]string {
	if l.seen == nil {
		l.seen = map[string]string{}
	}
	if l.directory == nil && l.configMap == nil {
		return nil
	}
	for _, source := range []map[string]string{l.directory, l.configMap} {
		for key := range source {
			l.seen[key] = ""
		}
	}
	return l.seen
}

// reportOnce calls report unless the text equals the last message about the source.
func (n *node) reportOnce(from metrics.Source, text string, report func(string)) {
	if n.live.reported == nil {
		n.live.reported = map[metrics.Source]string{}
	}
	if n.live.reported[from] != text {
		n.live.reported[from] = text
		report(text)
	}
}
