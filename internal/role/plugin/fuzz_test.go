package plugin

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
)

// FuzzPrevResult: every result of the previous plugin is refused, or returned as JSON.
func FuzzPrevResult(f *testing.F) {
	for _, version := range []string{"", "0.1.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0", "9.9.9"} {
		f.Add(version, []byte(`{"cniVersion":"`+version+`","ips":[{"address":"10.0.0.2/24","version":"4"}],"dns":{}}`))
		f.Add(version, []byte(`{"ip4":{"ip":"10.0.0.2/24"},"interfaces":[{"name":"eth0"}]}`))
		f.Add(version, []byte(`null`))
	}
	f.Fuzz(func(t *testing.T, version string, prev []byte) {
		before, err := parseResult(cniconf.NetConf{CNIVersion: version, PrevResult: prev})
		if err != nil {
			return
		}
		var out bytes.Buffer
		if err := before.PrintTo(&out); err != nil {
			return
		}
		var printed struct {
			CNIVersion string `json:"cniVersion"`
		}
		if err := json.Unmarshal(out.Bytes(), &printed); err != nil {
			t.Fatalf("version %q, prevResult %q gives %q: %v", version, prev, out.String(), err)
		}
	})
}
