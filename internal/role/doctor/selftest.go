package doctor

import (
	"context"
	"log/slog"

	"github.com/meshcni/istio-cni/internal/node/selfcheck"
)

// selfTest shows the verdict that the agent has recorded. Without one it makes the test, in namespaces of its own.
func selfTest(ctx context.Context, v *view) check {
	if v.features.observe { // the test would load kernel modules, and is about another plugin than the node's
		return ok("an observer makes none: the Job of manifests/examples/doctor.yaml shows whether this program would serve the node")
	}
	verdict, source := selfcheck.Recorded(v.runDir), "recorded by the agent"
	if len(verdict.Results) == 0 {
		var err error
		if verdict, err = selfcheck.Run(ctx, v.searchPath, slog.New(slog.DiscardHandler)); err != nil {
			return warn("run it as root with CAP_SYS_ADMIN and CAP_NET_ADMIN, or see the log of the agent, which makes the test at its start",
				"no self-test was made: %v", err)
		}
		source = "made now, with the programs of this file system"
	}
	if err := verdict.Err(); err != nil {
		return fail("load the modules that the text names, or install iptables on the node: see docs/errors.md", "%v (%s)", err, source)
	}
	if text := verdict.Summary(); text != "" {
		return warn("none if pods do not need it; else load the modules that the text names",
			"packets are redirected by %s; not everything works: %s (%s)", verdict.Choice, text, source)
	}
	return ok("packets are redirected by %s (%s)", verdict.Choice, source)
}
