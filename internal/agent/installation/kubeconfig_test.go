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
)

const secret = "eyJhbGciOi.the-secret.of-the-test"

func TestKubeconfigIsExact(t *testing.T) {
	authority := kubetest.NewServer(t).CA()
	golden := func(tls, server string) string {
		return `apiVersion: v1
clusters:
- cluster:
    ` + tls + `
    server: ` + server + `
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
    token: ` + secret + `
`
	}
	inline := "certificate-authority-data: " + base64.StdEncoding.EncodeToString(authority)
	for _, test := range []struct {
		name      string
		address   kube.Address
		authority []byte
		want      string
	}{
		{"IPv4", kube.Address{Host: "10.96.0.1", Port: "443"}, authority, golden(inline, "https://10.96.0.1:443")},
		{"IPv6", kube.Address{Host: "fd00::1", Port: "443"}, authority, golden(inline, "https://[fd00::1]:443")},
		{"IPv6 in brackets", kube.Address{Host: "[fd00::1]", Port: "443"}, authority, golden(inline, "https://[fd00::1]:443")},
		{"a name", kube.Address{Protocol: "https", Host: "api.example.com", Port: "6443"}, authority, golden(inline, "https://api.example.com:6443")},
		{
			"without verification",
			kube.Address{Protocol: "https", Host: "10.96.0.1", Port: "443"},
			nil,
			golden("insecure-skip-tls-verify: true", "https://10.96.0.1:443"),
		},
		{"in clear", kube.Address{Protocol: "http", Host: "10.96.0.1", Port: "80"}, authority, golden(inline, "http://10.96.0.1:80")},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := encodeKubeconfig(test.address, test.authority == nil, test.authority, []byte(secret))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, string(got)); diff != "" {
				t.Errorf("kubeconfig (-want +got):\n%s", diff)
			}
		})
	}
}

func TestKubeconfigRefuses(t *testing.T) {
	authority := kubetest.NewServer(t).CA()
	good := kube.Address{Host: "10.96.0.1", Port: "443"}
	garbage := "-----BEGIN CERTIFICATE-----\naGVsbG8=\n-----END CERTIFICATE-----\n"
	for _, test := range []struct {
		name    string
		address kube.Address
		ca      string
		token   string
		want    string
	}{
		{"no host", kube.Address{}, string(authority), secret, "KUBERNETES_SERVICE_HOST"},
		{"no authority", good, "", secret, "no certificate in PEM"},
		{"an authority that is no PEM", good, "hello", secret, "no certificate in PEM"},
		{"an authority that is a key", good, "-----BEGIN PRIVATE KEY-----\naGVsbG8=\n-----END PRIVATE KEY-----\n", secret, "no certificate"},
		{"an authority that is no certificate", good, garbage, secret, "the authority holds no certificate in PEM"},
		{"an empty token", good, string(authority), "", "the token is empty"},
		{"a token of blanks", good, string(authority), " \n", "the token is empty"},
		{"a token of NUL, as a power loss leaves it", good, string(authority), strings.Repeat("\x00", 9), "no token has"},
		{"a token with a line break inside", good, string(authority), secret + "\nmore", "no token has"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := encodeKubeconfig(test.address, false, []byte(test.ca), []byte(test.token))
			if err == nil || got != nil || !strings.Contains(err.Error(), test.want) {
				t.Fatalf("got %q, %v, want an error with %q", got, err, test.want)
			}
			if strings.Contains(err.Error(), secret) {
				t.Errorf("the error shows the token: %v", err)
			}
		})
	}
}

// TestEncodeKubeconfigIsWhatReadersRead holds the text to our own reader and to kubectl's, for tokens that YAML could take
// for something else.
func TestKubeconfigIsWhatReadersRead(t *testing.T) {
	authority := kubetest.NewServer(t).CA()
	for _, token := range []string{
		secret, secret + "\n", " " + secret + "\r\n", "12345", "0x10", "1e3", "true", "no", "null", "~", "- a"[2:], "{}",
		"a: b"[0:2], "#x", "'", `"`, `\`, "!tag", "&a", "*a", "%", "@", "`", "a#b", "---", "2001-01-01", "=", "<<", "|", ">",
	} {
		t.Run(token, func(t *testing.T) {
			text, err := encodeKubeconfig(kube.Address{Host: "::1", Port: "6443"}, false, authority, []byte(token))
			if err != nil {
				t.Fatal(err)
			}
			file := filepath.Join(t.TempDir(), "istio-cni-kubeconfig")
			kubetest.Write(t, file, string(text))
			theirs, err := clientcmd.BuildConfigFromFlags("", file)
			if err != nil {
				t.Fatal(err)
			}
			if want := strings.TrimSpace(token); theirs.BearerToken != want || theirs.Host != "https://[::1]:6443" {
				t.Errorf("server %q, token %q, want %q", theirs.Host, theirs.BearerToken, want)
			}
			if diff := cmp.Diff(authority, theirs.CAData); diff != "" {
				t.Errorf("authority:\n%s", diff)
			}
			api, err := kube.NewClient(kube.Config{Kubeconfig: file, Once: true})
			if err != nil || api.Server() != theirs.Host {
				t.Errorf("the client: %v", err)
			}
		})
	}
}
