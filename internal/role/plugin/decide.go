package plugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path/filepath"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"k8s.io/utils/clock"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

// The time bounds of the agent, which is on the same node and has the pod in its cache, or fetches it on an open connection.
const (
	agentTimeout = 250 * time.Millisecond
	// agentShare is the agent's share of api_timeout (its divisor), if longer than agentTimeout: a longer api_timeout suits a busy node.
	agentShare = 40
	// reportTimeout bounds the write of a report to a socket, which the kernel accepts at once, whether or not the agent reads
	// it. It is long because a busy machine may not schedule this process for a while.
	reportTimeout = time.Second
)

// maxDetails bounds the cause in an answer to the runtime, in bytes: an annotation can have 256 KiB, and the text must fit into
// an event. maxNamed bounds a name from the runtime.
const (
	maxDetails = 4 << 10
	maxNamed   = 253
)

// call is one call of the runtime about one pod, and its report.
type call struct {
	plugin *plugin
	conf   cniconf.NetConf
	args   *skel.CmdArgs
	// pod and log are set once the pod is identified.
	pod    podArgs
	log    *slog.Logger
	report agentapi.Report
	// uid is the UID that the API server has for the pod, once it is looked up. A static pod's differs from the runtime's.
	uid string
	// mark is the end of the last phase.
	mark time.Time
	// agent is a working connection to the node agent, or nil.
	agent *agentapi.Agent
}

// begin reads the configuration of a call.
func (p *plugin) begin(command string, args *skel.CmdArgs) (*call, error) {
	conf, err := p.configure(args.StdinData)
	now := clock.RealClock{}.Now()
	return &call{plugin: p, conf: conf, args: args, mark: now, report: agentapi.Report{
		// Printing local time would read the node's time zone file.
		Time: p.began.UTC(), Command: command, Container: args.ContainerID, Source: agentapi.SourceNone,
		Seconds: map[agentapi.Phase]float64{agentapi.PhaseRead: now.Sub(p.began).Seconds()},
	}}, err
}

// identify determines the pod of the call.
func (c *call) identify() (err error) {
	if c.pod, err = parseArgs(c.args.Args); err != nil {
		return err
	}
	key := c.key()
	c.report.Namespace, c.report.Pod, c.report.UID = key.Namespace, key.Name, key.UID
	c.log = c.plugin.log.Logger().With("pod", c.pod.String(), "container", printable.Text(c.args.ContainerID, maxNamed), "if", c.args.IfName)
	return nil
}

func (c *call) key() agentapi.Key {
	return agentapi.Key{Namespace: string(c.pod.K8S_POD_NAMESPACE), Name: string(c.pod.K8S_POD_NAME), UID: string(c.pod.K8S_POD_UID)}
}

// phase records the time since the last phase.
func (c *call) phase(p agentapi.Phase) {
	now := clock.RealClock{}.Now()
	c.report.Seconds[p] = now.Sub(c.mark).Seconds()
	c.mark = now
}

// decide stops at the first sufficient source: the pod's name, the runtime's annotations, the node agent, the API server.
// For a pod that one of the first two sources excludes it reads no credential and sends nothing.
func (c *call) decide(ctx context.Context) (d sidecar.Decision, err error) {
	defer func() {
		c.phase(agentapi.PhaseDecide)
		c.report.Reason, c.report.Detail, c.report.Captured = string(d.Reason), d.Detail, d.Outcome == sidecar.Capture
	}()
	policy := c.conf.Policy()
	if d, done := sidecar.Early(c.report.Namespace, c.report.Pod, policy); done {
		c.report.Source = agentapi.SourceName
		return d, nil
	}
	if c.conf.AnnotationsDelivered {
		if d, done := sidecar.ByAnnotations(c.report.Namespace, c.report.Pod, c.conf.Annotations, policy); done {
			c.report.Source = agentapi.SourceAnnotations
			return d, nil
		}
	}
	facts, fromAgent := c.askAgent(ctx)
	if fromAgent == nil {
		c.report.Source, c.uid = agentapi.SourceAgent, facts.UID
		return sidecar.Decide(facts, policy), nil
	}
	facts, err = c.askServer(ctx)
	if err != nil {
		if !errors.Is(fromAgent, fs.ErrNotExist) {
			err = fmt.Errorf("%w; before that: %w", err, fromAgent) // the API server, which is authoritative, comes first
		}
		return sidecar.Decision{}, err
	}
	c.report.Source, c.uid = agentapi.SourceAPI, facts.UID
	return sidecar.Decide(facts, policy), nil
}

