// Package cnicache reads libcni's cache (github.com/containernetworking/cni, pkg libcni, api.go): a directory of the
// container runtime with one file for each network and interface of each existing sandbox.
//
// It promises bounded memory for any content of the directory, and skips entries that disappear during a walk. It never
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

// Kind is the kind of the entries that libcni 0.8 and later write.
const Kind = "cniCacheV1"

// maxFile bounds a file of the cache, which holds one network configuration and one result.
const maxFile = 4 << 20

// Entry is an entry of the cache. It is about one sandbox.
type Entry struct {
	// Kind is the entry's kind: [Kind], or a kind of other versions.
	Kind string
	// Plugins are the types of the plugins that the runtime ran to add the sandbox and runs to delete it.
	Plugins []string
	// NetNS is the path of the network namespace on the node, or "".
	NetNS string
	// Namespace, Name and UID identify the pod. They are the runtime's CNI_ARGS, or "".
	Namespace, Name, UID string
}

// Uses reports whether Plugins has a type of plugin.
func (e Entry) Uses(plugin string) bool { return slices.Contains(e.Plugins, plugin) }

// Of reports whether a file is about a sandbox. It compares the file's name, NETWORK-SANDBOX-INTERFACE.
func Of(name, sandbox string) bool { return strings.Contains(name, "-"+sandbox+"-") }

// Walk calls visit for the files of the cache that which selects (nil: all) in the order of their names, with the content or the read
// error. It returns the first error of visit. files is the number of files, zero if the directory cannot be listed.
func Walk(dir string, which func(name string) bool, visit func(name string, data []byte, err error) error) (files int, err error) {
	names, err := hostfs.List(dir, which)
	if err != nil {
		return 0, err
	}
	for _, name := range names {
		data, _, unread := hostfs.ReadFile(filepath.Join(dir, name), maxFile)
		if errors.Is(unread, fs.ErrNotExist) { // the runtime has removed the sandbox
			continue
		}
		if err = visit(name, data, unread); err != nil {
			return len(names), err
		}
	}
	return len(names), nil
}

// Parse parses a file of the cache. It reports whether the file is an entry: JSON with a kind and a network configuration.
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
	if json.Unmarshal(file.Args, &pairs) != nil { // another form of arguments names no pod
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
