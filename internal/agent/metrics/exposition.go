package metrics

import (
	"bytes"
	"net/http"
	"strings"

	"github.com/VictoriaMetrics/metrics"
)

// contentType is that of the Prometheus text format.
const contentType = "text/plain; version=0.0.4; charset=utf-8"

// Handler serves the metrics, whatever the path.
func (m *Metrics) Handler() http.Handler { return handler(m.Text) }

func handler(text func() []byte) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "only GET and HEAD", http.StatusMethodNotAllowed)
			return
		}
		w.Header().Set("Content-Type", contentType)
		_, _ = w.Write(text()) // a scraper that went away
	})
}

// Text returns all metrics in the Prometheus text format, those of the process included.
//
// The library's own metadata are switched on for a whole process, and their help is empty. So the lines are taken
// without, and each family of the tables gets its header here. A family that no table describes is left out, which
// concerns the Go runtime's only.
func (m *Metrics) Text() []byte { return text(m.set, ownFamilies()) }

func text(set *metrics.Set, own []family) []byte {
	var raw bytes.Buffer
	set.WritePrometheus(&raw)
	metrics.WriteProcessMetrics(&raw)
	metrics.WriteFDMetrics(&raw)

	described := append(own, processFamilies()...)
	known := make(map[string]bool, len(described))
	for _, f := range described {
		known[f.name] = true
	}
	samples := make(map[string][]byte, len(described))
	for line := range bytes.Lines(raw.Bytes()) {
		family := familyOf(string(line), known)
		samples[family] = append(samples[family], line...)
	}
	var text bytes.Buffer
	for _, f := range described {
		if len(samples[f.name]) > 0 {
			text.WriteString("# HELP " + f.name + " " + f.help + "\n# TYPE " + f.name + " " + f.kind + "\n")
			text.Write(samples[f.name])
		}
	}
	return text.Bytes()
}

// familyOf returns the family a line's sample belongs to: its name, or that without the suffix of a histogram.
func familyOf(line string, known map[string]bool) string {
	name := line[:max(strings.IndexAny(line, "{ "), 0)]
	for _, suffix := range []string{"_bucket", "_sum", "_count"} {
		if base, cut := strings.CutSuffix(name, suffix); cut && known[base] {
			return base
		}
	}
	return name
}
