package podns

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// CacheKind is the kind of entry that libcni 0.8 and later write.
const CacheKind = "cniCacheV1"

// Sandbox is an entry of libcni's cache, one for each network and interface of a sandbox that was made and not yet
// removed.
type Sandbox struct {
	// Kind is [CacheKind], or what else the entry says that it is.
	Kind string
	// Plugins are the types of those that made it, and that will be asked to remove it.
	Plugins []string
	// NetNS is the network namespace, a path of the host; "" when the entry does not tell.
	NetNS string
	// Namespace, Name and UID are the pod's, from the runtime's arguments; "" for those that it did not give.
	Namespace, Name, UID string
}

// ReadSandbox reads an entry of libcni's cache (github.com/containernetworking/cni, pkg libcni, api.go). It reports whether it
// is one: JSON with a kind and a network configuration.
func ReadSandbox(data []byte) (Sandbox, bool) {
	var entry struct {
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
	if json.Unmarshal(data, &entry) != nil || entry.Kind == "" {
		return Sandbox{}, false
	}
	var config struct {
		Type    string `json:"type"`
		Plugins []struct {
			Type string `json:"type"`
		} `json:"plugins"`
	}
	if json.Unmarshal(entry.Config, &config) != nil {
		return Sandbox{}, false
	}
	box := Sandbox{Kind: entry.Kind, NetNS: entry.NetNS, Plugins: []string{config.Type}}
	for _, p := range config.Plugins {
		box.Plugins = append(box.Plugins, p.Type)
	}
	for _, i := range entry.Result.Interfaces {
		if box.NetNS == "" {
			box.NetNS = i.Sandbox
		}
	}
	box.pod(entry.Args)
	return box, true
}

// pod takes in the arguments, a list of pairs. Others than these tell nothing.
func (s *Sandbox) pod(arguments json.RawMessage) {
	var pairs [][2]string
	if json.Unmarshal(arguments, &pairs) != nil {
		return
	}
	for _, pair := range pairs {
		switch pair[0] {
		case "K8S_POD_NAMESPACE":
			s.Namespace = pair[1]
		case "K8S_POD_NAME":
			s.Name = pair[1]
		case "K8S_POD_UID":
			s.UID = pair[1]
		}
	}
}

// Runs reports whether a type of plugin made the sandbox.
func (s Sandbox) Runs(plugin string) bool { return slices.Contains(s.Plugins, plugin) }

// maxEntry bounds an entry of the cache, which holds one network configuration and one result.
const maxEntry = 4 << 20

// cache goes through libcni's cache. Nothing that is wrong with it ends the search.
func (s *search) cache(ctx context.Context) error {
	if s.places.Cache == "" {
		return nil
	}
	look := Look{Source: FromCache, Place: s.places.Cache}
	defer func() { s.looked = append(s.looked, look) }()
	names, err := hostfs.List(s.places.Cache, nil)
	if err != nil {
		look.Err = err
		return nil
	}
	look.Entries = len(names)
	for _, name := range names {
		if err := ctx.Err(); err != nil {
			return err
		}
		s.entry(name, &look)
	}
	return nil
}

// entry looks at one entry of the cache.
func (s *search) entry(name string, look *Look) {
	data, _, err := hostfs.ReadFile(filepath.Join(s.places.Cache, name), maxEntry)
	switch {
	case errors.Is(err, fs.ErrNotExist): // its sandbox was removed just now
		return
	case err != nil:
		look.fail(err)
		return
	case !bytes.Contains(data, []byte(s.pod.Name)): // which saves reading the entries of all the other pods
		return
	}
	box, ok := ReadSandbox(data)
	switch {
	case !ok:
		look.fail(fmt.Errorf("entry %q cannot be read", name))
		return
	case box.Kind != CacheKind || box.Namespace != s.pod.Namespace || box.Name != s.pod.Name:
		return
	}
	look.Of++
	if why := s.sandbox(box); why != "" {
		look.Notes = append(look.Notes, why)
	}
}

// sandbox looks at the namespace of an entry that has the pod's name. It says what is wrong with it.
func (s *search) sandbox(box Sandbox) string {
	named := strings.HasPrefix(box.NetNS, "/proc/")
	switch {
	case box.UID != "" && box.UID != s.pod.UID:
		return fmt.Sprintf("one of UID %q", box.UID)
	case box.NetNS == "":
		return "one without a namespace"
	case box.UID == "" && len(s.pod.Addresses) == 0:
		return "one without the pod's UID"
	case named && len(s.pod.Addresses) == 0:
		return box.NetNS + ": another process may have the number by now"
	}
	paths := s.places.seen(box.NetNS)
	if named {
		if other := podOfProcess(strings.TrimSuffix(paths[0], "/ns/net")); other != "" && other != s.self && other != s.pod.UID {
			return fmt.Sprintf("%s: the process is of the pod with UID %s", box.NetNS, other)
		}
	}
	judged, err := s.firstOf(paths, FromCache)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return box.NetNS + ": there is no such namespace any more"
	case err != nil:
		return err.Error()
	case judged == ofHost:
		s.hostSaid = s.hostSaid || box.UID == s.pod.UID
	case judged == matching || judged == unchecked:
		return ""
	case judged == unlike && box.UID == s.pod.UID && !named:
		s.denied = true
	}
	return fmt.Sprintf("%s: %s", box.NetNS, judged)
}

// firstOf looks at the first of the paths that leads to a namespace. The error is that of a path at which there is
// something, if there is any.
func (s *search) firstOf(paths []string, from Source) (verdict, error) {
	var failed error
	for _, path := range paths {
		judged, err := s.consider(path, from)
		if err == nil {
			return judged, nil
		}
		if failed == nil || errors.Is(failed, fs.ErrNotExist) {
			failed = err
		}
	}
	return unusable, failed
}

// seen are the paths under which a path of the node may be seen here. The last resort is the root directory of its first
// process.
func (p Places) seen(path string) []string {
	path = filepath.Clean(path)
	if rest, found := strings.CutPrefix(path, "/proc/"); found {
		return []string{filepath.Join(p.Proc, rest)}
	}
	var paths []string
	if len(p.HostRoots) == 0 {
		paths = append(paths, path)
	}
	// /var/run is a link to /run, which leads out of the root when it is followed here.
	spelled := []string{path}
	if rest, found := strings.CutPrefix(path, "/var/run/"); found {
		spelled = []string{"/run/" + rest, path}
	}
	for _, root := range append(slices.Clone(p.HostRoots), filepath.Join(p.Proc, "1/root")) {
		for _, one := range spelled {
			paths = append(paths, filepath.Join(root, one))
		}
	}
	return paths
}
