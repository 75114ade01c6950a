package plugin

import (
	"context"
	"errors"
	"fmt"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/meshcni/istio-cni/internal/kube"
)

// Codes of errors that the CNI specification leaves to plugins (100 and above), for the field "code".
const (
	codeSettings  = 100 // the pod's annotations or securityContext are invalid
	codeProgram   = 101 // the namespace could not be programmed
	codeDifferent = 102 // CHECK: the namespace differs from the desired state
)

// failure is an error for the runtime: the failed action, and its cause.
type failure struct {
	code  uint
	what  string
	cause error
}

func (f failure) Error() string { return fmt.Sprintf("%s: %v", f.what, f.cause) }
func (f failure) Unwrap() error { return f.cause }

// protocol converts any error to the specification's error object. The runtime, and so `kubectl describe pod`, shows "msg;
// details" of it.
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

// lookupFailure maps a failed look-up of the pod. All causes but a broken configuration may be transient.
func lookupFailure(pod podArgs, err error) failure {
	what := fmt.Sprintf("istio-cni cannot tell whether pod %s is in the mesh", pod)
	if kube.ClassOf(err) == kube.InvalidConfig {
		return failure{code: types.ErrIOFailure, what: what, cause: err}
	}
	return failure{code: types.ErrTryAgainLater, what: what, cause: err}
}

// programFailure maps the error of a namespace that could not be programmed.
func programFailure(pod podArgs, err error) failure {
	code := uint(codeProgram)
	if errors.Is(err, context.DeadlineExceeded) {
		code = types.ErrTryAgainLater
	}
	return failure{code: code, what: fmt.Sprintf("istio-cni cannot redirect the traffic of pod %s", pod), cause: err}
}
