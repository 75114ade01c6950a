package plugin

import (
	"cmp"
	"fmt"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/types/create"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
)

// firstVersion is the version of a configuration without cniVersion.
const firstVersion = "0.1.0"

// parseResult returns the previous plugin's result in the version of the configuration, which ADD prints. It is parsed before any
// other step, so that a chain that cannot end well changes nothing.
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
