package plugin

import (
	"cmp"
	"fmt"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/types/create"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
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

// firstVersion is the version of a configuration without cniVersion.
const firstVersion = "0.1.0"

// parseResult returns the previous plugin's result in the version of the configuration, which ADD prints. add calls it before any
// other step, so that a chain that cannot succeed changes nothing.
func parseResult(conf cniconf.NetConf) (types.Result, error) {
	version := cmp.Or(conf.CNIVersion, firstVersion)
	text := []byte(conf.PrevResult)
	if text == nil {
		// This plugin creates no interface and no address: alone it returns an empty result.
		text = fmt.Appendf(nil, `{"cniVersion":%q}`, version)
	}
	parsed, err := create.Create(version, text)
	if err == nil {
		parsed, err = parsed.GetAsVersion(version)
	}
	if err != nil {
		return nil, failure(types.ErrDecodingFailure, "istio-cni cannot read the result of the plugin before it (prevResult)", err)
	}
	return parsed, nil
}
