package output_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/test/check"
	"github.com/meshcni/istio-cni/internal/test/documenttest"
)

// TestList_Forms: a list in parts is the document that Print writes.
func TestList_Forms(t *testing.T) {
	t.Parallel()
	checks := []document.Check{{Name: "x\x1b", Result: document.OK}, {Name: "y", Result: document.Warn, Remedy: "z\n- name: q"}}
	head := document.Head{Time: time.Now(), Omitted: 2, Nodes: []document.Node{{Name: "n1"}}}
	for _, form := range []output.Form{output.JSON, output.YAML} {
		for _, items := range [][]document.Check{checks, checks[:1], {}, nil} {
			var list, whole bytes.Buffer
			check.OK(t, output.List(&list, form, document.DoctorReport{}, head, items))
			check.OK(t, output.Print(&whole, document.DoctorReport{Head: head, Items: items}, form, nil))
			documenttest.Valid(t, "DoctorReport", list.String())
			documenttest.Valid(t, "DoctorReport", whole.String())
			var got, want any
			check.OK(t, yaml.Unmarshal(list.Bytes(), &got))
			check.OK(t, yaml.Unmarshal(whole.Bytes(), &want))
			check.Diff(t, fmt.Sprint(form, " with ", len(items)), want, got)
		}
	}
}

// TestEvent_Stream: each event is a line of JSON, or a document of YAML.
func TestEvent_Stream(t *testing.T) {
	t.Parallel()
	var line, stream bytes.Buffer
	for range 2 {
		e := document.TraceEvent{End: &document.TraceEnd{Reason: "a\n---\n\x1b"}}
		check.OK(t, output.Event(&line, e, output.JSON))
		check.OK(t, output.Event(&stream, e, output.YAML))
	}
	documenttest.Valid(t, "TraceEvent", line.String())
	documenttest.Valid(t, "TraceEvent", stream.String())
	check.Equal(t, strings.Count(line.String(), "\n"), 2, line.String())
	check.Equal(t, strings.Count("\n"+stream.String(), "\n---\n"), 2, stream.String())
}

// probe is a row that records how much was written before it was formatted.
type probe struct {
	out  *bytes.Buffer
	seen *[]int
}

func (p probe) MarshalJSON() ([]byte, error) {
	*p.seen = append(*p.seen, p.out.Len())
	return json.Marshal(strings.Repeat("x", 64<<10))
}

func TestList_RowByRow(t *testing.T) {
	t.Parallel()
	for _, form := range []output.Form{output.JSON, output.YAML} {
		var out bytes.Buffer
		var seen []int
		check.OK(t, output.List(&out, form, document.PodList{}, document.Head{}, []probe{{&out, &seen}, {&out, &seen}, {&out, &seen}}))
		if len(seen) != 3 || seen[1] < 60<<10 || seen[2] < 120<<10 {
			t.Errorf("%s: %d bytes were written before each row", form, seen)
		}
	}
}

func TestPods_Columns(t *testing.T) {
	t.Parallel()
	now := time.Now()
	all := []audit.Status{
		{
			Namespace: "shop", Pod: "a", State: audit.Captured, Sentence: "is redirected as wanted", Since: now.Add(-50 * time.Hour),
			Checked: now.Add(time.Minute), Backend: "netlink",
		},
		{Namespace: "shop", Pod: "plain", State: audit.Outside, Sentence: "is not injected"},
		{Namespace: "shop", Pod: "b", State: audit.Captured, Exceptions: make([]audit.Exception, 2), Since: now.Add(-90 * time.Minute)},
		{
			Namespace: "shop", Pod: "c", State: audit.Drifted, Since: now.Add(-3 * time.Hour),
			Problems: []audit.Problem{{State: audit.Drifted, Detail: "nat/OUTPUT: missing \x1b[2J\tx"}, {State: audit.NoListener}},
		},
		{
			Namespace: "evil", Pod: "x captured\n", State: audit.Bypassed,
			Problems: []audit.Problem{{State: audit.Bypassed, Detail: "no rule"}},
		},
	}
	audit.Sort(all)
	var b strings.Builder
	call := applet.Call{Stdout: &b}
	check.OK(t, output.Pods(call, all, false))
	got := strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
	want := []string{
		`POD                   STATE     SINCE  CHECKED  BACKEND  WHY`,
		`evil/x\x20captured\n  bypassed  -      -        -        no rule`,
		`shop/c                drifted   3h     -        -        nat/OUTPUT: missing \u001b[2J\tx (and 1 more)`,
		`shop/a                captured  2d2h   0s       netlink  is redirected as wanted`,
		`shop/b                captured  90m    -        -        exceptions by its own settings: 2`,
		`shop/plain            outside   -      -        -        is not injected`,
		`2 of 4 mesh pods are not redirected as wanted`,
	}
	check.Equal(t, fmt.Sprintf("%q", got), fmt.Sprintf("%q", want), b.String())
	all[0].Node, all[1].Node = "n1", "n2"
	b.Reset()
	if err := output.Pods(call, all, false); err != nil || !strings.HasPrefix(b.String(), "NODE  POD ") || !strings.Contains(b.String(), "\n-     shop/a ") {
		t.Errorf("got\n%s%v", b.String(), err)
	}
}

