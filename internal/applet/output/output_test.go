package output_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func TestList_Forms(t *testing.T) {
	t.Parallel()
	type row struct {
		A string `json:"a"`
		B []int  `json:"b"`
	}
	rows := []row{{"x\x1b", []int{1}}, {A: "y"}}
	head := map[string][]string{"nodes": {"n1"}}
	for _, form := range []output.Form{output.JSON, output.YAML} {
		for _, rows := range [][]row{rows, rows[:1], {}} {
			var list, object, want bytes.Buffer
			for _, err := range []error{
				output.List(&list, form, nil, "", rows), output.List(&object, form, head, "pods", rows), output.Print(&want, rows, form, nil),
			} {
				check.OK(t, err)
			}
			check.Equal(t, strings.TrimSpace(list.String()), strings.TrimSpace(want.String()), "a list in", form, "want", &want)
			want.Reset()
			// Both have the fields in alphabetical order.
			check.OK(t, output.Print(&want, map[string]any{"nodes": head["nodes"], "pods": rows}, form, nil))
			check.Equal(t, strings.TrimSpace(object.String()), strings.TrimSpace(want.String()), "an object in", form, "want", &want)
		}
	}
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
		check.OK(t, output.List(&out, form, nil, "", []probe{{&out, &seen}, {&out, &seen}, {&out, &seen}}))
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
	if err := output.Pods(call, all, false); err != nil || !strings.HasPrefix(b.String(), "NODE  POD ") || !strings.Contains(b.String(), "\n-     shop/a ") {
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
		if err := output.Pods(applet.Call{Stdout: &b}, all, test.selected); err != nil || !strings.HasSuffix(b.String(), "\n"+want+"\n") {
			t.Errorf("want %q: %v\n%s", want, err, b.String())
		}
	}
}
