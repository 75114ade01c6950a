package plugin

import (
	"fmt"
	"io"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/types/create"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
)

// result is the previous plugin's result, which ADD prints in the version of the configuration.
type result struct {
	version string
	parsed  types.Result
}

// firstVersion is the version of a configuration without cniVersion.
const firstVersion = "0.1.0"

// parseResult parses prevResult before any other step, so that a chain that cannot end well changes nothing.
func parseResult(conf cniconf.NetConf) (result, error) {
	r := result{version: conf.CNIVersion}
	if r.version == "" {
		r.version = firstVersion
	}
	text := []byte(conf.PrevResult)
	if text == nil {
		// This plugin creates no interface and no address: alone it returns an empty result.
		text = fmt.Appendf(nil, `{"cniVersion":%q}`, r.version)
	}
	parsed, err := create.Create(r.version, text)
	if err != nil {
		return r, failure(types.ErrDecodingFailure, "istio-cni cannot read the result of the plugin before it (prevResult)", err)
	}
	r.parsed = parsed
	return r, nil
}

// print writes the result.
func (r result) print(w io.Writer) error {
	converted, err := r.parsed.GetAsVersion(r.version)
	if err != nil {
		return fmt.Errorf("converting the result to CNI version %q: %w", r.version, err)
	}
	if err := converted.PrintTo(w); err != nil {
		return fmt.Errorf("printing the result: %w", err)
	}
	return nil
}
