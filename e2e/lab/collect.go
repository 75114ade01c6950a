package lab

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/meshcni/istio-cni/e2e/cluster"
)

// logState logs the last events and the state of all pods.
func (l *Lab) logState() {
	l.Helper()
	ctx, cancel := background()
	defer cancel()
	if events, err := l.client.CoreV1().Events("").List(ctx, meta.ListOptions{}); err == nil {
		for _, e := range events.Items[max(0, len(events.Items)-60):] {
			l.Logf("%s/%s: %s: %s", e.InvolvedObject.Namespace, e.InvolvedObject.Name, e.Reason, e.Message)
		}
	}
	pods, err := l.client.CoreV1().Pods("").List(ctx, meta.ListOptions{})
	if err != nil {
		l.Log(err)
		return
	}
	for _, p := range pods.Items {
		l.Logf("%s/%s: %s, ready: %t, %s", p.Namespace, p.Name, p.Status.Phase, Ready(&p), p.Status.PodIP)
	}
}

// collect writes logs, objects, rules and CNI files to a directory named after the test.
func (l *Lab) collect() {
	dir := filepath.Join(l.Logs, strings.ReplaceAll(l.Name(), "/", "-"))
	if err := l.CollectLogs(filepath.Join(dir, "servers")); err != nil {
		l.Log(err)
	}
	l.collectObjects(dir)
	for _, m := range l.Machines() {
		if !m.Runs() {
			continue
		}
		l.collectFrom(m, filepath.Join(dir, m.Node()))
	}
	l.Logf("logs and objects are in %s", dir)
}

// collectFrom writes files and rules of one node.
func (l *Lab) collectFrom(m *cluster.Machine, dir string) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		l.Log(err)
		return
	}
	l.collectRules(m, dir)
	for _, from := range []string{l.NetDir(), "/run/istio-cni", "/var/lib/cni/results"} {
		l.appendOutput(m, dir, "files.txt", "sh", "-c", `ls -la "$1"; for f in "$1"/*; do echo "== $f"; test -f "$f" && tail -c 20000 "$f"; echo; done`, "sh", from)
	}
}

func (l *Lab) collectObjects(dir string) {
	ctx, cancel := background()
	defer cancel()
	write := func(name string, object any) {
		text, err := yaml.Marshal(object)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), text, 0o644)
		}
		if err != nil {
			l.Log(err)
		}
	}
	if events, err := l.client.CoreV1().Events("").List(ctx, meta.ListOptions{}); err == nil {
		write("events.yaml", events.Items)
	}
	if nodes, err := l.client.CoreV1().Nodes().List(ctx, meta.ListOptions{}); err == nil {
		write("nodes.yaml", nodes.Items)
	}
	pods, err := l.client.CoreV1().Pods("").List(ctx, meta.ListOptions{})
	if err != nil {
		l.Log(err)
		return
	}
	write("pods.yaml", pods.Items)
	for _, p := range pods.Items {
		// The API server waits long for a kubelet that has no power.
		if m := l.On(p.Spec.NodeName); m == nil || !m.Runs() {
			continue
		}
		for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
			l.collectOutput(dir, p.Namespace, p.Name, c.Name)
		}
	}
}

func (l *Lab) collectOutput(dir, namespace, pod, container string) {
	for _, previous := range []bool{true, false} {
		text := l.Output(namespace, pod, container, previous)
		if text == "" {
			continue
		}
		name := fmt.Sprintf("log-%s-%s-%s.txt", namespace, pod, container)
		if previous {
			name = "previous-" + name
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			l.Log(err)
		}
	}
}

// collectRules writes the addresses, routes and rules of the node and of each pod.
func (l *Lab) collectRules(m *cluster.Machine, dir string) {
	const script = "ip addr; ip rule; ip route show table all; nft list ruleset; iptables-legacy-save; ip6tables-legacy-save"
	l.appendOutput(m, dir, "rules.txt", "sh", "-c", `echo "== node"; sh -c "$1" 2>&1
for n in /run/netns/*; do echo "== $n"; nsenter --net="$n" sh -c "$1" 2>&1; done`, "sh", script)
}

// appendOutput runs a program on a node and appends its output to a file.
func (l *Lab) appendOutput(m *cluster.Machine, dir, name, program string, args ...string) {
	ctx, cancel := background()
	defer cancel()
	text, err := m.Command(ctx, program, args...).CombinedOutput()
	if err != nil {
		text = fmt.Appendln(text, err)
	}
	file, err := os.OpenFile(filepath.Join(dir, name), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		l.Log(err)
		return
	}
	defer file.Close() //nolint:errcheck // an explanation
	_, _ = file.Write(text)
}
