package fleet_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/archive/archivetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// nodeFile returns a node's tar.gz file.
func nodeFile(t *testing.T, files map[string]string) string {
	t.Helper()
	var text bytes.Buffer
	zipped := gzip.NewWriter(&text)
	out := tar.NewWriter(zipped)
	for name, content := range files {
		check.OK(t, out.WriteHeader(&tar.Header{Name: "istio-cni-bundle-n/" + name, Mode: 0o600, Size: int64(len(content))}))
		check.OK(t, check.Err(out.Write([]byte(content))))
	}
	check.OK(t, errors.Join(out.Close(), zipped.Close()))
	return text.String()
}

const planted = "planted-s3cret-0123456789"

// cluster returns answers of an API server with a secret in each object, and in the log of the proxy of pod shop/web.
func cluster() []answer {
	const at = "2026-05-04T03:02:01.000001Z\tinfo\t"
	set := fmt.Sprintf(`{"kind":"DaemonSet","metadata":{"namespace":"istio-system","name":"istio-cni-node","uid":"uid-of-istio-system"},"spec":{"template":{"spec":{"containers":[
		{"name":"install-cni","image":"hub/install-cni:1","env":[{"name":"KEY","value":%q}],"envFrom":[{"configMapRef":{"name":"istio-cni-config"}}]}]}}}}`, planted)
	events := list(
		fmt.Sprintf(`{"metadata":{"creationTimestamp":"2026-05-04T03:02:01Z"},"eventTime":null,"lastTimestamp":"2026-05-04T03:02:03Z","type":"Warning","reason":"FailedCreatePodSandBox","count":3,
			"message":"plugin failed\n\u001b[2J token=%s","involvedObject":{"kind":"Pod","namespace":"shop","name":"web"}}`, planted),
		fmt.Sprintf(`{"metadata":{"creationTimestamp":"2026-05-04T03:02:02Z"},"eventTime":"2026-05-04T03:02:02.123456Z","lastTimestamp":null,"type":"Warning","reason":"Unhealthy",
			"message":%q,"involvedObject":{"kind":"Pod","namespace":"shop","name":"web"}}`, planted))
	return []answer{
		{For: "get -o json daemonsets.apps -n istio-system -l k8s-app in (istio-cni-node, istio-cni-observer)", Out: list(set)},
		{For: "get -o json configmaps -n istio-system -- istio-cni-config", Out: fmt.Sprintf(`{"data":{"AMBIENT_ENABLED":"true","CNI_NETWORK_CONFIG":%q}}`, planted)},
		{For: "get -o json mutatingwebhookconfigurations", Out: list(fmt.Sprintf(`{"metadata":{"name":"istio"},"webhooks":[{"name":"x","clientConfig":{"caBundle":%q},"reinvocationPolicy":"Never"}]}`, planted))},
		{For: "get -o json events -n shop --field-selector involvedObject.kind=Pod,involvedObject.name=web", Out: events},
		{For: "get -o json events -n istio-system", Out: events},
		{For: "get -o json pods -n shop -- web", Out: fmt.Sprintf(`{"kind":"Pod","metadata":{"name":"web","annotations":{"a":%q}},"spec":{"nodeName":"n1","containers":[{"name":"app","args":[%[1]q]}]}}`, planted)},
		{For: "get -o json namespaces -- shop", Out: `{"kind":"Namespace","metadata":{"name":"shop","labels":{"istio-injection":"enabled"}}}`},
		{For: "logs -n shop -c istio-proxy --tail=2000 --limit-bytes=16777216 -- web", Out: at + "Envoy proxy is ready\n" + planted + "\n" + at + "Bearer " + planted + "\n"},
	}
}

// bundled checks the files of a bundle.
func bundled(t *testing.T, r result, want map[string]string) map[string]string {
	t.Helper()
	files, _ := archivetest.Unpack(t, strings.NewReader(r.stdout))
	for name, part := range want {
		check.Contains(t, files[name], part)
	}
	for name, text := range files {
		if strings.Contains(text, planted) || strings.ContainsRune(text, '\x1b') {
			t.Errorf("%s has a secret: %s", name, text)
		}
	}
	return files
}

