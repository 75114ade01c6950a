package audit_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/core/audit"
)

func TestTable(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	all := []audit.Status{
		{Namespace: "shop", Pod: "a", State: audit.Captured, Sentence: "is redirected as wanted", Since: now.Add(-50 * time.Hour), Checked: now, Backend: "netlink"},
		{Namespace: "shop", Pod: "plain", State: audit.Outside, Sentence: "is not injected"},
		{Namespace: "shop", Pod: "b", State: audit.Captured, Exceptions: make([]audit.Exception, 2), Since: now.Add(-time.Hour)},
		{
			Namespace: "shop", Pod: "c", State: audit.Drifted, Since: now.Add(-90 * time.Second),
			Problems: []audit.Problem{{audit.Drifted, "nat/OUTPUT: missing \x1b[2J " + strings.Repeat("x", 200)}, {audit.NoListener, ""}},
		},
		{Namespace: "evil", Pod: "x captured\n", State: audit.Bypassed, Problems: []audit.Problem{{audit.Bypassed, "no rule"}}},
	}
	audit.Sort(all)
	var b strings.Builder
	if err := audit.Table(&b, all, audit.Style{Width: 80}, now); err != nil {
		t.Fatal(err)
	}
	got := strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
	want := []string{
		`POD                   STATE     SINCE  CHECKED  BACKEND  WHY`,
		`evil/x\x20captured\n  bypassed  -      -        -        no rule`,
		`shop/c                drifted   90s    -        -        nat/OUTPUT: missing \u…`,
		`shop/a                captured  2d     0s       netlink  is redirected as wanted`,
		`shop/b                captured  60m    -        -        exceptions by its own …`,
		`shop/plain            outside   -      -        -        is not injected`,
		`2 of 4 mesh pods are not redirected as wanted`,
	}
	if fmt.Sprintf("%q", got) != fmt.Sprintf("%q", want) {
		t.Errorf("got\n%s\nwant\n%s", b.String(), strings.Join(want, "\n"))
	}
	all[0].Node, all[1].Node = "n1", "n2"
	b.Reset()
	if err := audit.Table(&b, all, audit.Style{}, now); err != nil || !strings.HasPrefix(b.String(), "NODE  POD ") || !strings.Contains(b.String(), "(and 1 more)") {
		t.Errorf("got\n%s%v", b.String(), err)
	}
}

// TestNarrowTables: the state is readable on any terminal, and lines are not wider than it.
func TestNarrowTables(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	all := []audit.Status{
		{
			Node: "ip-10-0-12-34.eu-central-1.compute.internal", Namespace: "payments", Pod: "checkout-api-7d9f6b5c4d-x2x9z", State: audit.UIDCollision,
			Since: now.Add(-5 * time.Minute), Checked: now, Backend: "netlink", Problems: []audit.Problem{{audit.UIDCollision, "process 4711 of container \"app\" runs with uid 1337"}},
		},
		{Node: "n2", Namespace: "shop", Pod: "web", State: audit.Captured, Sentence: "is redirected as wanted", Since: now, Checked: now, Backend: "netlink"},
	}
	for width, want := range map[int]string{
		120: `NODE                        POD                                     STATE          SINCE  WHY
ip-10-0-12-34…ute.internal  payments/checkout-api-7d9f6b5c4d-x2x9z  uid-collision  5m     process 4711 of container "ap…
`,
		80: `NODE         POD                      STATE          SINCE  WHY
ip-10…ernal  payments/ch…b5c4d-x2x9z  uid-collision  5m     process 4711 of con…
n2           shop/web                 captured       0s     is redirected as wa…
`,
		50: "NODE      POD       STATE          SINCE  WHY\n",
	} {
		var b strings.Builder
		if err := audit.Table(&b, all, audit.Style{Width: width}, now); err != nil {
			t.Fatal(err)
		}
		if !strings.HasPrefix(b.String(), want) {
			t.Errorf("%d columns:\n%s", width, b.String())
		}
	}
	var b strings.Builder
	paint := func(s audit.State, cell string) string { return "<" + string(s) + ">" + cell + "</>" }
	if err := audit.Table(&b, all[1:], audit.Style{Width: 80, Paint: paint}, now); err != nil {
		t.Fatal(err)
	}
	if want := "NODE  POD       STATE     SINCE  CHECKED  BACKEND  WHY\nn2    shop/web  <captured>captured</>  0s     0s       netlink  is redirected as wanted\n" +
		"0 of 1 mesh pods are not redirected as wanted\n"; b.String() != want {
		t.Errorf("got\n%swant\n%s", b.String(), want)
	}
}

func TestTable_LastLineCounts(t *testing.T) {
	t.Parallel()
	pod := func(s audit.State) audit.Status { return audit.Status{Pod: "a", State: s} }
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
			all = append(all, pod(s))
		}
		var b strings.Builder
		if err := audit.Table(&b, all, audit.Style{Selected: test.selected}, time.Now()); err != nil || !strings.HasSuffix(b.String(), "\n"+want+"\n") {
			t.Errorf("want %q: %v\n%s", want, err, b.String())
		}
	}
}