func TestPods_LastLineCounts(t *testing.T) {
	t.Parallel()
	for states, want := range map[string]string{
		"bypassed no-listener ipv6-open captured captured outside": "3 of 5 mesh pods are not redirected as wanted",
		"not-inspected drifted not-inspected":                      "1 of 3 mesh pods is not redirected as wanted, 2 not inspected",
		"outside":                                                  "0 of 0 mesh pods are not redirected as wanted",
	} {
		var all []audit.Status
		for state := range strings.FieldsSeq(states) {
			all = append(all, audit.Status{Pod: "a", State: audit.State(state)})
		}
		for _, selected := range []bool{false, true} {
			if selected {
				want = strings.Replace(want, "mesh", "listed mesh", 1)
			}
			var b strings.Builder
			check.OK(t, output.Pods(applet.Call{Stdout: &b}, all, selected))
			check.Contains(t, b.String(), "\n"+want+"\n")
		}
	}
}

// TestColumns_Terminal: rows fit, and a cell that is cut keeps its end.
func TestColumns_Terminal(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("frontend-", 30) + "5f6b8c9d7f-2mwnl"
	for _, node := range []string{"", strings.Repeat("node.", 20)} {
		all := []audit.Status{
			{Node: node, Namespace: "shop", Pod: long, State: audit.ForeignListener, Problems: []audit.Problem{{Detail: strings.Repeat("界 ", 200)}}},
			{Node: node, Namespace: "shop", Pod: "cart-0", State: audit.Captured, Sentence: audit.Captured.Sentence(), Backend: "netlink"},
		}
		for _, width := range []int{80, 120, 0} {
			var b strings.Builder
			check.OK(t, output.Pods(applet.Call{Stdout: &b, Terminal: func() int { return width }}, all, false))
			for line := range strings.Lines(b.String()) {
				if n := printable.Width(strings.TrimSuffix(line, "\n")); width > 0 && n > width {
					t.Errorf("%d of %d columns: %s", n, width, line)
				}
			}
			if whole := strings.Contains(b.String(), long); whole != (width == 0) || !strings.Contains(b.String(), "-2mwnl  foreign-listener  ") {
				t.Errorf("%d columns:\n%s", width, b.String())
			}
		}
	}
}

// TestShow_Colours: only marks and states are painted, and only where colours are wanted. What a text brings along is escaped.
func TestShow_Colours(t *testing.T) {
	t.Parallel()
	const plain = "POD shop/web: DRIFTED, the pod\n  MISSING IPv4 nat: captured FOREIGN\n✓ a/b: captured\nn1  shop/a  captured  1s\nn1  captured/drifted  drifted\nsh…p-1  captured  1s\nthe pod captured\n! x\x1b[2J\n- -A X\n  -A Y - +\n"
	for _, colours := range []bool{false, true} {
		var b strings.Builder
		check.OK(t, output.Show(applet.Call{Stdout: &b, Colours: func() bool { return colours }}, plain))
		want := strings.ReplaceAll(plain, "\x1b", `\u001b`)
		if colours {
			want = "POD shop/web: \x1b[31mDRIFTED,\x1b[0m the pod\n  \x1b[31mMISSING\x1b[0m IPv4 nat: captured FOREIGN\n\x1b[32m✓\x1b[0m a/b: captured\n" +
				"n1  shop/a  \x1b[32mcaptured\x1b[0m  1s\nn1  captured/drifted  \x1b[31mdrifted\x1b[0m\nsh…p-1  \x1b[32mcaptured\x1b[0m  1s\nthe pod captured\n\x1b[33m!\x1b[0m x\\u001b[2J\n\x1b[31m-\x1b[0m -A X\n  -A Y - +\n"
		}
		check.Equal(t, b.String(), want, "colours", colours)
	}
}

// TestScreen_PartsOfLines: a process writes parts of lines.
func TestScreen_PartsOfLines(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	s := &output.Screen{Call: applet.Call{Stdout: &b, Colours: func() bool { return true }}}
	for _, part := range []string{"✗ a", " b\n✓", " c\nrest"} {
		_, err := s.Write([]byte(part))
		check.OK(t, err)
	}
	check.OK(t, s.Close())
	check.Equal(t, b.String(), "\x1b[31m✗\x1b[0m a b\n\x1b[32m✓\x1b[0m c\nrest", "painted")
	const most = 128 << 10
	n := b.Len()
	_, err := s.Write(make([]byte, most))
	check.OK(t, err)
	if b.Len() < n+most {
		t.Error("a line without an end is held back")
	}
}

func TestFold_Lines(t *testing.T) {
	t.Parallel()
	const text = "kernel 6\nnetlink   works\n          a problem with averyveryverylongword\n"
	check.Equal(t, output.Fold(text, 0), text, "without a terminal")
	check.Equal(t, output.Fold(text, 24), "kernel 6\nnetlink   works\n          a problem with\n              averyv…ord\n", "folded")
}

// TestChecks_Fit: no line is longer than a terminal is wide, also the address of each page. TestPages_References looks for the pages.
func TestChecks_Fit(t *testing.T) {
	t.Parallel()
	hints := 0
	for _, g := range output.Groups() {
		for name := range g.Hints {
			hints++
			var b strings.Builder
			failed := document.Check{Name: name, Result: document.Fail, Text: strings.Repeat("n", 200) + strings.Repeat(" word", 50), Remedy: strings.Repeat("do ", 50)}
			check.OK(t, output.Checks(applet.Call{Stdout: &b, Terminal: func() int { return 80 }}, []document.Check{failed}))
			for line := range strings.Lines(b.String()) {
				if n := printable.Width(strings.TrimSuffix(line, "\n")); n > 80 {
					t.Errorf("%d columns: %s", n, line)
				}
			}
		}
	}
	if hints < 10 {
		t.Errorf("%d hints", hints)
	}
}
