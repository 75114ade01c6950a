package plugin

import (
	"context"
	"errors"
	"fmt"

	"github.com/containernetworking/cni/pkg/types"
)

// Codes of errors that the CNI specification leaves to plugins (100 and above), for the field "code".
const (
	codeSettings  = 100
	codeProgram   = 101
	codeDifferent = 102
)

// codes are the plugin's error codes, and the CNI library's before it calls the plugin.
var codes = []struct { //nolint:gochecknoglobals // a constant table
	code  uint
	means string
}{
	{types.ErrIncompatibleCNIVersion, "the list's cniVersion is not supported, or too low for CHECK (0.4.0) or STATUS (1.1.0)"},
	{types.ErrInvalidEnvironmentVariables, "a variable CNI_* is missing (CNI_NETNS as well), or CNI_ARGS cannot be read"},
	{types.ErrIOFailure, "the kubeconfig cannot be used: see whether the node agent runs on this node"},
	{types.ErrDecodingFailure, "the configuration on stdin, or prevResult in it, cannot be decoded"},
	{types.ErrInvalidNetworkConfig, "the network has no name, or a key of the configuration is invalid and the pod is to be captured"},
	{types.ErrInvalidNetNS, "CNI_NETNS is not a network namespace, or it is the node's own"},
	{types.ErrTryAgainLater, "try again later: no answer from the node agent or the API server, no ambient enrolment, or time ran out"},
	{codeSettings, "the pod's annotations or securityContext are invalid: create the pod again with valid ones"},
	{codeProgram, "the pod's network namespace could not be programmed: the details name what the kernel refused"},
	{codeDifferent, "CHECK: the pod's network namespace differs from the wanted state"},
	{types.ErrInternal, "a fault of the plugin: report it with the details, which have the stack"},
}

// failure returns the specification's error object: the failed action and its cause. The runtime, and so `kubectl describe
// pod`, shows it as "msg; details".
func failure(code uint, action string, cause error) error {
	return types.NewError(code, action, cause.Error())
}

// presentable bounds an error, of this program or of the CNI library, and makes it printable.
func presentable(err types.Error) *types.Error {
	return types.NewError(err.Code, oneLine(err.Msg), oneLine(err.Details))
}

// lookupFailure maps a failed look-up of the pod. All causes except a broken configuration may be transient.
func lookupFailure(pod podArgs, err error) error {
	code := types.ErrTryAgainLater
	if _, broken := errors.AsType[KubeconfigError](err); broken {
		code = types.ErrIOFailure
	}
	return failure(code, fmt.Sprintf("istio-cni cannot tell whether pod %s is in the mesh", pod), err)
}

// programFailure maps the error of a failure to program the namespace.
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
