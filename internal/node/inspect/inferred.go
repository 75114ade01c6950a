package inspect

import (
	"context"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

// Inferred returns the Spec by which the rules of a namespace were most likely made, and sets its backend to the one that made them.
// It is nil if the namespace has no rule of the mesh.
func Inferred(ctx context.Context, space *redirection.Namespace) (want redirect.Wanted, err error) {
	live, err := space.Live(ctx, nil)
	if err != nil {
		return nil, err
	}
	inferred, native, found := live.Infer()
	if found {
		want, err = inferred, backend(space, native)
	}
	return want, err
}
