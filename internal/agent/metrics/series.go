package metrics

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/VictoriaMetrics/metrics"
)

// vector is the counters of one family, by their labels as written.
type vector map[string]*metrics.Counter

func newVector(set *metrics.Set, name string, series []string) vector {
	v := make(vector, len(series))
	for _, s := range series {
		v[s] = set.NewCounter(name + s)
	}
	return v
}

// add counts n. Labels that are not among those of New are a mistake in this program, and no reason for a node agent to
// end; a test holds the constants to those of New.
func (v vector) add(series string, n int) {
	if c, ok := v[series]; ok && n > 0 {
		c.Add(n)
	}
}

// labels writes keys and values, given in turn, as the text format wants them.
func labels(pairs ...string) string {
	escape := strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)
	var parts []string
	for pair := range slices.Chunk(pairs, 2) {
		parts = append(parts, pair[0]+`="`+escape.Replace(strings.ToValidUTF8(pair[1], "\uFFFD"))+`"`)
	}
	return "{" + strings.Join(parts, ",") + "}"
}

// one returns the series of a family with one label.
func one[V ~string](key string, values ...V) []string {
	var series []string
	for _, v := range values {
		series = append(series, labels(key, string(v)))
	}
	return series
}

// pairs returns the series of a family with two labels.
func pairs[A, B ~string](keyA string, as []A, keyB string, bs []B) []string {
	var series []string
	for _, a := range as {
		for _, b := range bs {
			series = append(series, labels(keyA, string(a), keyB, string(b)))
		}
	}
	return series
}

// histogram counts values by upper bounds, as Prometheus does. The library's own have buckets of another kind.
type histogram struct {
	name   string
	labels []string  // keys and values in turn
	bounds []float64 // ascending

	mu     sync.Mutex
	counts []uint64 // one more than there are bounds
	sum    float64
}

func newHistogram(name string, labels []string, bounds ...float64) *histogram {
	return &histogram{name: name, labels: labels, bounds: bounds, counts: make([]uint64, len(bounds)+1)}
}

func (h *histogram) observe(v float64) {
	at, _ := slices.BinarySearch(h.bounds, v)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.counts[at]++
	h.sum += v
}

func (h *histogram) write(w io.Writer) {
	h.mu.Lock()
	counts, sum := slices.Clone(h.counts), h.sum
	h.mu.Unlock()
	below := uint64(0)
	for i, n := range counts {
		below += n
		bound := "+Inf"
		if i < len(h.bounds) {
			bound = strconv.FormatFloat(h.bounds[i], 'g', -1, 64)
		}
		_, _ = fmt.Fprintf(w, "%s_bucket%s %d\n", h.name, labels(append(slices.Clone(h.labels), "le", bound)...), below) // to memory
	}
	own := ""
	if len(h.labels) > 0 {
		own = labels(h.labels...)
	}
	_, _ = fmt.Fprintf(w, "%s_sum%s %g\n%s_count%s %d\n", h.name, own, sum, h.name, own, below)
}