// TestBundle_OfAPod: the objects of the cluster and of the pod, and the files of its node, without secrets.
func TestBundle_OfAPod(t *testing.T) {
	t.Parallel()
	getPod := answer{For: "get -o json pod -n shop", Out: `{"metadata":{"namespace":"shop","name":"web"},"spec":{"nodeName":"n2"}}`}
	r := run(t, fleetOf(2, append(cluster(), getPod, of(2, "bundle shop/web --since=2h", nodeFile(t, map[string]string{"README.txt": "of n2", "pods/shop_web.json": "{}"})))...),
		"bundle", "-n", "shop", "web", "--since", "2h")
	check.Equal(t, r.code, 0)
	check.Equal(t, r.stderr, "cluster: done\nnode n2: done, 1 of 1\n")
	files := bundled(t, r, map[string]string{
		"README.txt": "missing.txt", "nodes/n2/README.txt": "of n2", "nodes/n2/pods/shop_web.json": "{}", "cluster/daemonsets.json": `"image": "hub/install-cni:1"`,
		"cluster/configmaps.json": `"AMBIENT_ENABLED": "true"`, "cluster/webhooks.json": `"reinvocationPolicy": "Never"`, "cluster/pod.json": `"nodeName": "n1"`,
		"cluster/namespace.json": `"istio-injection": "enabled"`, "cluster/pod-events.txt": "Unhealthy", "cluster/proxy.log": "Envoy proxy is ready\n",
		"cluster/events.txt": `LAST                  TYPE     REASON                  OBJECT         COUNT  MESSAGE
2026-05-04T03:02:03Z  Warning  FailedCreatePodSandBox  Pod/shop/web/  3      plugin failed\n\u001b[2J token=(redacted)
2026-05-04T03:02:02Z  Warning  Unhealthy               Pod/shop/web/  1      message of 25 bytes
`,
	})
	check.Equal(t, len(files), 11, "files")
}

// TestBundle_OfAllNodes: a directory for each node; nodes that fail are named, with the files that they sent.
func TestBundle_OfAllNodes(t *testing.T) {
	t.Parallel()
	whole := nodeFile(t, map[string]string{"README.txt": strings.Repeat("random enough? ", 10)})
	big := nodeFile(t, map[string]string{"agent.log": strings.Repeat("x", 17<<20), "version.txt": "v"})
	failing := func(agent, code int, out, stderr string) answer {
		return answer{For: of(agent, "bundle", "").For, Code: code, Out: out, Err: stderr}
	}
	answers := []answer{
		of(1, "bundle", whole), failing(2, 1, whole, "error: the node agent does not answer\n"),
		{For: of(3, "bundle", "").For, Out: whole[:len(whole)-20], Hang: true},
		of(4, "bundle", "garbage, garbage"), of(5, "bundle", whole[:len(whole)/2]), failing(6, 1, "", "Error from server (Forbidden): no\x1b\n"), of(7, "bundle", ""), of(8, "bundle", big),
		{For: "get -o json events", Code: 1, Err: "Error from server (Forbidden): events is forbidden: Bearer " + planted + "\n"},
		{For: "get nodes", Out: "node/n1\nnode/alone\n"},
	}
	r := run(t, fleetOf(8, append(answers, cluster()...)...), "bundle", "--timeout=10s")
	files := bundled(t, r, map[string]string{"nodes/n1/README.txt": "enough", "nodes/n2/README.txt": "enough", "nodes/n8/version.txt": "v", "cluster/webhooks.json": "Never"})
	check.Contains(t, files["missing.txt"]+"\n",
		"nodes/n2: the node agent does not answer\n", "nodes/n3: no answer within 10s\n", "nodes/n4: reading its bundle: gzip: invalid header\n",
		"nodes/n5: reading its bundle: unexpected EOF\n", "nodes/n6: Error from server (Forbidden): no", "nodes/n7: reading its bundle: EOF\n",
		"nodes/alone: it has no node agent\n", "nodes/n8/agent.log: left out: it is no file of at most 16 MiB\n",
		"cluster/events.txt: kubectl get events: Error from server (Forbidden): events is forbidden: (redacted)\n")
	r.want(t, 1, "", "cluster: done, but for 1 parts, which missing.txt names\n")
	check.Contains(t, r.stderr, "node n1: done, ", ", 8 of 8\n", "node n3: failed, ", "node n3: no answer: no answer within 10s\n", "error: nodes without a node agent")
}

// TestBundle_WithoutANode: a pod that is on no node has its objects in the bundle, and so has a cluster whose agents do not start.
func TestBundle_WithoutANode(t *testing.T) {
	t.Parallel()
	getPod := answer{For: "get -o json pod -n shop", Out: `{"metadata":{"namespace":"shop","name":"web"},"spec":{}}`}
	r := run(t, fleetOf(1, append(cluster(), getPod)...), "bundle", "shop/web")
	r.want(t, 1, "", "error: pod shop/web is on no node yet\n")
	bundled(t, r, map[string]string{"cluster/pod-events.txt": "FailedCreatePodSandBox", "missing.txt": "nodes/: pod shop/web is on no node yet\n"})
	r = run(t, fleetOf(0, cluster()...), "bundle")
	r.want(t, 1, "", "error: no node agent was found")
	bundled(t, r, map[string]string{"cluster/events.txt": "FailedCreatePodSandBox", "missing.txt": "nodes/: no node agent was found"})
	r = run(t, fleetOf(2, append(cluster(), of(2, "bundle", nodeFile(t, map[string]string{"a": "b"})))...), "bundle", "--node", "n2")
	r.want(t, 0, "", "node n2: done, 1 of 1\n")
	if files := bundled(t, r, map[string]string{"nodes/n2/a": "b"}); len(files) != 6 {
		t.Errorf("%d files", len(files))
	}
}

