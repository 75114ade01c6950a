package redact_test

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/redact"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// pod is a pod with a secret in each place that a tenant can write.
const pod = `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"web","namespace":"shop","managedFields":[{"manager":"SECRET"}],
	"labels":{"istio.io/rev":"default","team":"SECRET","name":"SECRET","labels":"SECRET"},
	"annotations":{"kubectl.kubernetes.io/last-applied-configuration":"{\"env\":\"SECRET\"}","example.com/key":"SECRET","image":"SECRET",
	"traffic.sidecar.istio.io/excludeOutboundPorts":"5432","sidecar.istio.io/status":"{\"volumes\":[\"SECRET\"]}"}},
	"spec":{"nodeName":"n1","volumes":[{"name":"v","secret":{"secretName":"SECRET"}},{"name":"h","hostPath":{"path":"/run","type":""}},
	{"name":"d","downwardAPI":{"items":[{"path":"SECRET"}]}},{"name":"c","csi":{"driver":"x","volumeAttributes":{"name":"SECRET"}}}],
	"imagePullSecrets":[{"name":"SECRET"}],"hostAliases":[{"ip":"SECRET"}],
	"containers":[{"name":"app","image":"reg/app:1","command":["sh","-c","SECRET"],"args":["--name=SECRET"],"workingDir":"/SECRET",
	"env":[{"name":"DB","value":"SECRET"},{"name":"REF","valueFrom":{"secretKeyRef":{"name":"SECRET","key":"SECRET"}}}],
	"lifecycle":{"preStop":{"exec":{"command":["SECRET"]}}},"livenessProbe":{"httpGet":{"path":"/?SECRET","httpHeaders":[{"name":"a","value":"SECRET"}]}},
	"volumeMounts":[{"name":"v","mountPath":"/etc/x","subPathExpr":"SECRET"}]}]},
	"status":{"phase":"Running","message":"SECRET","conditions":[{"type":"Ready","status":"False","message":"SECRET"}],
	"containerStatuses":[{"name":"app","restartCount":3,"state":{"waiting":{"reason":"CrashLoopBackOff","message":"SECRET"}},
	"lastState":{"terminated":{"exitCode":1,"reason":"Error","message":"SECRET"}}}]}}`

const config = `{"kind":"List","items":[{"kind":"ConfigMap","metadata":{"name":"istio-cni-config"},"binaryData":{"name":"SECRET"},
	"data":{"AMBIENT_ENABLED":"true","CNI_NETWORK_CONFIG":"{\"password\":\"SECRET\"}","name":"SECRET","EXCLUDE_NAMESPACES":"Bearer SECRET"}}]}`

const webhook = `{"kind":"MutatingWebhookConfiguration","metadata":{"name":"istio-sidecar-injector"},"webhooks":[{"name":"rev.namespace.sidecar-injector.istio.io",
	"clientConfig":{"caBundle":"SECRET","url":"https://u:SECRET@h/","service":{"name":"SECRET","path":"/inject/SECRET"}},"reinvocationPolicy":"Never",
	"namespaceSelector":{"matchExpressions":[{"key":"istio-injection","operator":"In","values":["enabled"]}],"matchLabels":{"team":"SECRET"}},
	"matchConditions":[{"name":"c","expression":"SECRET"}]}]}`

// TestObject_Secrets: of an object, only values on the list are shown, in whatever field and under whatever key others are.
func TestObject_Secrets(t *testing.T) {
	for name, test := range map[string]struct {
		text  string
		shown []string
	}{
		"a pod": {pod, []string{
			`"istio.io/rev": "default"`, `"excludeOutboundPorts": "5432"`, `"nodeName": "n1"`, `"image": "reg/app:1"`, `"name": "DB"`, `"restartCount": 3`,
			`"CrashLoopBackOff"`, `"exitCode": 1`, `"path": "/run"`, `"mountPath": "/etc/x"`, `"team": "string of 25 bytes"`,
		}},
		"a ConfigMap": {config, []string{`"AMBIENT_ENABLED": "true"`, `"CNI_NETWORK_CONFIG": "string of 40 bytes"`, `"name": "istio-cni-config"`}},
		"a webhook":   {webhook, []string{`"reinvocationPolicy": "Never"`, `"istio-injection"`, `"enabled"`, `"name": "rev.namespace.sidecar-injector.istio.io"`}},
	} {
		got, err := redact.New().Object([]byte(strings.ReplaceAll(test.text, "SECRET", planted)))
		text := strings.ReplaceAll(string(got), "traffic.sidecar.istio.io/", "")
		if err != nil || !json.Valid(got) || strings.Contains(text, planted) || strings.Contains(text, "managedFields") || strings.Contains(text, "last-applied") {
			t.Errorf("%s: %v: %s", name, err, text)
		}
		check.Contains(t, text, test.shown...)
	}
}

