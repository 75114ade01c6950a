package output_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/test/check"
	"github.com/meshcni/istio-cni/internal/test/documenttest"
)

// TestList_Forms: a list in parts is the document that Print writes.
func TestList_Forms(t *testing.T) {
	t.Parallel()
	checks := []output.Check{{Name: "x\x1b", Result: output.OK}, {Name: "y", Result: output.Warn, Remedy: "z\n- name: q"}}
	head := document.Head{Time: time.Now(), Omitted: 2, Nodes: []document.Node{{Name: "n1"}}}
	for _, form := range []output.Form{output.JSON, output.YAML} {
		for _, items := range [][]output.Check{checks, checks[:1], {}, nil} {
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
	check.OK(t, output.Pods(&b, all, false))
	got := strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
	want := []string{
		`POD                   STATE     SINCE  CHECKED  BACKEND  WHY`,
		`evil/x\x20captured\n  bypassed  -      -        -        no rule`,
		`shop/c                drifted   3h     -        -        nat/OUTPUT: missing \u001b[2J\tx (and 1 more)`,
		`shop/a                captured  2d     0s       netlink  is redirected as wanted`,
		`shop/b                captured  90m    -        -        exceptions by its own settings: 2`,
		`shop/plain            outside   -      -        -        is not injected`,
		`2 of 4 mesh pods are not redirected as wanted`,
	}
	if fmt.Sprintf("%q", got) != fmt.Sprintf("%q", want) {
		t.Errorf("got\n%s\nwant\n%s", b.String(), strings.Join(want, "\n"))
	}
	all[0].Node, all[1].Node = "n1", "n2"
	b.Reset()
	if err := output.Pods(&b, all, false); err != nil || !strings.HasPrefix(b.String(), "NODE  POD ") || !strings.Contains(b.String(), "\n-     shop/a ") {
		t.Errorf("got\n%s%v", b.String(), err)
	}
}

func TestPods_LastLineCounts(t *testing.T) {
	t.Parallel()
	for want, test := range map[string]struct {
		states   []audit.State
		selected bool
	}{
		"3 of 5 mesh pods are not redirected as wanted": {
			[]audit.State{audit.Bypassed, audit.NoListener, audit.IPv6Open, audit.Captured, audit.Captured, audit.Outside}, false,
		},
		"1 of 3 mesh pods is not redirected as wanted, 2 not inspected": {[]audit.State{audit.NotInspected, audit.Drifted, audit.NotInspected}, false},
		"0 of 0 mesh pods are not redirected as wanted":                 {[]audit.State{audit.Outside}, false},
		"2 of 2 listed mesh pods are not redirected as wanted":          {[]audit.State{audit.Drifted, audit.Drifted}, true},
	} {
		var all []audit.Status
		for _, s := range test.states {
			all = append(all, audit.Status{Pod: "a", State: s})
		}
		var b strings.Builder
		if err := output.Pods(&b, all, test.selected); err != nil || !strings.HasSuffix(b.String(), "\n"+want+"\n") {
			t.Errorf("want %q: %v\n%s", want, err, b.String())
		}
	}
}
