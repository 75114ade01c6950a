// Package cnicache reads libcni's cache (github.com/containernetworking/cni, pkg libcni, api.go): a directory of the
// container runtime with one file for each network and interface of each sandbox that was made and not yet removed.
//
// It promises bounded memory for any content of the directory, and to skip entries that are removed meanwhile. It never
// writes.
//
// Start reading at [Walk].
package cnicache

import (
	"encoding/json"
	"errors"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// Kind is the kind of entry that libcni 0.8 and later write.
const Kind = "cniCacheV1"

// maxFile bounds a file of the cache, which holds one network configuration and one result.
const maxFile = 4 << 20

// Entry is an entry of the cache, about one sandbox.
type Entry struct {
	// Kind is [Kind], or another one that the entry has.
	Kind string
	// Plugins are the types of the plugins that made the sandbox, and that the runtime runs to remove it.
	Plugins []string
	// NetNS is the network namespace, a path of the node; "" where the entry has none.
	NetNS string
	// Namespace, Name and UID are the pod's, from the runtime's arguments; "" where the runtime did not pass them.
	Namespace, Name, UID string
}

// Uses reports whether a type of plugin made the sandbox.
func (e Entry) Uses(plugin string) bool { return slices.Contains(e.Plugins, plugin) }

// Of reports whether a file is about a sandbox, by its name: NETWORK-SANDBOX-INTERFACE.
func Of(name, sandbox string) bool { return strings.Contains(name, "-"+sandbox+"-") }

// Walk calls visit with each file of the cache, or those that which selects, in the order of their names: its content, or the error of
// reading it. It ends at the first error of visit and returns that. Files is how many there are, zero if the directory cannot be listed.
func Walk(dir string, which func(name string) bool, visit func(name string, data []byte, err error) error) (files int, err error) {
	names, err := hostfs.List(dir, which)
	if err != nil {
		return 0, err
	}
	for _, name := range names {
		data, _, unread := hostfs.ReadFile(filepath.Join(dir, name), maxFile)
		if errors.Is(unread, fs.ErrNotExist) { // the sandbox was removed meanwhile
			continue
		}
		if err = visit(name, data, unread); err != nil {
			return len(names), err
		}
	}
	return len(names), nil
}

// Parse reads a file of the cache. It reports whether that is an entry: JSON with a kind and a network configuration.
func Parse(data []byte) (Entry, bool) {
	var file struct {
		Kind   string          `json:"kind"`
		Config []byte          `json:"config"` // base64
		NetNS  string          `json:"netns"`
		Args   json.RawMessage `json:"cniArgs"`
		Result struct {
			Interfaces []struct {
				Sandbox string `json:"sandbox"`
			} `json:"interfaces"`
		} `json:"result"`
	}
	type plugin struct {
		Type string `json:"type"`
	}
	var config struct {
		plugin

		Plugins []plugin `json:"plugins"`
	}
	if json.Unmarshal(data, &file) != nil || file.Kind == "" || json.Unmarshal(file.Config, &config) != nil {
		return Entry{}, false
	}
	entry := Entry{Kind: file.Kind, NetNS: file.NetNS}
	for _, p := range append([]plugin{config.plugin}, config.Plugins...) {
		if p.Type != "" {
			entry.Plugins = append(entry.Plugins, p.Type)
		}
	}
	for _, i := range file.Result.Interfaces {
		if entry.NetNS == "" {
			entry.NetNS = i.Sandbox
		}
	}
	var pairs [][2]string
	if json.Unmarshal(file.Args, &pairs) != nil { // they are of another form, and name no pod
		return entry, true
	}
	pod := map[string]*string{"K8S_POD_NAMESPACE": &entry.Namespace, "K8S_POD_NAME": &entry.Name, "K8S_POD_UID": &entry.UID}
	for _, pair := range pairs {
		if field, known := pod[pair[0]]; known {
			*field = pair[1]
		}
	}
	return entry, true
}