// TestObject_Settings: each setting that the chart writes is shown, and each annotation that is a setting of a pod.
func TestObject_Settings(t *testing.T) {
	manifest, err := os.ReadFile("../../../manifests/istio-cni.yaml")
	check.OK(t, err)
	_, data, _ := strings.Cut(string(manifest), "\nkind: ConfigMap\n")
	data, _, _ = strings.Cut(data, "\n---")
	keys := []string{
		sidecar.InjectKey, sidecar.ExcludeInterfacesKey, sidecar.RerouteInterfacesKey, sidecar.KubevirtInterfacesKey, ambient.RedirectionKey, ambient.BypassInboundKey,
		ambient.DNSCaptureKey,
	}
	for field := range redirect.Field(64) {
		keys = append(keys, sidecar.KeyOf(field))
	}
	names := regexp.MustCompile(`(?m)^  ([A-Z0-9_]+):`).FindAllStringSubmatch(data, -1)
	if len(names) < 20 {
		t.Fatalf("%d settings", len(names))
	}
	for _, name := range names {
		keys = append(keys, name[1])
	}
	for _, key := range keys {
		got, err := redact.New().Object(fmt.Appendf(nil, `{"data":{%q:"a value"}}`, key))
		if key != "" && (err != nil || !strings.Contains(string(got), "a value")) {
			t.Errorf("%s: %v, %s", key, err, got)
		}
	}
}

// TestRecords_Secrets: of a proxy's log only records are shown, without credentials in any of the usual forms.
func TestRecords_Secrets(t *testing.T) {
	const at = "2026-05-04T03:02:01.000001Z\tinfo\tenvoy main external/envoy/source/server.cc:12\t"
	const random = "pl4nted0123456789abcdefABCDEF0123"
	for name, line := range map[string]string{
		"an access log":         `[2026-05-04T03:02:01.001Z] "GET /?x=SECRET HTTP/1.1" 200 - SECRET`,
		"an access log in JSON": `{"start_time":"2026-05-04T03:02:01.001Z","path":"/SECRET","level":"SECRET"}`,
		"no record":             "SECRET", "a body of PEM": "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjSECRET", "a PEM's end": "SECRET\n-----END RSA PRIVATE KEY-----",
		"PEM":             at + "key\n-----BEGIN RSA PRIVATE KEY-----\nSECRET\nSECRET\n-----END RSA PRIVATE KEY-----",
		"PEM in one line": at + `-----BEGIN EC PRIVATE KEY-----\nSECRET\n-----END EC PRIVATE KEY-----`,
		"a debug record":  strings.Replace(at, "info", "debug", 1) + "':authority', 'SECRET'",
		"a JSON record":   `{"level":"error","time":"2026-05-04T03:02:01.000001Z","scope":"xds","msg":"Authorization: Bearer SECRET","body":"SECRET"}`,
		"a JSON debug":    `{"level":"debug","time":"2026-05-04T03:02:01.000001Z","msg":"SECRET"}`,
		"a JSON scope":    `{"level":"info","time":"2026-05-04T03:02:01.000001Z","scope":"token=SECRET","msg":"x"}`,
		"escapes in JSON": `{"level":"info","time":"2026-05-04T03:02:01.000001Z","msg":"pass\u0077ord=SECRET"}`,
		"a bearer":        at + "got Bearer SECRET", "a user": at + "dial https://u:SECRET@h/x", "a slash": at + "dial https://u:a/SECRET@h/x",
		"a DSN": at + "dial u:SECRET@tcp(db:3306)/x", "a query": at + "GET /x?y=SECRET&z=1", "a percent": at + "password%3DSECRET", "an escape": at + `pass\u0077ord=SECRET`,
		"UTF-16": strings.Join(strings.Split(at+"password=SECRET", ""), "\x00"), "a zero width": at + "pass\u200bword=SECRET", "ANSI": at + "\x1b[1mpassword\x1b[0m=SECRET",
		"Latin-1": at + "password\xa0SECRET", "a carriage return": at + "x\rpassword SECRET", "a random word": at + "key is " + random, "base64": at + "UmFuZG9tU2VjcmV0" + random + "==",
		"an environment": at + `Apply proxy config from env {"proxyMetadata":{"MY_VALUE":"SECRET"}}`, "an annotation": at + "Apply proxy config from annotation\tfoo: SECRET",
		"a file":            `{"level":"info","time":"2026-05-04T03:02:01.000001Z","msg":"Apply mesh config from file {\"a\":\"SECRET\"}"}`,
		"a bad environment": at + `failed to unmarshal mesh config from environment [{"a":"SECRET"}]: yaml`,
		"hex":               at + "key 0123456789abcdef0123456789abcdef", "a split query": at + "/x?" + strings.Repeat("a", 1010) + "=SECRET",
		"a cut password": at + "password=" + strings.Repeat("a", 2000) + "SECRET", "a line too long": at + strings.Repeat("x ", 40_000) + "password=SECRET",
	} {
		for _, size := range []int{1, 7, 1 << 20} {
			records := redact.New().Records()
			write(t, records, strings.ReplaceAll(line, "SECRET", planted)+"\n", size)
			write(t, records, at+"the end\n"+at+"password="+planted, size)
			got := string(records.Text())
			if strings.Contains(got, planted) || strings.Contains(got, random) || strings.Contains(got, "0123456789abcdef") || !strings.Contains(got, " the end\nleft out: ") {
				t.Errorf("%s, written by %d bytes: %s", name, size, got)
			}
		}
	}
}

