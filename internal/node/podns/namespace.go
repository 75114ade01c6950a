package podns

import "github.com/meshcni/istio-cni/internal/node/netns"

// Namespace is a network namespace that was found. The caller closes it.
type Namespace struct {
	*netns.Namespace

	source Source
}

// Source says where it was found.
func (n *Namespace) Source() Source { return n.source }
