package installer

import (
	"errors"
	"io/fs"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// live is the configuration that changes while the agent runs: a directory, and below it a ConfigMap.
type live struct {
	mu                   sync.Mutex
	directory, configMap map[string]string
	// seen are the keys that were there at any time.
	seen map[string]string
	// told is what was said last about each source, which is not repeated.
	told map[metrics.Source]string
}

// follow starts what keeps the configuration and the runtime in sight.
func (n *node) follow() {
	if n.cfg.ConfigDir != "" {
		n.start(n.followDirectory)
	}
	if n.api == nil {
		return
	}
	if n.cfg.ConfigMap != "" && n.cfg.Namespace != "" {
		n.start(n.followConfigMap)
	}
	if n.installation != nil && (n.cfg.Conf.Mode == ModeAuto || n.cfg.Conf.Mode == ModeDropIn) && n.cfg.NodeName != "" {
		n.start(n.askRuntime)
	}
	if n.cfg.RepairEnabled && n.cfg.Repair.Node != "" {
		n.start(n.repair)
	}
}

func (n *node) followConfigMap() {
	n.api.WatchConfigMap(n.background, n.cfg.Namespace, n.cfg.ConfigMap, kube.ConfigMapListener{
		OnUpdate: func(state kube.ConfigMapState) {
			n.log.Info("live configuration", slog.String("configmap", n.cfg.ConfigMap), slog.Bool("present", state.Present))
			n.apply(metrics.SourceConfigMap, func(l *live) {
				if l.configMap = state.Data; state.Present && l.configMap == nil {
					l.configMap = map[string]string{}
				}
			})
		},
		OnError: func(err error) {
			if err == nil {
				n.log.Info("the ConfigMap is in sight again", slog.String("configmap", n.cfg.ConfigMap))
				return
			}
			n.log.Warn("the ConfigMap cannot be read: what it said last stays in force",
				slog.String("configmap", n.cfg.ConfigMap), slog.String("error", err.Error()))
		},
	})
}

func (n *node) followDirectory() {
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

// readDirectory takes what the directory of live configuration says now, if there is one.
func (n *node) readDirectory() {
	if n.cfg.ConfigDir == "" {
		return
	}
	data, err := readKeys(n.cfg.ConfigDir)
	if err != nil {
		n.log.Warn("the directory of live configuration cannot be read: what it said last stays in force",
			slog.String("error", err.Error()))
		return
	}
	n.apply(metrics.SourceDirectory, func(l *live) { l.directory = data })
}

// readKeys reads a directory as the kubelet makes one of a ConfigMap: a file for each key.
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
		text, _, err := hostfs.ReadFile(filepath.Join(dir, name), maxTemplate)
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

// apply makes the configuration anew after a source has changed. Bad content changes nothing.
func (n *node) apply(from metrics.Source, change func(*live)) {
	n.live.mu.Lock()
	defer n.live.mu.Unlock()
	before := live{directory: n.live.directory, configMap: n.live.configMap}
	change(&n.live)
	cfg, restart, err := n.in.withOverlay(
		layer{name: "directory " + n.cfg.ConfigDir, data: n.live.directory},
		layer{name: "ConfigMap " + n.cfg.ConfigMap, data: n.live.configMap},
		layer{name: "live configuration of before", data: n.live.gone()})
	if err != nil {
		n.live.directory, n.live.configMap = before.directory, before.configMap
		n.tell(from, err.Error(), func(text string) {
			n.metrics.ConfigRefused(from)
			n.log.Error("live configuration is not usable: the last good one stays in force", slog.String("error", text))
			n.warn("CNIConfigRefused", "live configuration is not usable, the last good one stays in force: "+text)
		})
		return
	}
	slices.Sort(restart)
	n.tell(from, strings.Join(restart, ", "), func(keys string) {
		if keys != "" {
			n.log.Warn("live configuration differs in what takes a restart of the agent", slog.String("keys", keys))
		}
	})
	n.relayLevel.Set(slog.Level(cfg.Log.Plugin))
	n.stanza.Store(&cfg.Stanza)
	_ = n.judge() // readiness says it
	if n.installation != nil {
		n.installation.Update(cfg.Stanza)
	}
}

// gone are the keys that were taken out of a source, without a value: what the environment has of them is what the source
// said when the container was started. A source that is not there at all says nothing.
func (l *live) gone() map[string]string {
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

// tell says a thing about a source once.
func (n *node) tell(from metrics.Source, text string, say func(string)) {
	if n.live.told == nil {
		n.live.told = map[metrics.Source]string{}
	}
	if n.live.told[from] != text {
		n.live.told[from] = text
		say(text)
	}
}
