package plugin

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
)

func FuzzParseArgs(f *testing.F) {
	for _, seed := range []string{
		"", "IgnoreUnknown=1;K8S_POD_NAMESPACE=a;K8S_POD_NAME=b;K8S_POD_UID=c;K8S_POD_INFRA_CONTAINER_ID=d", "a=b", "a", "=", ";;",
		"IgnoreUnknown=maybe", "CommonArgs=1", "IgnoreUnknown=1;CommonArgs=2", "K8S_POD_NAME=a=b",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		a, err := parseArgs(text)
		if err != nil && protocol(err) == nil {
			t.Errorf("error of %q is lost", text)
		}
		if err == nil && text == "" && (a.K8S_POD_NAME != "" || a.K8S_POD_NAMESPACE != "") {
			t.Errorf("empty arguments name pod %q", a)
		}
	})
}

// Whatever the previous result is, it is refused, or handed on as JSON of the configuration's version.
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
		if err := before.print(&out); err != nil {
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
