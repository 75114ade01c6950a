package redact_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redact"
)

const planted = "planted-s3cret-0123456789"

func TestText(t *testing.T) {
	r := redact.New("  literal-"+planted+"\n", "short", "")
	for name, text := range map[string]string{
		"a given secret":       "reading literal-" + planted + " failed",
		"a header":             `Authorization: Bearer ` + planted,
		"a header in JSON":     `{"headers":{"Authorization":["Bearer ` + planted + `"]}}`,
		"a bearer alone":       "got bearer " + planted,
		"a JWT":                "token eyJhbGciOiJSUzI1NiJ9.eyJzdWIi" + planted + ".sig-" + planted,
		"a PEM block":          "-----BEGIN RSA PRIVATE KEY-----\n" + planted + "\n-----END RSA PRIVATE KEY-----",
		"an escaped PEM block": `"-----BEGIN CERTIFICATE-----\n` + planted + `\n-----END CERTIFICATE-----"`,
		"half a PEM block":     "-----BEGIN EC PRIVATE KEY-----\n" + planted,
		"PEM in base64":        "client: LS0tLS1CRUdJTiBDRVJ" + strings.ReplaceAll(planted, "-", "+"),
		"a variable":           "MY_TOKEN=" + planted,
		"a quoted variable":    `DB_PASSWORD="a ` + planted + `"`,
		"YAML":                 "  client-key-data: " + planted,
		"JSON":                 `{"etcd_password": "x\"` + planted + `"}`,
		"JSON in JSON":         `{"msg":"{\"apiSecret\": \"a ` + planted + `\"}"}`,
		"a single quote":       `secret='a ` + planted + `'`,
		"a URL":                "https://user:" + planted + "@example.com/",
		"a user of a URL":      "https://" + planted + "@example.com/",
		"a signed URL":         "https://example.com/?a=b&sig=" + planted,
		"an AWS URL":           "https://example.com/?X-Amz-Signature=" + planted,
		"another scheme":       "Authorization: Token " + planted,
		"cookies":              `"Cookie: a=b; session=` + planted + `"`,
		"a map of headers":     "map[X-Api-Key:[" + planted + "] Accept:[*]]",
		"an array":             `{"token":["` + planted + `"],"a":1}`,
		"a number":             `{"a":{"token":12345},"password":"` + planted + `"}`,
		"a comma":              "password=ab," + planted + " user=x",
		"a brace":              "password: ab;{" + planted,
		"a backslash":          `password=ab\` + planted,
		"a tab":                "Bearer\t" + planted,
		"docker's":             `{"auths":{"r":{"auth":"` + planted + `"}}}`,
		"a short name":         "DB_PWD=" + planted,
		"a shared key":         "psk=" + planted,
		"an encryption key":    "encryption-key: " + planted,
		"a TLS key":            "tls.key: " + planted,
		"three levels":         `err="msg: \"token: \\\"a ` + planted + `\\\"\""`,
		"a cut value":          `{"password":"a ` + planted,
		"a cut inner value":    `{"msg":"{\"password\": \"a ` + planted,
		"a JWT in base64":      "data: ZXlKaGJHY2lPaUpTVXpJMU5pSjku" + strings.ReplaceAll(planted, "-", "+"),
	} {
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
	} {
		if got := string(r.Text([]byte(text))); got != text {
			t.Errorf("%q became %q", text, got)
		}
	}
}

func TestJSON(t *testing.T) {
	r := redact.New()
	got, err := r.JSON([]byte(`{"name":"db_password","value":"` + planted + `","plugins":[{"type":"calico","etcdToken":"` + planted + `",
		"secrets":{"a":["` + planted + `"]},"env":[{"name":"MY_SECRET","value":"` + planted + `"},{"name":"MODE","value":"1"},{"Key":"a_token","Value":"` + planted + `"}],
		"password":12345678901234567890,"policy":"Bearer ` + planted + `","number":12345678901234567890,"kubeconfig":"/etc/x"}],
		"text":"<&>","token":"","keyFile":"/a","MY_TOKEN=` + planted + `":1}`))
	if err != nil || strings.Contains(string(got), planted) || strings.Count(string(got), "12345678901234567890") != 1 {
		t.Fatalf("%v: %s", err, got)
	}
	for _, kept := range []string{`"value": "1"`, `"kubeconfig": "/etc/x"`, `"text": "<&>"`, `"token": ""`, `"keyFile": "/a"`, `"type": "calico"`} {
		if !strings.Contains(string(got), kept) {
			t.Errorf("no %s in %s", kept, got)
		}
	}
	for _, text := range []string{"", "{", "{} {}"} {
		if _, err := r.JSON([]byte(text)); err == nil {
			t.Errorf("%q is no document", text)
		}
	}
}

// TestOnePodCannotHideTheLog: what pods can write takes out no other line.
func TestOnePodCannotHideTheLog(t *testing.T) {
	for _, text := range []string{"-----BEGIN A-----", `password=\"`, "token='", `secret: "`, "Authorization: x"} {
		log := fmt.Sprintf("msg=%q\ntime=\"2026\" msg=important\nmsg=%q\nmsg=end\n", text, text)
		got := string(redact.New().Text([]byte(log)))
		if !strings.Contains(got, "msg=important\n") || !strings.HasSuffix(got, "msg=end\n") {
			t.Errorf("%q became %q", log, got)
		}
	}
}

// FuzzText: what comes out has no given secret.
func FuzzText(f *testing.F) {
	f.Add(`token="` + planted + `"`)
	f.Fuzz(func(t *testing.T, text string) {
		r := redact.New(planted)
		if got := string(r.Text([]byte(text + planted + text))); strings.Contains(got, planted) {
			t.Errorf("%q", got)
		}
	})
}
