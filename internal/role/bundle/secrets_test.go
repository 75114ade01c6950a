package bundle

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// secretPart is in each of the secrets below.
const secretPart = "pl4nted0123456789abcdefABCDEF0123"

// usual are the usual forms of secrets in a text, by their names.
func usual() map[string]string {
	return map[string]string{
		"GitHub": "ghp_" + secretPart, "GitLab": "glpat-" + secretPart, "Slack": "xoxb-" + secretPart, "Slack hook": "https://hooks.slack.com/services/T0/B0/" + secretPart,
		"Google": "AIza" + secretPart, "Stripe": "sk_live_" + secretPart, "Vault": "hvs." + secretPart, "npm": "npm_" + secretPart, "OpenAI": "sk-" + secretPart,
		"AWS": "AKIA" + secretPart, "Azure": "AccountName=a;AccountKey=" + secretPart + "==;EndpointSuffix=x", "token flag": "run --token " + secretPart,
		"password flag": "run --password " + secretPart, "netrc": "machine h login u password " + secretPart, "PSK": `: PSK "` + secretPart + `"`,
		"sha512crypt": "root:$6$salt$" + secretPart, "bcrypt": "u:$2y$05$" + secretPart, "apr1": "u:$apr1$salt$" + secretPart, "kubeadm": "abcdef.0" + secretPart,
		"pass": "pass: " + secretPart, "YAML below": "password:\n  " + secretPart, "YAML block": "password: |\n  " + secretPart, "prose": "the token is " + secretPart,
		"SNMP": "snmp-server community " + secretPart + " RO", "OAuth": "http://localhost/cb?code=" + secretPart, "bearer": "Authorization: Bearer " + secretPart,
		"JWT": "eyJhbGciOiJSUzI1NiJ9.eyJ" + secretPart + ".s", "PEM": "-----BEGIN EC PRIVATE KEY-----\n" + secretPart + "\n-----END EC PRIVATE KEY-----",
	}
}

// members are secrets by the names of JSON members.
var members = []string{
	`"args": ["--token", "` + secretPart + `"]`, `"etcd_key": "` + secretPart + `"`, `"etcdKey": "` + secretPart + `"`, `"ipsecKey": "` + secretPart + `"`,
	`"encryption.key": "` + secretPart + `"`, `"pass": "` + secretPart + `"`, `"communityString": "` + secretPart + `"`, `"headers": ["Authorization", "` + secretPart + `"]`,
	`"token": {"value": "` + secretPart + `"}`, `"env": [{"name": "DB_PASSWORD", "value": "` + secretPart + `"}]`, `"a": {"credentials": {"b": {"c": "` + secretPart + `"}}}`,
	`"` + secretPart + `": 1`, `"runtimeConfig": {"io.kubernetes.cri.pod-annotations": {"example.com/private": "` + secretPart + `"}}`,
}

// TestSecrets_OfOtherPrograms: no usual form of a secret is in the bundle if another program wrote it, whether its file is valid or not.
func TestSecrets_OfOtherPrograms(t *testing.T) {
	const list = `{"cniVersion": "1.0.0", "name": "net", "plugins": [{"type": "bridge", "bridge": "cni0", %s}]}`
	valid, broken, raw := map[string]string{}, map[string]string{}, map[string]string{}
	log := `{"time":"2026-05-04T03:02:01.000001Z","level":"info","msg":"pod captured"}` + "\n"
	add := func(name, members string) {
		valid[name+".conflist"] = fmt.Sprintf(list, members)
		broken[name+".conflist"] = strings.TrimSuffix(valid[name+".conflist"], "]}")
		log += "{" + members + "}\n"
	}
	for name, secret := range usual() {
		text, _ := json.Marshal(secret)
		words, _ := json.Marshal(strings.Fields(secret))
		add(fileName(name), fmt.Sprintf(`"note": %s, "list": [%s], "words": %s, "text": %q, %s: 1`, text, text, words, `{"a": `+string(text)+`}`, text))
		raw[fileName(name)+".conf"] = secret
		log += secret + "\n"
	}
	for i, m := range members {
		add(fmt.Sprint(i), m)
	}
	for kind, net := range map[string]map[string]string{"valid": valid, "broken": broken, "raw": raw} {
		t.Run(kind, func(t *testing.T) {
			dir, netDir := agenttest.SocketDir(t), t.TempDir()
			net[pluginsFile], net["other.log"] = log, log
			for name, text := range net {
				put(t, filepath.Join(netDir, name), text)
			}
			put(t, filepath.Join(dir, pluginsFile), log)
			_, files, _ := run(t, "--socket="+dir+"/pods.sock", "--net-dir="+netDir)
			for _, name := range slices.Sorted(maps.Keys(files)) {
				if strings.Contains(name+files[name], secretPart) {
					t.Errorf("a secret is in %s", name)
				}
			}
			if !strings.Contains(files["plugin.log"], "pod captured") {
				t.Errorf("plugin.log: %s", files["plugin.log"])
			}
			for name := range net {
				conf := cniconf.Candidate(name)
				check.Equal(t, strings.Contains(files["cni/"+name], `"bridge": "cni0"`), conf && kind == "valid", name, "is shown")
				_, left, _ := strings.Cut(files["missing.txt"], "cni/"+name+": left out, ")
				left, _, _ = strings.Cut(left, "\n")
				if said := strings.Contains(left, " bytes: not valid JSON: an error at byte "); said != (conf && kind != "valid") {
					t.Errorf("%s: missing.txt has %q", name, left)
				}
			}
		})
	}
}

func put(t *testing.T, file, text string) {
	t.Helper()
	check.OK(t, os.WriteFile(file, []byte(text), 0o600))
}
