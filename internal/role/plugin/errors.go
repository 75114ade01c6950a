package plugin

import (
	"context"
	"errors"
	"fmt"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/meshcni/istio-cni/internal/kube"
)

// Codes of errors that the CNI specification leaves to plugins (100 and above), as they appear in "code".
const (
	codeSettings  = 100 // the pod's annotations or securityContext are invalid
	codeProgram   = 101 // the namespace could not be programmed
	codeDifferent = 102 // CHECK: the namespace does not hold what it should
)

// failure is an error on its way out: what the plugin could not do, and why.
type failure struct {
	code  uint
	what  string
	cause error
}

func (f failure) Error() string { return fmt.Sprintf("%s: %v", f.what, f.cause) }
func (f failure) Unwrap() error { return f.cause }

// protocol turns any error into the one object that the specification knows. What the runtime shows of it, and so
// `kubectl describe pod`, is "msg; details".
func protocol(err error) error {
	if err == nil {
		return nil
	}
	if ready, ok := errors.AsType[*types.Error](err); ok {
		return ready
	}
	if f, ok := errors.AsType[failure](err); ok {
		return types.NewError(f.code, f.what, f.cause.Error())
	}
	return types.NewError(types.ErrInternal, "istio-cni failed", err.Error())
}

// presentable bounds an error, of this program or of the CNI library, and makes it printable.
func presentable(err types.Error) *types.Error {
	return types.NewError(err.Code, oneLine(err.Msg), oneLine(err.Details))
}

// lookupFailure maps a failed look-up of the pod. All but a broken configuration may pass by itself.
func lookupFailure(pod podArgs, err error) failure {
	what := fmt.Sprintf("istio-cni cannot tell whether pod %s is in the mesh", pod)
	if kube.ClassOf(err) == kube.InvalidConfig {
		return failure{code: types.ErrIOFailure, what: what, cause: err}
	}
	return failure{code: types.ErrTryAgainLater, what: what, cause: err}
}

// programFailure maps a namespace that could not be programmed.
func programFailure(pod podArgs, err error) failure {
	code := uint(codeProgram)
	if errors.Is(err, context.DeadlineExceeded) {
		code = types.ErrTryAgainLater
	}
	return failure{code: code, what: fmt.Sprintf("istio-cni cannot redirect the traffic of pod %s", pod), cause: err}
}