// TestBundle_HostileNode: links, deep names, too many files and a bomb stay in bounds, and another node's files are there.
func TestBundle_HostileNode(t *testing.T) {
	t.Parallel()
	var text bytes.Buffer
	zipped := gzip.NewWriter(&text)
	out := tar.NewWriter(zipped)
	for _, header := range []tar.Header{
		{Name: "d/link", Linkname: "/etc/passwd", Typeflag: tar.TypeSymlink},
		{Name: "d/../../../etc/cron.d/x"},
		{Name: "/etc/x"},
		{Name: "x"},
		{Name: "d/a/b/c/d"},
		{Name: "d/\x1b[2J\n" + strings.Repeat("long", 1000)},
		{Name: "d/dir/", Typeflag: tar.TypeDir},
		{Name: `d/..\..\x`},
	} {
		check.OK(t, out.WriteHeader(&header))
	}
	check.OK(t, errors.Join(out.Close(), zipped.Close()))
	odd := text.String()
	text.Reset()
	zipped.Reset(&text)
	out = tar.NewWriter(zipped)
	for i := range 10_002 {
		check.OK(t, out.WriteHeader(&tar.Header{Name: fmt.Sprint("d/", i)}))
	}
	check.OK(t, errors.Join(out.Close(), zipped.Close()))
	many := text.String()
	text.Reset()
	zipped.Reset(&text)
	check.OK(t, check.Err(zipped.Write(nil)))
	check.OK(t, tar.NewWriter(zipped).WriteHeader(&tar.Header{Name: "d/bomb", Size: 1 << 40}))
	zeros := make([]byte, 1<<20)
	for range 100 {
		check.OK(t, check.Err(zipped.Write(zeros)))
	}
	check.OK(t, zipped.Close())
	r := run(t, fleetOf(4, append(cluster(), of(1, "bundle", odd), of(2, "bundle", many), of(3, "bundle", text.String()), of(4, "bundle", nodeFile(t, map[string]string{"a": "b"})))...), "bundle")
	r.want(t, 1, "", "node n4: done, ")
	files := bundled(t, r, map[string]string{"nodes/n4/a": "b", "missing.txt": "nodes/n1/link: left out: it is no file"})
	for name := range files {
		if strings.Count(name, "/") > 3 || len(name) > 200 {
			t.Errorf("member %q", name)
		}
	}
	const large = ": reading its bundle: it has more than 48 MiB or 10000 files\n"
	check.Contains(t, files["missing.txt"], "nodes/n2"+large, "nodes/n3"+large)
}

// TestBundle_HostileSizes: a line of 100 MB in the log, 10,000 events, and nodes with much data are not held in memory.
func TestBundle_HostileSizes(t *testing.T) {
	t.Parallel()
	var events []string
	for i := range 10_000 {
		events = append(events, fmt.Sprintf(`{"metadata":{"creationTimestamp":"2026-05-04T%02d:%02d:%02dZ"},"type":"Normal","reason":"Started","message":"event %d"}`, i/3600, i/60%60, i%60, i))
	}
	much := nodeFile(t, map[string]string{"agent.log": strings.Repeat("a line\n", 15<<20/7), "metrics.txt": strings.Repeat("another\n", 15<<20/8)})
	answers := []answer{
		{For: "logs -n shop", Out: strings.Repeat("x", 1<<20), Repeat: 99},
		{For: "get -o json events", Out: list(events...)},
		{For: "get -o json pod -n shop", Out: `{"metadata":{"namespace":"shop","name":"web"},"spec":{"nodeName":"n1"}}`},
	}
	for i := range 12 {
		answers = append(answers, of(i+1, "bundle", much))
	}
	kubectl := standIn(t, fleetOf(12, append(answers, cluster()...)...))
	files := bundled(t, call(kubectl, nil, "bundle", "shop/web"), map[string]string{
		"cluster/proxy.log": "left out: 1 lines", "cluster/events.txt": "event 9999\n", "cluster/pod-events.txt": "left out: 9000 older events\n",
	})
	if strings.Contains(files["cluster/events.txt"], "event 8999\n") {
		t.Error("not the last events")
	}
	most := uint64(0)
	r := callInto(writer(func() {
		var now runtime.MemStats
		runtime.ReadMemStats(&now)
		most = max(most, now.HeapInuse)
	}), kubectl, nil, "bundle")
	if r.code != 0 || most > 500<<20 {
		t.Errorf("exit code %d, at most %d MiB: %s", r.code, most>>20, r.stderr)
	}
}

type writer func()

func (w writer) Write(text []byte) (int, error) {
	w()
	return len(text), nil
}

// TestBundle_FullDisk: the error of the output ends the command.
func TestBundle_FullDisk(t *testing.T) {
	t.Parallel()
	file := nodeFile(t, map[string]string{"a": "b"})
	kubectl := standIn(t, fleetOf(2, append(cluster(), of(1, "bundle", file), of(2, "bundle", file))...))
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	check.OK(t, err)
	callInto(full, kubectl, nil, "bundle").want(t, 1, "", "error: writing the bundle: write /dev/full: no space left on device\n")
}
