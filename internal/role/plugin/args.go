package plugin

import (
	"github.com/containernetworking/cni/pkg/types"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// podArgs are the keys of CNI_ARGS that Kubernetes runtimes set. The names of the fields are the wire format.
type podArgs struct {
	types.CommonArgs
	K8S_POD_NAME               types.UnmarshallableString //nolint:revive // the wire format
	K8S_POD_NAMESPACE          types.UnmarshallableString //nolint:revive // the wire format
	K8S_POD_INFRA_CONTAINER_ID types.UnmarshallableString //nolint:revive // the wire format
	K8S_POD_UID                types.UnmarshallableString //nolint:revive // the wire format
}

// String returns the pod as "namespace/name", bounded and printable.
func (a podArgs) String() string {
	return printable.Text(string(a.K8S_POD_NAMESPACE), maxNamed) + "/" + printable.Text(string(a.K8S_POD_NAME), maxNamed)
}

// parseArgs parses CNI_ARGS. Unknown keys are an error unless IgnoreUnknown is true, by the specification's conventions.
func parseArgs(text string) (podArgs, error) {
	var a podArgs
	if err := types.LoadArgs(text, &a); err != nil {
		return a, failure(types.ErrInvalidEnvironmentVariables, "istio-cni cannot read CNI_ARGS", err)
	}
	return a, nil
}
