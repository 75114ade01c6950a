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

// Places finds out where the paths are seen by this process at this moment. It is nil where the processes of the node are
// not seen: without them no namespace can be told from the node's own. A process that is the first one of its procfs sees
// those of its container only.
func (p Paths) Places() *podns.Places {
	proc := p.proc()
	if proc == "" {
		return nil
	}
	places := podns.Places{Proc: proc, Cache: p.Cache, HostRoots: slices.DeleteFunc(slices.Clone(p.Roots), missing)}
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

// proc is where the node's procfs is seen, "" for nowhere.
func (p Paths) proc() string {
	for _, root := range p.Roots {
		if proc := filepath.Join(root, p.Proc); !missing(filepath.Join(proc, "1/ns")) {
			return proc
		}
	}
	if missing(filepath.Join(p.Proc, "1/ns")) || os.Getpid() == 1 {
		return ""
	}
	return p.Proc
}

// under are the places where a path of the node is there, those below a root first.
func (p Paths) under(path string) []string {
	var seen []string
	for _, root := range append(slices.Clone(p.Roots), "/") {
		if file := filepath.Join(root, path); !missing(file) && !slices.Contains(seen, file) {
			seen = append(seen, file)
		}
	}
	return seen
}

func missing(file string) bool {
	_, err := os.Stat(file)
	return err != nil
}
