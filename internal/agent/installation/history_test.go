package installation_test

import (
	"fmt"
	"strings"
	"testing"
)

// TestHistory has each change of a file with its time, the latest first, and no comparison without a change.
func TestHistory(t *testing.T) {
	n := newFixture(t, "10-net.conflist", conflist)
	i := n.agent()
	must(t, i.Reconcile())
	first := i.History()
	must(t, i.Reconcile())
	if again := i.History(); len(again) != len(first) || len(first) < 3 || !strings.Contains(first[0].What, `changed CNI configuration: write "10-net.conflist"`) ||
		!strings.Contains(fmt.Sprint(first), "installed program: ") || !strings.Contains(fmt.Sprint(first), "wrote kubeconfig: ") || !first[0].Time.Equal(n.clock) {
		t.Fatalf("%+v, then %+v", first, again)
	}
	for range 300 { // the file is missing each time, so that no conflict delays it
		n.removeAll("run")
		must(t, i.Reconcile())
	}
	if all := i.History(); len(all) != 256 || !strings.Contains(all[0].What, "wrote kubeconfig: ") {
		t.Errorf("%d changes, the latest is %+v", len(all), all[0])
	}
	must(t, i.Uninstall(t.Context()))
	if all := i.History(); !strings.Contains(fmt.Sprint(all), "removed: ") {
		t.Errorf("%+v", all[:5])
	}
}
