package taint

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// TestASecondWriter inserts taints at the head of a node's list in a loop, while the controller removes and adds its
// own. No taint is lost, and patches conflict; appended taints would cause no conflict.
func TestASecondWriter(t *testing.T) {
	l := newFixture(t)
	kubeconfig := l.grant(permissions{})
	l.node("a", nodeState{ready: "True", taints: []string{untaint}})
	l.pod("a", podState{ready: true})
	c := l.begin(kubeconfig, "--namespace="+l.mesh, "--leader-elect=false", "--add", "--hysteresis=0")
	l.Until("the first removal", func() bool { return len(l.taints("a")) == 0 })

	const most = 400
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var written int
	var work sync.WaitGroup
	work.Go(func() {
		for ; written < most && ctx.Err() == nil; written++ {
			text, err := json.Marshal([]map[string]any{{
				"op": "add", "path": "/spec/taints/0", "value": map[string]string{"key": fmt.Sprintf("k%03d", written), "effect": "PreferNoSchedule"},
			}})
			if err == nil {
				_, err = l.client.CoreV1().Nodes().Patch(context.WithoutCancel(ctx), "a", types.JSONPatchType, text, meta.PatchOptions{})
			}
			if err != nil {
				t.Error(err)
				return
			}
		}
	})
	conflicts := func() (count int) {
		for _, r := range c.requests() {
			if r.Resource == "nodes" && r.Verb == "patch" && r.Status == 422 {
				count++
			}
		}
		return count
	}
	has := func(taints []string) bool { return slices.Contains(taints, untaint) }
	turn := 0
	for ; turn < 40 && (conflicts() < 3 || turn < 6); turn++ {
		ready := turn%2 == 1
		l.reportPod("a", podState{ready: ready})
		l.Until("the taint beside a busy writer", func() bool { return has(l.taints("a")) == !ready })
	}
	stop()
	work.Wait()
	if turn%2 == 1 { // left tainted
		l.reportPod("a", podState{ready: true})
	}
	l.Until("the end", func() bool { return !has(l.taints("a")) })
	got := l.taints("a")
	if len(got) != written {
		t.Errorf("%d taints of the other writer, of which %d remain", written, len(got))
	}
	slices.Reverse(got)
	for i, text := range got {
		if !strings.HasPrefix(text, fmt.Sprintf("k%03d:", i)) {
			t.Errorf("taint %d is %q", i, text)
		}
	}
	if conflicts() == 0 {
		t.Errorf("no conflict in %d turns and %d taints, so this test shows nothing", turn, written)
	}
	t.Logf("%d taints of the other writer, %d turns, %d conflicts", written, turn, conflicts())
	c.checkRequests()
	c.stop()
}
