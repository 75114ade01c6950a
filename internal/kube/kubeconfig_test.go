package kube

import (
	"errors"
	"io/fs"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// kubeconfigText returns a valid kubeconfig but for the fields of the cluster and the user.
func kubeconfigText(cluster, user string) string {
	return "apiVersion: v1\nkind: Config\ncurrent-context: here\ncontexts: [{name: other, context: {cluster: elsewhere, user: another}}, " +
		"{name: here, context: {cluster: local, user: me}}]\nclusters: [{name: local, cluster: {" + cluster +
		"}}]\nusers: [{name: me, user: {" + user + "}}]\n"
}

const secret = "eyJhbGciOi.the-secret.of-the-test"

func TestKubeconfig_Refusals(t *testing.T) {
	good := "server: 'https://10.0.0.1:443'"
	for _, test := range []struct{ name, text, want string }{
		{"an empty file", "", "the file is empty"},
		{"a file of blanks", " \n\n", "the file is empty"},
		{"a file of NUL bytes", strings.Repeat("\x00", 64), "decoding: it is not a v1 Config"},
		{"half a file", kubeconfigText(good, "token: "+secret)[:200], "decoding: it is not a v1 Config"},
		{"bad YAML next to a token", "token: " + secret + "\n\t- : [", "decoding: it is not a v1 Config"},
		{"a list", "- " + secret, "decoding: it is not a v1 Config"},
		{"a token that is a map", kubeconfigText(good, "token: {a: "+secret+"}"), "decoding: it is not a v1 Config"},
		{"authority data that is not base64", kubeconfigText(good+", certificate-authority-data: '%%%'", ""), "not a v1 Config"},
		{"authority data without a certificate", kubeconfigText(good+", certificate-authority-data: aGVsbG8=", ""), "preparing TLS"},
		{"another kind of object", "kind: Pod\napiVersion: v1\n", "not a v1 Config"},
		{`there is no context ""`, "kind: Config\napiVersion: v1\n", `there is no context ""`},
		{"a missing current-context", "current-context: gone\n", `there is no context "gone"`},
		{
			"two users of the same name with tokens", "current-context: a\nusers: [{name: a, user: {token: " + secret + "}}, {name: a}]",
			"unique names",
		},
		{
			"a missing cluster",
			"current-context: a\ncontexts: [{name: a, context: {cluster: c, user: u}}]", "no configuration has been provided",
		},
		{"no server", kubeconfigText("certificate-authority: /x", ""), `no server found for cluster "local"`},
		{"a server that is not a URL", kubeconfigText("server: 'https://a b'", ""), "the server is not a URL that can be used"},
		{"a server with a bad port and a password", kubeconfigText("server: 'https://u:"+secret+"@x:port'", ""), "the server is not a URL that can be used"},
		{"a server of another scheme", kubeconfigText("server: 'ftp://x'", ""), `scheme "ftp"`},
		{"a host with a path but no scheme", kubeconfigText("server: 'host:6443/path'", ""), "the server is not a URL"},
		{"a proxy that is not a URL", kubeconfigText(good+", proxy-url: 'http://u:"+secret+"@x:port'", ""), "the proxy-url is not a URL that can be used"},
		{"a missing authority file", kubeconfigText(good+", certificate-authority: gone.crt", ""), "gone.crt"},
		{"an empty authority file", kubeconfigText(good+", certificate-authority: empty", ""), "the file is empty"},
		{"a missing key file", kubeconfigText(good, "client-certificate-data: aGVsbG8=, client-key: gone.key"), "gone.key"},
		{"a certificate that is not PEM", kubeconfigText(good, "client-certificate-data: aGVsbG8=, client-key-data: aGVsbG8="), "preparing TLS"},
		{"a missing token file", kubeconfigText(good, "tokenFile: gone.token"), "gone.token"},
		{"an empty token file", kubeconfigText(good, "tokenFile: empty"), "the file is empty"},
		{"a token and a username", kubeconfigText(good, "token: "+secret+", username: me, password: "+secret), "only one is allowed"},
		{"a credential plugin", kubeconfigText(good, "exec: {command: aws, apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never}"), "credential plugin"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "istio-cni-kubeconfig")
			kubetest.Write(t, file, test.text)
			kubetest.Write(t, filepath.Join(dir, "empty"), "")
			client, err := NewClient(Config{Kubeconfig: file})
			if err == nil || client != nil {
				t.Fatalf("NewClient returns %v and no error", client)
			}
			check.Contains(t, err.Error(), test.want, file, "Remedy: the node agent (istio-cni-node)")
			check.Equal(t, strings.Contains(err.Error(), secret), false, "the secret is in", err)
			if config, ok := errors.AsType[*Error](err); !ok || config.Class != InvalidConfig || config.File != file {
				t.Errorf("error is a %T, want a ConfigError of %s", err, file)
			}
		})
	}
}

