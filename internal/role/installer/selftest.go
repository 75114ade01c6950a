package installer

import (
	"context"
	"log/slog"
	"os"
	"path"
	"time"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/selfcheck"
)

// partSelftest is what the self-test is called in the agent's state.
const partSelftest = "selftest"

// retest is how long a node on which nothing works is left alone: somebody may load a module.
const retest = 30 * time.Second

// test finds out by real packets whether pods can be redirected on this node, and tells the plugin how. A node on which
// that was tried and does not work is not ready; one on which it cannot be tried, for want of privilege, may be.
func (n *node) test(ctx context.Context) {
	path, _ := n.in.getenv("PATH")
	for ctx.Err() == nil {
		verdict, err := selfcheck.Run(ctx, selfcheck.Options{Path: path, Log: n.log, Now: clock})
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			n.log.WarnContext(ctx, "it could not be tried whether pods can be redirected on this node", slog.String("error", err.Error()))
			n.ready(nil)
			return
		}
		n.verdict.Store(&verdict)
		n.record(ctx)
		err = n.judge()
		if err == nil {
			n.log.InfoContext(ctx, "self-test passed: pods can be redirected on this node", slog.String("auto", string(verdict.Choice)),
				slog.String("problems", verdict.Summary()))
			return
		}
		n.log.ErrorContext(ctx, "self-test failed: pods of the mesh will not start on this node", slog.String("error", err.Error()))
		n.warn("CNISelfTestFailed", err.Error())
		timer := time.NewTimer(retest)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
	}
}

// verdictFile is where the plugin finds the verdict.
func (c Config) verdictFile() string { return path.Join(c.RunDir, selfcheck.FileName) }

// record writes the verdict down, if there is one and it is not there.
func (n *node) record(ctx context.Context) {
	verdict := n.verdict.Load()
	if verdict == nil || n.left.Load() {
		return
	}
	if _, err := os.Stat(n.cfg.verdictFile()); err == nil && selfcheck.Recorded(n.cfg.RunDir) == verdict.Advice() {
		return
	}
	if err := verdict.Record(hostfs.Disk{}, n.cfg.RunDir); err != nil {
		n.log.WarnContext(ctx, "the plugin is not told what the self-test found", slog.String("error", err.Error()))
	}
}

// judge holds what the plugin is told to what the self-test found.
func (n *node) judge() error {
	verdict := n.verdict.Load()
	if verdict == nil {
		return nil
	}
	conf, err := n.stanza.Load().NetConf()
	if err == nil {
		err = verdict.Served(conf.Backend)
	}
	n.ready(err)
	return err
}

// ready reports the self-test, where readiness counts.
func (n *node) ready(failed error) {
	switch {
	case !n.cfg.Install:
	case failed == nil:
		n.health.Ready(partSelftest)
	default:
		n.health.NotReady(partSelftest, failed.Error())
	}
}
