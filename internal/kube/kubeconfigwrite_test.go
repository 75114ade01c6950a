package kube

import (
	"encoding/base64"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
)

func TestKubeconfigTextIsExact(t *testing.T) {
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
		name    string
		address Address
		trust   Trust
		want    string
	}{
		{"IPv4", Address{Host: "10.96.0.1", Port: "443"}, Trust{CA: authority}, golden(inline, "https://10.96.0.1:443")},
		{"IPv6", Address{Host: "fd00::1", Port: "443"}, Trust{CA: authority}, golden(inline, "https://[fd00::1]:443")},
		{"IPv6 in brackets", Address{Host: "[fd00::1]", Port: "443"}, Trust{CA: authority}, golden(inline, "https://[fd00::1]:443")},
		{"a name", Address{"https", "api.example.com", "6443"}, Trust{CA: authority}, golden(inline, "https://api.example.com:6443")},
		{
			"without verification",
			Address{"https", "10.96.0.1", "443"},
			Trust{CA: authority, SkipVerify: true},
			golden("insecure-skip-tls-verify: true", "https://10.96.0.1:443"),
		},
		{"in clear", Address{"http", "10.96.0.1", "80"}, Trust{CA: authority}, golden(inline, "http://10.96.0.1:80")},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := KubeconfigText(test.address, test.trust, []byte(secret))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, string(got)); diff != "" {
				t.Errorf("kubeconfig (-want +got):\n%s", diff)
			}
		})
	}
}

func TestKubeconfigTextRefuses(t *testing.T) {
	authority := kubetest.NewServer(t).CA()
	good := Address{Host: "10.96.0.1", Port: "443"}
	garbage := "-----BEGIN CERTIFICATE-----\naGVsbG8=\n-----END CERTIFICATE-----\n"
	for _, test := range []struct {
		name    string
		address Address
		ca      string
		token   string
		want    string
	}{
		{"no host, before no port", Address{}, string(authority), secret, "KUBERNETES_SERVICE_HOST"},
		{"no port", Address{Host: "10.96.0.1"}, string(authority), secret, "KUBERNETES_SERVICE_PORT"},
		{"a port that is a word", Address{Host: "10.96.0.1", Port: "https"}, string(authority), secret, `port "https"`},
		{"port 0", Address{Host: "10.96.0.1", Port: "0"}, string(authority), secret, `port "0"`},
		{"a port that is too large", Address{Host: "10.96.0.1", Port: "65536"}, string(authority), secret, `port "65536"`},
		{"a host with a path", Address{Host: "a/b", Port: "443"}, string(authority), secret, `host "a/b"`},
		{"a host with a line break", Address{Host: "a\nb", Port: "443"}, string(authority), secret, "host"},
		{"a host with a zone", Address{Host: "fe80::1%eth0", Port: "443"}, string(authority), secret, "host"},
		{"a host with a user", Address{Host: "me@there", Port: "443"}, string(authority), secret, "host"},
		{"another protocol", Address{Protocol: "ftp", Host: "10.96.0.1", Port: "443"}, string(authority), secret, `protocol "ftp"`},
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
			got, err := KubeconfigText(test.address, Trust{CA: []byte(test.ca)}, []byte(test.token))
			if err == nil || got != nil || !strings.Contains(err.Error(), test.want) {
				t.Fatalf("got %q, %v, want an error with %q", got, err, test.want)
			}
			if strings.Contains(err.Error(), secret) {
				t.Errorf("the error shows the token: %v", err)
			}
		})
	}
	if _, err := (Address{}).URL(); !errors.Is(err, ErrNoHost) {
		t.Errorf("got %v, want ErrNoHost", err)
	}
	if _, err := (Address{Host: "a"}).URL(); !errors.Is(err, ErrNoPort) {
		t.Errorf("got %v, want ErrNoPort", err)
	}
}

// TestKubeconfigTextIsWhatReadersRead holds the text to our own reader and to kubectl's, for tokens that YAML could take
// for something else.
func TestKubeconfigTextIsWhatReadersRead(t *testing.T) {
	authority := kubetest.NewServer(t).CA()
	for _, token := range []string{
		secret, secret + "\n", " " + secret + "\r\n", "12345", "0x10", "1e3", "true", "no", "null", "~", "- a"[2:], "{}",
		"a: b"[0:2], "#x", "'", `"`, `\`, "!tag", "&a", "*a", "%", "@", "`", "a#b", "---", "2001-01-01", "=", "<<", "|", ">",
	} {
		t.Run(token, func(t *testing.T) {
			text, err := KubeconfigText(Address{Host: "::1", Port: "6443"}, Trust{CA: authority}, []byte(token))
			if err != nil {
				t.Fatal(err)
			}
			file := filepath.Join(t.TempDir(), "istio-cni-kubeconfig")
			kubetest.Write(t, file, string(text))
			ours, _, err := readKubeconfig(file)
			if err != nil {
				t.Fatal(err)
			}
			theirs, err := clientcmd.BuildConfigFromFlags("", file)
			if err != nil {
				t.Fatal(err)
			}
			want := strings.TrimSpace(token)
			if ours.BearerToken != want || theirs.BearerToken != want {
				t.Errorf("tokens: ours %q, kubectl's %q, want %q", ours.BearerToken, theirs.BearerToken, want)
			}
			if ours.Host != "https://[::1]:6443" || theirs.Host != "https://[::1]:6443" {
				t.Errorf("servers: ours %q, kubectl's %q", ours.Host, theirs.Host)
			}
			if diff := cmp.Diff(authority, ours.CAData) + cmp.Diff(authority, theirs.CAData); diff != "" {
				t.Errorf("authorities:\n%s", diff)
			}
		})
	}
}

func TestKubeconfigTextLeadsToTheServer(t *testing.T) {
	server := newServer(t)
	host, port := server.Address()
	for name, trust := range map[string]Trust{"by its authority": {CA: server.CA()}, "whoever it is": {SkipVerify: true}} {
		t.Run(name, func(t *testing.T) {
			text, err := KubeconfigText(Address{Host: host, Port: port}, trust, []byte(server.Token()+"\n"))
			if err != nil {
				t.Fatal(err)
			}
			file := filepath.Join(t.TempDir(), "istio-cni-kubeconfig")
			kubetest.Write(t, file, string(text))
			if _, err := newClient(t, file).Lookup(t.Context(), cart(), patient); err != nil {
				t.Error(err)
			}
		})
	}
}