func TestKubeconfig_MissingOrUnreadable(t *testing.T) {
	dir := t.TempDir()
	missing := filepath.Join(dir, "istio-cni-kubeconfig")
	_, err := NewClient(Config{Kubeconfig: missing})
	if !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), missing) || !strings.Contains(err.Error(), "Remedy:") {
		t.Errorf("missing file: %v", err)
	}
	pipe := filepath.Join(dir, "pipe")
	check.OK(t, syscall.Mkfifo(pipe, 0o600))
	for _, file := range []string{dir, pipe} {
		_, err = NewClient(Config{Kubeconfig: file})
		if err == nil || errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "not a regular file") {
			t.Errorf("%s: %v", file, err)
		}
	}
}

// FuzzKubeconfig: a damaged file is a printable error.
func FuzzKubeconfig(f *testing.F) {
	f.Add(kubeconfigText("server: 'https://10.0.0.1:443'", "token: abc"))
	f.Add(kubeconfigText("server: 'localhost:1', proxy-url: 'socks5://x'", "tokenFile: x"))
	f.Add("a: &a [*a, *a]")
	f.Fuzz(func(t *testing.T, text string) {
		file := filepath.Join(t.TempDir(), "config")
		kubetest.Write(t, file, text)
		config, _, err := readKubeconfig(file)
		if err != nil {
			if err.Error() == "" {
				t.Error("an error without text")
			}
			return
		}
		if config.Host == "" {
			t.Errorf("a cluster without server passes: %q", text)
		}
	})
}

func TestKubeconfig_NoCredentials(t *testing.T) {
	const planted = "pl4nted"
	clean, secrets, err := WithoutCredentials([]byte(`{"apiVersion":"v1","kind":"Config","current-context":"c","contexts":[{"name":"c","context":{"cluster":"k","user":"u"}}],
		"clusters":[{"name":"k","cluster":{"server":"https://me:pl4nted@10.0.0.1:6443","certificate-authority-data":"cGw0bnRlZA==","proxy-url":"http://me:pl4nted@proxy"}}],
		"users":[{"name":"u","user":{"token":"pl4nted","password":"pl4nted-too","username":"me","client-key-data":"cGw0bnRlZA==","tokenFile":"/token",
		"exec":{"apiVersion":"client.authentication.k8s.io/v1","command":"x","args":["pl4nted"],"interactiveMode":"Never"},"auth-provider":{"name":"n","config":{"a":"pl4nted"}}}}]}`), "(gone)")
	text := string(clean)
	if err != nil || strings.Contains(text, planted) || strings.Contains(text, "cGw0") || strings.Count(text, "(gone)") != 2 || !strings.Contains(text, "server: https://10.0.0.1:6443\n") || !strings.Contains(text, "tokenFile: /token\n") || len(secrets) != 2 {
		t.Errorf("%v, %q:\n%s", err, secrets, text)
	}
	if _, _, err = WithoutCredentials([]byte("users: [ pl4nted"), "(gone)"); err == nil || strings.Contains(err.Error(), planted) {
		t.Errorf("got %v", err)
	}
}