// askAgent requests the pod from the node agent. After an error of askAgent, decide requests the pod from the API server.
func (c *call) askAgent(ctx context.Context) (sidecar.Facts, error) {
	if c.conf.RunDir == "" || c.report.UID == "" {
		return sidecar.Facts{}, fs.ErrNotExist
	}
	ctx, cancel := context.WithTimeout(ctx, min(max(agentTimeout, c.conf.APITimeout/agentShare), c.conf.APITimeout/2))
	defer cancel()
	log := c.plugin.log.Logger()
	agent, err := agentapi.Dial(ctx, filepath.Join(c.conf.RunDir, agentapi.SocketName))
	if err != nil {
		log.DebugContext(ctx, "not asking the node agent", "cause", err.Error())
		return sidecar.Facts{}, err
	}
	facts, err := agent.Pod(ctx, c.key(), c.conf.AmbientEnabled)
	if _, answered := errors.AsType[*agentapi.Refusal](err); err == nil || answered {
		c.agent = agent // the connection works, and gets the report
	} else {
		_ = agent.Close() // nothing was written
	}
	if err != nil {
		log.WarnContext(ctx, "the node agent gave no usable answer about the pod; asking the API server", "pod", c.pod.String(), "cause", err.Error())
	}
	return facts, err
}

// askServer requests the pod from the API server within the rest of api_timeout.
func (c *call) askServer(ctx context.Context) (sidecar.Facts, error) {
	lookup := c.plugin.server()
	left := c.conf.APITimeout - clock.RealClock{}.Now().Sub(c.mark)
	facts, requests, err := lookup(ctx, &c.conf, c.key(), left)
	c.report.Requests = requests
	return facts, err
}

// logDecision logs each decision, at level debug if the runtime's annotations decide, because the log writes to files and
// sockets.
func (c *call) logDecision(ctx context.Context, d sidecar.Decision) {
	for _, w := range d.Warnings {
		c.log.WarnContext(ctx, "a setting of the pod is ignored", "cause", oneLine(w))
	}
	level := slog.LevelInfo
	if c.report.Source == agentapi.SourceAnnotations {
		level = slog.LevelDebug
	}
	c.log.Log(ctx, level, "decided about the pod", "capture", d.Outcome == sidecar.Capture, "reason", string(d.Reason),
		"because", d.Reason.Sentence(), "detail", oneLine(d.Detail), "source", string(c.report.Source))
}

// programmed records the changes in the pod's namespace.
func (c *call) programmed(r redirection.Report) {
	c.phase(agentapi.PhaseProgram)
	c.report.Backend, c.report.Changed, c.report.Processes = strings.Join(r.Tools, ","), len(r.Programs) > 0, r.Processes
}

// send sends the report of the call to the node agent, even if the agent did not answer before: such calls matter most. It does not
// report a pod that passed by the runtime's annotations: the report would double the cost of the call.
func (c *call) send(ctx context.Context, failed error) {
	defer c.end()
	if failed == nil && c.report.Source == agentapi.SourceAnnotations || c.conf.RunDir == "" {
		return
	}
	if failed != nil {
		c.report.Error = oneLine(failed.Error())
	}
	c.report.Seconds[agentapi.PhaseTotal] = clock.RealClock{}.Now().Sub(c.plugin.began).Seconds()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), reportTimeout)
	defer cancel()
	if err := c.deliver(ctx); err != nil && !errors.Is(err, fs.ErrNotExist) {
		c.plugin.log.Logger().DebugContext(ctx, "the report did not reach the node agent", "cause", err.Error())
	}
}

// deliver writes the report to the agent's socket, on a new connection if none is open or the agent has closed it meanwhile.
func (c *call) deliver(ctx context.Context) (err error) {
	if c.agent != nil && c.agent.Report(ctx, c.report) == nil {
		return nil
	}
	c.end()
	if c.agent, err = agentapi.Dial(ctx, filepath.Join(c.conf.RunDir, agentapi.SocketName)); err != nil {
		return err
	}
	return c.agent.Report(ctx, c.report)
}

// errUnfinished is the reported error of a call that panics.
var errUnfinished = errors.New("the plugin panicked")

// oneLine bounds a text that may quote untrusted input, and makes it printable, for an answer, a report or a log.
func oneLine(text string) string {
	return printable.Text(strings.ReplaceAll(text, "\n", "; "), maxDetails)
}

// end closes the connection to the agent.
func (c *call) end() {
	if c.agent != nil {
		_ = c.agent.Close() // the report is written
		c.agent = nil
	}
}
