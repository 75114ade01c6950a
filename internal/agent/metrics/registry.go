package metrics

import (
	"bytes"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// contentType is the media type of the Prometheus text format.
const contentType = "text/plain; version=0.0.4; charset=utf-8"

const (
	counter   = "counter"
	gauge     = "gauge"
	histogram = "histogram"
)

// registry has the families in the order of their declaration.
type registry struct{ families []*family }

// family has all series of a name. Its labels are a closed set, in the text format without the braces.
type family struct {
	kind, name, help string
	bounds           []float64 // of a histogram, ascending

	mu      sync.Mutex
	series  []string
	samples map[string]*sample
	// list computes the series of a gauge on each scrape, unless nil.
	list func() []point
}

// point is a series that exists only at the time of a scrape.
type point struct {
	labels string
	value  float64
}

// sample is one series. For a histogram, value is the sum, and counts has one count per bound and one above all bounds.
type sample struct {
	value  float64
	counts []uint64
}

// declare adds a family with series of value zero. Without series it adds one series that has no labels.
func (r *registry) declare(kind, name, help string, series ...string) *family {
	if len(series) == 0 {
		series = []string{""}
	}
	f := &family{kind: kind, name: name, help: help, series: series, samples: make(map[string]*sample, len(series))}
	for _, labels := range series {
		f.samples[labels] = &sample{}
	}
	r.families = append(r.families, f)
	return f
}

func (r *registry) declareHistogram(name, help string, bounds []float64, series ...string) *family {
	f := r.declare(histogram, name, help, series...)
	f.bounds = bounds
	for _, s := range f.samples {
		s.counts = make([]uint64, len(bounds)+1)
	}
	return f
}

// sample runs change on a series. It ignores undeclared labels: they are a bug, but must not end a node agent; a test compares
// the constants with the declarations.
func (f *family) sample(labels string, change func(*sample)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s := f.samples[labels]; s != nil {
		change(s)
	}
}

// add adds n. A counter never decreases.
func (f *family) add(n int, labels string) {
	if n > 0 || f.kind == gauge {
		f.sample(labels, func(s *sample) { s.value += float64(n) })
	}
}

// move subtracts one from the series with the labels before, and adds one to the series with the labels now. It ignores
// undeclared labels, such as an empty value's.
func (f *family) move(before, now string) {
	f.add(-1, before)
	f.add(1, now)
}

// set sets the value of a gauge without labels.
func (f *family) set(v float64) {
	f.sample("", func(s *sample) { s.value = v })
}

func (f *family) setBool(on bool) {
	f.set(map[bool]float64{true: 1}[on])
}

func (f *family) observe(v float64, labels string) {
	at, _ := slices.BinarySearch(f.bounds, v)
	f.sample(labels, func(s *sample) {
		s.value += v
		s.counts[at]++
	})
}

// listBy sets the function that computes the series of a gauge on each scrape; nil restores the stored series.
func (f *family) listBy(list func() []point) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.list = list
}

// reset makes all series zero.
func (f *family) reset() {
	for _, labels := range f.series {
		f.sample(labels, func(s *sample) { s.value = 0 })
	}
}

// has reports whether the labels are declared.
func (f *family) has(labels string) bool { return f.samples[labels] != nil }

func (f *family) write(b *bytes.Buffer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	fmt.Fprintf(b, "# HELP %s %s\n# TYPE %s %s\n", f.name, f.help, f.name, f.kind)
	if f.list != nil {
		for _, p := range f.list() {
			writeSample(b, f.name, p.labels, p.value)
		}
		return
	}
	for _, labels := range f.series {
		if s := f.samples[labels]; f.kind == histogram {
			f.writeHistogram(b, labels, s)
		} else {
			writeSample(b, f.name, labels, s.value)
		}
	}
}

func (f *family) writeHistogram(b *bytes.Buffer, labels string, s *sample) {
	total := uint64(0)
	for i, n := range s.counts {
		total += n
		bound := "+Inf"
		if i < len(f.bounds) {
			bound = strconv.FormatFloat(f.bounds[i], 'g', -1, 64)
		}
		writeSample(b, f.name+"_bucket", join(labels, label("le", bound)), float64(total))
	}
	writeSample(b, f.name+"_sum", labels, s.value)
	writeSample(b, f.name+"_count", labels, float64(total))
}

func writeSample(b *bytes.Buffer, name, labels string, value float64) {
	if labels != "" {
		labels = "{" + labels + "}"
	}
	b.WriteString(name + labels + " " + strconv.FormatFloat(value, 'f', -1, 64) + "\n")
}

// Text returns all metrics in the Prometheus text format, including the process's.
func (r *registry) Text() []byte {
	var b bytes.Buffer
	for _, f := range append(slices.Clip(r.families), process()...) {
		f.write(&b)
	}
	return b.Bytes()
}

// Handler serves the metrics on every path.
func (r *registry) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", contentType)
		_, _ = w.Write(r.Text()) // the scraper may have closed the connection
	})
	return mux
}

// label formats a key and a value for the text format.
func label[V ~string](key string, value V) string {
	escape := strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)
	return key + `="` + escape.Replace(strings.ToValidUTF8(string(value), "\uFFFD")) + `"`
}

func join(a, b string) string {
	if a == "" {
		return b
	}
	return a + "," + b
}

// each returns the series of a family with one label.
func each[V ~string](key string, values ...V) []string {
	var series []string
	for _, v := range values {
		series = append(series, label(key, v))
	}
	return series
}

// pairs returns the series of a family with two labels: all combinations of as and bs.
func pairs(as, bs []string) []string {
	var series []string
	for _, a := range as {
		for _, b := range bs {
			series = append(series, join(a, b))
		}
	}
	return series
}
