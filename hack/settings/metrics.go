package main

import (
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/audit"
)

var (
	metricType  = regexp.MustCompile(`(?m)^# HELP (\S+) (.*)\n# TYPE \S+ (\S+)\n((?:[^#\n].*\n)*)`)
	metricLabel = regexp.MustCompile(`[{,](\w+)="([^"]*)"`)
)

// open are labels whose values the page has elsewhere, or that have none of a closed set.
var open = []string{"reason", "version", "tag", "namespace", "pod"} //nolint:gochecknoglobals // a constant

// agentMetrics is the table of the node agent's metrics, without the metrics of process and Go runtime.
func agentMetrics() (string, error) {
	m := metrics.New("")
	var pods []audit.Status
	for _, state := range audit.States() {
		pods = append(pods, audit.Status{State: state})
	}
	m.ReadAudit(func() []audit.Status { return slices.Clone(pods) }, func() time.Time { return time.Time{} })
	m.ReadAmbient(func() metrics.AmbientCounts { return metrics.AmbientCounts{} })
	return metricTable(m.Text()), nil
}

func taintMetrics() (string, error) { return metricTable(metrics.NewTaint("").Text()), nil }

// metricTable has a row for each metric in a text of the Prometheus format.
func metricTable(text []byte) string {
	lines := []string{"| metric | type | labels | meaning |", "|---|---|---|---|"}
	for _, m := range metricType.FindAllStringSubmatch(string(text), -1) {
		name, help, kind, samples := m[1], m[2], m[3], m[4]
		if strings.HasPrefix(name, "process_") || strings.HasPrefix(name, "go_") {
			continue
		}
		lines = append(lines, "| "+strings.Join([]string{code(name), kind, labels(samples), plain(help)}, " | ")+" |")
	}
	return strings.Join(lines, "\n")
}

// labels lists the labels of samples with their values, except for open ones.
func labels(samples string) string {
	var names, texts []string
	values := map[string][]string{}
	for _, m := range metricLabel.FindAllStringSubmatch(samples, -1) {
		if name := m[1]; name != "le" && !slices.Contains(names, name) {
			names = append(names, name)
		}
		if !slices.Contains(values[m[1]], m[2]) {
			values[m[1]] = append(values[m[1]], m[2])
		}
	}
	for _, name := range names {
		text := code(name)
		if !slices.Contains(open, name) {
			text += ": " + code(values[name]...)
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, "; ")
}
