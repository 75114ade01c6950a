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

// failure returns the specification's error object: the failed action, and its cause. The runtime, and so `kubectl describe
// pod`, shows "msg; details" of it.
func failure(code uint, action string, cause error) error {
	return types.NewError(code, action, cause.Error())
}

// protocol converts any other error to the specification's error object.
func protocol(err error) error {
	if _, ready := errors.AsType[*types.Error](err); ready || err == nil {
		return err
	}
	return failure(types.ErrInternal, "istio-cni failed", err)
}

// presentable bounds an error, of this program or of the CNI library, and makes it printable.
func presentable(err types.Error) *types.Error {
	return types.NewError(err.Code, oneLine(err.Msg), oneLine(err.Details))
}

// lookupFailure maps a failed look-up of the pod. All causes but a broken configuration may be transient.
func lookupFailure(pod podArgs, err error) error {
	code := types.ErrTryAgainLater
	if kube.ClassOf(err) == kube.InvalidConfig {
		code = types.ErrIOFailure
	}
	return failure(code, fmt.Sprintf("istio-cni cannot tell whether pod %s is in the mesh", pod), err)
}

// programFailure maps the error of a namespace that could not be programmed.
func programFailure(pod podArgs, err error) error {
	code := uint(codeProgram)
	if errors.Is(err, context.DeadlineExceeded) {
		code = types.ErrTryAgainLater
	}
	return failure(code, notRedirected(pod), err)
}

func notRedirected(pod podArgs) string {
	return fmt.Sprintf("istio-cni cannot redirect the traffic of pod %s", pod)
}