func write(t *testing.T, to *redact.Records, text string, size int) {
	t.Helper()
	for text != "" {
		part := text[:min(size, len(text))]
		n, err := to.Write([]byte(part))
		if n != len(part) {
			t.Fatalf("%d of %d bytes, %v", n, len(part), err)
		}
		text = text[n:]
	}
}

// TestRecords_Useful: what a proxy logs about itself stays as it is.
func TestRecords_Useful(t *testing.T) {
	const log = "2026-05-04T03:02:01.000001Z\tinfo\tFLAG: --concurrency=\"0\"\n" +
		"2026-05-04T03:02:01.000001+02:00\twarning\tenvoy config external/envoy/source/extensions/config_subscription/grpc/grpc_stream.h:155\t" +
		"StreamAggregatedResources gRPC config stream to xds-grpc closed: 14, connection error: desc = \"transport: Error while dialing: dial tcp 10.96.0.1:15012: " +
		"connect: connection refused\"\tthread=12\n" +
		"2026-05-04T03:02:02Z\terror\tcluster outbound|80||productpage-v1-6b746f74dc-9stvs.default.svc.cluster.local\n"
	records := redact.New().Records()
	write(t, records, log, 1000)
	check.Equal(t, string(records.Text()), strings.NewReplacer(":155\t", ":155 ", "\tthread", " thread").Replace(log))
	write(t, records, `{"level":"info","time":"2026-05-04T03:02:03.5Z","scope":"ads","msg":"Envoy proxy is ready"}`+"\r\n", 1000)
	if got := string(records.Text()); !strings.HasSuffix(got, "\n2026-05-04T03:02:03.5Z\tinfo\tads Envoy proxy is ready\n") {
		t.Errorf("%s", got)
	}
}

// TestRecords_Bounds: a line of 100 MB and many lines are held in bounded memory, and the last records are kept.
func TestRecords_Bounds(t *testing.T) {
	records := redact.New().Records()
	part := []byte(strings.Repeat("x", 1<<16))
	cost := testing.AllocsPerRun(100<<20/len(part), func() { _, _ = records.Write(part) })
	for i := range 10_000 {
		write(t, records, fmt.Sprintf("\n2026-05-04T03:02:01.000001Z\tinfo\tmessage %d\n", i), 1000)
	}
	text := string(records.Text())
	if cost > 1 || strings.Count(text, "\n") != 201 || !strings.Contains(text, "\tmessage 9800\n") || strings.Contains(text, "\tmessage 9799\n") || len(text) > 300<<10 {
		t.Errorf("%v allocations for a part, %d bytes: %.300s", cost, len(text), text)
	}
}

// TestEvent_Messages: only messages of known reasons are shown, as one line.
func TestEvent_Messages(t *testing.T) {
	r := redact.New()
	for _, test := range [][3]string{
		{"Failed", "Error: exec: \"app --x " + planted + "\"", "message of 48 bytes"},
		{"Unhealthy", "Readiness probe failed: " + planted, "message of 49 bytes"},
		{"", planted, "message of 25 bytes"},
		{"BackOff", "Back-off pulling image \"reg/app:1@sha256:0a\" of web-5f6b8c9d7f-2mwnl", "Back-off pulling image \"reg/app:1@sha256:0a\" of web-5f6b8c9d7f-2mwnl"},
		{"FailedCreatePodSandBox", "a\nb\x1b token=" + planted, `a\nb\u001b token=` + redact.Mark},
		{"ForeignRule", "https://u:" + planted + "@h/?a=" + planted, "https" + redact.Mark + "h/?" + redact.Mark},
	} {
		check.Equal(t, r.Event(test[0], test[1]), test[2], test[0])
	}
	if got := r.Event("Started", strings.Repeat("a ", 100_000)); len(got) > 1<<10 {
		t.Errorf("%d bytes", len(got))
	}
}
