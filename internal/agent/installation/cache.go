package installation

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// sandbox is an entry of libcni's cache, one for each interface of a sandbox that was made and not yet removed.
type sandbox struct {
	// plugins are the types of those that made it, and that will be asked to remove it.
	plugins []string
	// netns is the network namespace, a path of the host; "" when the entry does not tell.
	netns string
}

// readSandbox reads an entry as libcni 0.8 and later write it ("cniCacheV1", pkg libcni, api.go). It reports whether it
// is one.
func readSandbox(data []byte) (sandbox, bool) {
	var entry struct {
		Kind   string `json:"kind"`
		Config []byte `json:"config"` // base64
		NetNS  string `json:"netns"`
		Result struct {
			Interfaces []struct {
				Sandbox string `json:"sandbox"`
			} `json:"interfaces"`
		} `json:"result"`
	}
	if json.Unmarshal(data, &entry) != nil || entry.Kind == "" {
		return sandbox{}, false
	}
	var config struct {
		Type    string `json:"type"`
		Plugins []struct {
			Type string `json:"type"`
		} `json:"plugins"`
	}
	if json.Unmarshal(entry.Config, &config) != nil {
		return sandbox{}, false
	}
	box := sandbox{netns: entry.NetNS, plugins: []string{config.Type}}
	for _, p := range config.Plugins {
		box.plugins = append(box.plugins, p.Type)
	}
	for _, i := range entry.Result.Interfaces {
		if box.netns == "" {
			box.netns = i.Sandbox
		}
	}
	return box, true
}

func (s sandbox) runs(plugin string) bool { return slices.Contains(s.plugins, plugin) }

// inContainer reports whether the directories of the node are seen through mounts, so that a path of the host means
// something else here.
func (c Config) inContainer() bool {
	return slices.ContainsFunc(append(slices.Clone(c.BinDirs), c.NetDir), func(dir string) bool {
		return slices.ContainsFunc(c.HostRoots, func(root string) bool { return within(dir, root) })
	})
}

// onHost finds a path of the host as this process sees it, and reports whether it can be seen at all: its parent is there,
// or the host's whole file system is. Outside of a container every path can be seen.
func (c Config) onHost(file string) (string, bool) {
	if !c.inContainer() {
		return file, true
	}
	for _, root := range c.HostRoots {
		for _, spelled := range []string{file, strings.TrimPrefix(file, "/var")} {
			// /var/run is a link to /run, which leads nowhere from inside of a container.
			if spelled != file && !strings.HasPrefix(spelled, "/run/") {
				continue
			}
			seen := filepath.Join(root, spelled)
			if there(filepath.Dir(seen)) || spelled == file && there(filepath.Join(root, "usr")) {
				return seen, true
			}
		}
	}
	return "", false
}

func there(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}

// alive reports whether a sandbox is still there, for all that can be told: its namespace is a file that goes with it.
func (c Config) alive(s sandbox) bool {
	if s.netns == "" || strings.HasPrefix(s.netns, "/proc/") {
		return true
	}
	file, seen := c.onHost(s.netns)
	if !seen {
		return true
	}
	_, err := os.Stat(file)
	return !os.IsNotExist(err)
}
