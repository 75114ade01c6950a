package podrepair

import (
	"os"
	"path/filepath"
	"slices"

	"github.com/meshcni/istio-cni/internal/node/podns"
)

// Paths are paths of the node under which namespaces of pods are named, and the prefixes under which a container may see
// them, best first.
type Paths struct {
	// Cache is libcni's, Proc the procfs, Netns where runtimes mount namespaces.
	Cache, Proc string
	Netns       []string
	Roots       []string
}

// Places finds out where the paths are seen by this process. It is nil where the processes of the node are not seen:
// without them no namespace can be told from the node's own.
func (p Paths) Places() *podns.Places {
	places := podns.Places{Proc: p.Proc, Cache: p.Cache}
	for _, root := range p.Roots {
		if there(filepath.Join(root, p.Proc, "1/ns")) {
			places.Proc, places.HostRoots = filepath.Join(root, p.Proc), p.Roots
			break
		}
	}
	if !there(filepath.Join(places.Proc, "1/ns")) {
		return nil
	}
	if seen := p.under(p.Cache); len(seen) > 0 {
		places.Cache = seen[0]
	}
	for _, dir := range p.Netns {
		for _, seen := range p.under(dir) {
			if !slices.Contains(places.Mounts, seen) {
				places.Mounts = append(places.Mounts, seen)
			}
		}
	}
	return &places
}

// under are the places where a path of the node is there, those below a root first.
func (p Paths) under(path string) []string {
	var seen []string
	for _, root := range append(slices.Clone(p.Roots), "/") {
		if file := filepath.Join(root, path); there(file) && !slices.Contains(seen, file) {
			seen = append(seen, file)
		}
	}
	return seen
}

func there(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}
