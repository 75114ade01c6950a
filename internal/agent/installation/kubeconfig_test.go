package installation

import (
	"encoding/base64"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

const secret = "eyJhbGciOi.the-secret.of-the-test"

func TestKubeconfig_Text(t *testing.T) {
	authority := kubetest.NewServer(t).CA()
	for _, test := range []struct {
		address    kube.Address
		skipVerify bool
		server     string
	}{
		{kube.Address{Host: "10.96.0.1", Port: "443"}, false, "https://10.96.0.1:443"},
		{kube.Address{Host: "10.96.0.1", Port: "443"}, true, "https://10.96.0.1:443"},
		{kube.Address{Host: "fd00::1", Port: "443"}, false, "https://[fd00::1]:443"},
		{kube.Address{Host: "[fd00::1]", Port: "443"}, false, "https://[fd00::1]:443"},
		{kube.Address{Protocol: "https", Host: "api.example.com", Port: "6443"}, false, "https://api.example.com:6443"},
		{kube.Address{Protocol: "http", Host: "10.96.0.1", Port: "80"}, false, "http://10.96.0.1:80"},
	} {
		ca, tls := authority, "certificate-authority-data: "+base64.StdEncoding.EncodeToString(authority)
		if test.skipVerify {
			ca, tls = nil, "insecure-skip-tls-verify: true"
		}
		got, err := encodeKubeconfig(test.address, test.skipVerify, ca, []byte(secret))
		want := `apiVersion: v1
clusters:
- cluster:
    ` + tls + `
    server: ` + test.server + `
  name: local
contexts:
- context:
    cluster: local
    user: istio-cni
  name: istio-cni-context
current-context: istio-cni-context
kind: Config
users:
- name: istio-cni
  user:
    token: ` + secret + "\n"
		if diff := cmp.Diff(want, string(got)); diff != "" || err != nil {
			t.Errorf("error %v, kubeconfig (-want +got):\n%s", err, diff)
		}
	}
}

func TestKubeconfig_Refusals(t *testing.T) {
	authority := string(kubetest.NewServer(t).CA())
	good := kube.Address{Host: "10.96.0.1", Port: "443"}
	block := func(kind string) string {
		return "-----BEGIN " + kind + "-----\naGVsbG8=\n-----END " + kind + "-----\n"
	}
	const noAuthority = "the authority holds no certificate in PEM"
	for _, test := range []struct {
		name            string
		address         kube.Address
		ca, token, want string
	}{
		{"no host", kube.Address{}, authority, secret, "KUBERNETES_SERVICE_HOST"},
		{"no authority", good, "", secret, noAuthority},
		{"an authority that is not PEM", good, "hello", secret, noAuthority},
		{"an authority that is a key", good, block("PRIVATE KEY"), secret, noAuthority},
		{"an authority that is not a certificate", good, block("CERTIFICATE"), secret, noAuthority},
		{"an empty token", good, authority, "", "the token is empty"},
		{"a token of blanks", good, authority, " \n", "the token is empty"},
		{"a token of NUL, as a power loss leaves it", good, authority, strings.Repeat("\x00", 9), "no token has"},
		{"a token with a line break inside", good, authority, secret + "\nmore", "no token has"},
	} {
		got, err := encodeKubeconfig(test.address, false, []byte(test.ca), []byte(test.token))
		if err == nil || got != nil || !strings.Contains(err.Error(), test.want) || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: got %q, %v, want an error with %q and without the token", test.name, got, err, test.want)
		}
	}
}

// TestKubeconfig_ReadByClients compares the text with the results of this program's reader and kubectl's reader, for tokens that
// YAML could read as another type.
func TestKubeconfig_ReadByClients(t *testing.T) {
	authority := kubetest.NewServer(t).CA()
	for _, token := range []string{
		secret, secret + "\n", " " + secret + "\r\n", "12345", "0x10", "1e3", "true", "no", "null", "~", "- a"[2:], "{}",
		"a: b"[0:2], "#x", "'", `"`, `\`, "!tag", "&a", "*a", "%", "@", "`", "a#b", "---", "2001-01-01", "=", "<<", "|", ">",
	} {
		text, err := encodeKubeconfig(kube.Address{Host: "::1", Port: "6443"}, false, authority, []byte(token))
		check.OK(t, err)
		file := filepath.Join(t.TempDir(), "istio-cni-kubeconfig")
		kubetest.Write(t, file, string(text))
		theirs, err := clientcmd.BuildConfigFromFlags("", file)
		check.OK(t, err, token)
		if want := strings.TrimSpace(token); theirs.BearerToken != want || theirs.Host != "https://[::1]:6443" ||
			string(theirs.CAData) != string(authority) {
			t.Errorf("%q: server %q, token %q, authority %q", token, theirs.Host, theirs.BearerToken, theirs.CAData)
		}
		if api, err := kube.NewClient(kube.Config{Kubeconfig: file, Once: true}); err != nil || api.Server() != theirs.Host {
			t.Errorf("%q: the client: %v", token, err)
		}
	}
}
