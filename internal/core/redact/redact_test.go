package redact_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/redact"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/test/check"
)

const planted = "planted-s3cret-0123456789"

func TestText(t *testing.T) {
	r := redact.New("  literal-"+planted+"\n", "short", "")
	rule := ruleset.NFT("", ruleset.Accept, ruleset.Comment{Text: `a "` + planted}).String()
	texts := map[string]string{
		"a given secret":         "reading literal-" + planted + " failed",
		"a header":               `Authorization: Bearer ` + planted,
		"a header in JSON":       `{"headers":{"Authorization":["Bearer ` + planted + `"]}}`,
		"a JWT":                  "token eyJhbGciOiJSUzI1NiJ9.eyJzdWIi" + planted + ".sig-" + planted,
		"a PEM block":            "-----BEGIN RSA PRIVATE KEY-----\n" + planted + "\n-----END RSA PRIVATE KEY-----",
		"an escaped PEM block":   `"-----BEGIN CERTIFICATE-----\n` + planted + `\n-----END CERTIFICATE-----"`,
		"half a PEM block":       "-----BEGIN EC PRIVATE KEY-----\n" + planted,
		"PEM in base64":          "client: LS0tLS1CRUdJTiBDRVJ" + strings.ReplaceAll(planted, "-", "+"),
		"a quoted variable":      `DB_PASSWORD="a ` + planted + `"`,
		"JSON":                   `{"etcd_password": "x\"` + planted + `"}`,
		"JSON in JSON":           `{"msg":"{\"apiSecret\": \"a ` + planted + `\"}"}`,
		"a single quote":         `secret='a ` + planted + `'`,
		"a URL":                  "https://user:" + planted + "@example.com/",
		"a user of a URL":        "https://" + planted + "@example.com/",
		"a signed URL":           "https://example.com/?a=b&sig=" + planted,
		"an AWS URL":             "https://example.com/?X-Amz-Signature=" + planted,
		"another scheme":         "Authorization: Token " + planted,
		"cookies":                `"Cookie: a=b; session=` + planted + `"`,
		"a map of headers":       "map[X-Api-Key:[" + planted + "] Accept:[*]]",
		"an array":               `{"token":["` + planted + `"],"a":1}`,
		"a number":               `{"a":{"token":12345},"password":"` + planted + `"}`,
		"a comma":                "password=ab," + planted + " user=x",
		"a brace":                "password: ab;{" + planted,
		"a backslash":            `password=ab\` + planted,
		"a tab":                  "Bearer\t" + planted,
		"docker's":               `{"auths":{"r":{"auth":"` + planted + `"}}}`,
		"three levels":           `err="msg: \"token: \\\"a ` + planted + `\\\"\""`,
		"a cut value":            `{"password":"a ` + planted,
		"a value cut by a line":  `{"password":"a ` + planted + "\nnext line",
		"a single quote, cut":    "password='a " + planted + "\nnext line",
		"an inner value cut":     `msg="{\"password\": \"a ` + planted + "…\" x=1\nnext line",
		"an inner value in JSON": `{"msg":"{\"password\": \"a ` + planted + `…","x":1}`,
		"a deep value in JSON":   `{"msg":"{\"x\": \"password: \\\"a ` + planted + `…\""}`,
		"quotes within":          `msg="password=\"a \\\"` + planted + `\""`,
		"quotes within, deep":    `msg="x=\"password=\\\"a \\\\\\\"` + planted + `\\\"\""`,
		"a cut inner value":      `{"msg":"{\"password\": \"a ` + planted,
		"a hash":                 "root:$6$salt$" + planted + ":1",
		"an option":              "ran x --token " + planted + " -v",
		"a rule's comment":       `-A OUTPUT -m comment --comment "a ` + planted + `" -j RETURN`,
		"a comment, quoted":      `msg="-m comment --comment \"a ` + planted + `\" -j RETURN"`,
		"a comment of nft":       rule,
		"nft's, quoted":          fmt.Sprintf("msg=%q", "the rule "+rule),
		"nft's, twice quoted":    fmt.Sprintf("msg=%q", fmt.Sprintf("rule %q", rule)),
		"a JWT in base64":        "data: ZXlKaGJHY2lPaUpTVXpJMU5pSjku" + strings.ReplaceAll(planted, "-", "+"),
	}
	for name := range strings.FieldsSeq("MY_TOKEN DB_PWD DB_PASS pass psk encryption-key tls.key master_key client-key-data jwt SESSION_ID JSESSIONID") {
		texts[name], texts["YAML of "+name] = "x "+name+"="+planted, "  "+name+": "+planted
	}
	for prefix := range strings.FieldsSeq("ghp_ ghu_ xapp- hooks.slack.com/services/ hvs. npm_ AKIA") {
		texts["a token with "+prefix] = "got " + prefix + planted + " of it"
	}
	for name, text := range texts {
		got := string(r.Text([]byte(text)))
		if strings.Contains(got, planted) || strings.Contains(got, strings.ReplaceAll(planted, "-", "+")) || !strings.Contains(got, redact.Mark) {
			t.Errorf("%s: %s", name, got)
		}
		if json.Valid([]byte(text)) && !json.Valid([]byte(got)) {
			t.Errorf("%s: not JSON any more: %s", name, got)
		}
	}
	for _, text := range []string{
		"the pod shop/web is captured: it has a sidecar", "token-file=/var/run/secrets/token", "tokenFile: /a/b", "shorter", "keyboard: de",
		"istio_cni_add_total{reason=\"captured\",source=\"agent\"} 600", "-A OUTPUT -p tcp -j ISTIO_OUTPUT", "service-account-dir = /var/run/secrets",
		"the pod shop/task-0123456789abcdef", "a comment of a rule", "ambient.istio.io/bypass-inbound-capture: true", "pass the pod",
		"JWT_POLICY=third-party-jwt", "PassthroughCluster: 1", "ran x --token-file /var/run/token",
	} {
		if got := string(r.Text([]byte(text))); got != text {
			t.Errorf("%q became %q", text, got)
		}
	}
}

func TestJSON(t *testing.T) {
	got, err := redact.New().JSON([]byte(`{"z":["Bearer ` + planted + `"],"number":12345678901234567890,"text":"<&>","a":{"rule":"--comment \"` + planted + `\" -j RETURN"},"key":null}`))
	want := `{"z":["` + redact.Mark + `"],"number":12345678901234567890,"text":"<&>","a":{"rule":"--comment \"` + redact.Mark + `\" -j RETURN"},"key":null}`
	var indented bytes.Buffer
	check.OK(t, errors.Join(err, json.Indent(&indented, []byte(want), "", "  ")))
	check.Equal(t, string(got), indented.String()+"\n")
}

// TestForeign_KnownKeys: Foreign shows the values of known keys, and types and lengths of others; an unusual key may be a secret.
func TestForeign_KnownKeys(t *testing.T) {
	got, err := redact.New().Foreign([]byte(`{"cniVersion":"1.0.0","plugins":[{"type":"calico","mtu":1500,"capabilities":{"portMappings":true},"ipam":
		{"ranges":[[{"subnet":"10.1.0.0/16"}]]},"etcd_endpoints":"https://h","pin":1234,"args":["a",{"type":"x"}],"none":null,"empty":"","name":"sk-0123456789abcdef"}],
		"b c":1,"abcdefghijklmnopqrstuvwxyzabcdefg":2,"a1b2":"","ghp_abcdefghijklmnop":false,"type":"` + strings.Repeat("x", 300) + `"}`))
	want := `{"cniVersion":"1.0.0","plugins":[{"type":"calico","mtu":1500,"capabilities":{"portMappings":true},"ipam":` +
		`{"ranges":[[{"subnet":"10.1.0.0/16"}]]},"etcd_endpoints":"string of 9 bytes","pin":"number of 4 bytes","args":["string of 1 bytes",{"type":"string of 1 bytes"}],` +
		`"none":null,"empty":"","name":"string of 19 bytes"}],"key of 3 bytes":"number of 1 bytes","key of 33 bytes":"number of 1 bytes","key of 4 bytes":"",` +
		`"` + redact.Mark + `":false,"type":"string of 300 bytes"}`
	var flat bytes.Buffer
	check.OK(t, errors.Join(err, json.Compact(&flat, got)))
	check.Equal(t, flat.String(), want)
	stanza := cniconf.Stanza{
		LogLevel: "info", RunDir: "/run/x", ExcludeNamespaces: []string{"kube-system"}, AgentNamespace: "istio-system", APITimeout: time.Second,
		Backend: redirect.Native, ForceIptables: "nft", SecondFamily: redirect.Reject,
	}.Element()
	if got, err = redact.New().Foreign(stanza); err != nil || !cniconf.Same(got, stanza) {
		t.Errorf("%v: %s", err, got)
	}
}

// TestForeign_Bounds: a document that is invalid, too deep or too large gives an error without any part of the document.
func TestForeign_Bounds(t *testing.T) {
	for text, want := range map[string]string{
		"":                          "byte 0",
		"{} {}":                     "byte 4",
		`{"token": ` + planted:      "byte 11",
		`{"token": "` + planted:     "byte 36",
		"password: " + planted:      "byte 1",
		strings.Repeat("[", 20_000): "byte 10001",
		strings.Repeat(`{"a":`, 33) + "1" + strings.Repeat("}", 33): "more than 32 levels",
		"[" + strings.Repeat("1,", 20_000) + "1]":                   "more than 20000 values",
	} {
		if got, err := redact.New().Foreign([]byte(text)); err == nil || !strings.Contains(err.Error(), want) || got != nil {
			t.Errorf("%.50q: %v, want %s", text, err, want)
		}
	}
}

// TestForeign_OnePodCannotHideTheLog: text from a pod never removes another line.
func TestForeign_OnePodCannotHideTheLog(t *testing.T) {
	for _, text := range []string{"-----BEGIN A-----", `password=\"`, "token='", `secret: "`, "Authorization: x"} {
		log := fmt.Sprintf("msg=%q\ntime=\"2026\" msg=important\nmsg=%q\nmsg=end\n", text, text)
		got := string(redact.New().Text([]byte(log)))
		if !strings.Contains(got, "msg=important\n") || !strings.HasSuffix(got, "msg=end\n") {
			t.Errorf("%q became %q", log, got)
		}
	}
}

// FuzzText: the output never contains a given secret.
func FuzzText(f *testing.F) {
	f.Add(`token="` + planted + `"`)
	f.Fuzz(func(t *testing.T, text string) {
		r := redact.New(planted)
		if got := string(r.Text([]byte(text + planted + text))); strings.Contains(got, planted) {
			t.Errorf("%q", got)
		}
	})
}
