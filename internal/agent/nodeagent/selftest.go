package nodeagent

import (
	"context"
	"log/slog"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/selfcheck"
)

// retest is the time between two self-tests: after a failed one a kernel module can appear.
const retest = 30 * time.Second

// test tests until the node passes, the test cannot run, or ctx ends.
func (n *node) test(ctx context.Context) {
	_ = wait.PollUntilContextCancel(ctx, retest, true, func(ctx context.Context) (bool, error) { return n.testOnce(ctx), nil })
}

// testOnce sends real packets to determine whether and how pods can be redirected on this node, and records the result for the
// plugin. A node that fails the test is not ready; a node where the test cannot run for lack of privilege can be ready.
func (n *node) testOnce(ctx context.Context) (done bool) {
	verdict, err := selfcheck.Run(ctx, n.ToolPath, n.writesByPrograms(), n.Log)
	if ctx.Err() != nil {
		return true
	}
	if err != nil {
		n.Log.WarnContext(ctx, "self-test failed to run", slog.String("error", err.Error()))
		n.ready(nil)
		return true
	}
	n.verdict.Store(&verdict)
	n.record(ctx)
	err = n.checkVerdict()
	if err == nil {
		n.Log.InfoContext(ctx, "self-test passed: pods can be redirected on this node", slog.String("auto", string(verdict.Choice)),
			slog.String("problems", verdict.Summary()))
		return true
	}
	n.Log.ErrorContext(ctx, "self-test failed: pods of the mesh will not start on this node", slog.String("error", err.Error()))
	n.warn(eventSelfTest, err.Error())
	return false
}

// writesByPrograms reports whether the configured backend is that of the iptables programs.
func (n *node) writesByPrograms() bool {
	conf, err := n.plugin()
	return err == nil && conf.Backend == redirect.Tools
}

// record writes the verdict to its file unless the file has the verdict already.
func (n *node) record(ctx context.Context) {
	verdict := n.verdict.Load()
	if verdict == nil || n.left.Load() {
		return
	}
	if selfcheck.Recorded(n.Config.RunDir).Text() == verdict.Text() {
		return
	}
	if err := verdict.Record(hostfs.Disk{}, n.Config.RunDir); err != nil {
		n.Log.WarnContext(ctx, "the self-test's verdict cannot be written for the plugin", slog.String("error", err.Error()))
	}
}

// checkVerdict compares the plugin's configuration with the self-test's verdict.
func (n *node) checkVerdict() error {
	verdict := n.verdict.Load()
	if verdict == nil {
		return nil
	}
	conf, err := n.plugin()
	if err == nil {
		err = verdict.Served(conf.Backend)
	}
	n.ready(err)
	return err
}

// ready reports the result of the self-test to the health state if the agent installs.
func (n *node) ready(failed error) {
	switch {
	case !n.Config.Install:
	case failed == nil:
		n.health.Ready(selfTest)
	default:
		n.health.NotReady(selfTest, failed.Error())
	}
}
