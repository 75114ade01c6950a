package sandbox

import (
	"context"
	"net/netip"

	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/route"
)

// FindCounting is Find. It calls opened and entered with the path of each namespace.
func FindCounting(ctx context.Context, p Places, pod Pod, opened, entered func(path string)) (*Namespace, error) {
	s := newSearch(p, pod)
	s.open = func(path string) (*netns.Namespace, error) {
		opened(path)
		return netns.Open(path)
	}
	s.enter = func(n *netns.Namespace, of []netip.Addr, node int) ([]route.Attachment, error) {
		entered(n.Path())
		return enter(n, of, node)
	}
	return s.run(ctx)
}
