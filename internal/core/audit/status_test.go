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
	if err := audit.Table(&b, all, 80, now); err != nil {
		t.Fatal(err)
	}
	got := strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
	want := []string{
		`POD                   STATE     SINCE  CHECKED  BACKEND  WHY`,
		`evil/x\x20captured\n  bypassed  -      -        -        no rule`,
		`shop/c                drifted   90s    -        -        nat/OUTPUT: missing \u…`,
		`shop/a                captured  2d     0s       netlink  is redirected as wanted`,
		`shop/b                captured  60m    -        -        2 exceptions by its ow…`,
		`shop/plain            outside   -      -        -        is not injected`,
	}
	if fmt.Sprintf("%q", got) != fmt.Sprintf("%q", want) {
		t.Errorf("got\n%s\nwant\n%s", b.String(), strings.Join(want, "\n"))
	}
	all[0].Node, all[1].Node = "n1", "n2"
	b.Reset()
	if err := audit.Table(&b, all, 0, now); err != nil || !strings.HasPrefix(b.String(), "NODE  POD ") || !strings.Contains(b.String(), "(and 1 more)") {
		t.Errorf("got\n%s%v", b.String(), err)
	}
}
