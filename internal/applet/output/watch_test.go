package output_test

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestWatch_Changes: after a table only pods are printed that are new, different or gone. A failed request is reported once, and pods
// that can be there still are not gone, also if others are.
func TestWatch_Changes(t *testing.T) {
	t.Parallel()
	status := func(pod string, state audit.State) audit.Status {
		return audit.Status{Namespace: "shop", Pod: pod, State: state, Sentence: "is so"}
	}
	down := errors.New("the agent is down")
	steps := []struct {
		all  []audit.Status
		hide bool
		err  error
	}{
		{all: nil},
		{all: []audit.Status{status("a", audit.Captured), status("b", audit.Captured)}},
		{all: []audit.Status{status("a", audit.Captured), status("b", audit.Captured)}},
		{err: down},
		{err: down},
		{all: []audit.Status{status("b", audit.Drifted)}, hide: true},
		{all: []audit.Status{status("c\n", audit.Captured)}, hide: true},
		{all: []audit.Status{status("b", audit.Drifted), status("c\n", audit.Captured)}},
	}
	ctx, end := context.WithCancel(t.Context())
	var out, errs bytes.Buffer
	w := output.WatchPods(applet.Call{Stdout: &out, Stderr: &errs}, time.Millisecond, false)
	w.Request = func(context.Context) ([]audit.Status, func(audit.Status) bool, error) {
		if len(steps) == 0 {
			end()
			return nil, nil, context.Canceled
		}
		s := steps[0]
		steps = steps[1:]
		return s.all, func(row audit.Status) bool { return s.hide && row.Pod == "a" }, s.err
	}
	check.OK(t, w.Run(ctx))
	check.Equal(t, out.String(), `POD     STATE     SINCE  CHECKED  BACKEND  WHY
shop/a  captured  -      -        -        is so
shop/b  captured  -      -        -        is so
0 of 2 mesh pods are not redirected as wanted
shop/b  drifted  -      -        -        is so
shop/c\n  captured  -      -        -        is so
shop/b    gone      -      -        -        has ended
shop/b  drifted  -      -        -        is so
shop/a  gone     -      -        -        has ended
`)
	check.Equal(t, errs.String(), "error: the agent is down; trying again\n")
	w.Request = func(context.Context) ([]audit.Status, func(audit.Status) bool, error) { return nil, nil, down }
	check.Equal(t, w.Run(t.Context()), down, "a watch that cannot begin")
}

// TestWatch_OnlyGone: there can be no new row when rows have gone.
func TestWatch_OnlyGone(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	check.OK(t, output.WatchDecisions(applet.Call{Stdout: &out}, time.Millisecond).Print(nil, []document.Decision{{Pod: "a"}}))
	check.Equal(t, out.String(), "")
}

// TestWatch_ByState: a pod that has recovered is not said to have ended.
func TestWatch_ByState(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	w := output.WatchPods(applet.Call{Stdout: &out}, time.Millisecond, true)
	check.OK(t, w.Print([]audit.Status{{Namespace: "shop", Pod: "a", State: audit.Drifted}}, nil))
	out.Reset()
	check.OK(t, w.Print(nil, []audit.Status{{Namespace: "shop", Pod: "a", State: audit.Drifted}}))
	check.Equal(t, out.String(), "shop/a  gone   -      -        -        has ended, or is in another state\n")
}
