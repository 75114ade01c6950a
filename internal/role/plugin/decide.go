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
	// agentShare divides api_timeout into the agent's part, if above agentTimeout: a longer timeout is set for a busy node.
	agentShare = 40
	// reportTimeout bounds the write of a report to a socket, which the kernel accepts at once, whether the agent reads it or
	// not. It is long because a busy machine may not schedule this process for a while.
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
	pod    podArgs
	report agentapi.Report
	// mark is the end of the last phase.
	mark time.Time
	// agent is a working connection to the node agent, nil for none.
	agent *agentapi.Agent
}

func (p *plugin) begin(command, container string) *call {
	now := clock.RealClock{}.Now()
	return &call{plugin: p, mark: now, report: agentapi.Report{
		// Local time would need the file of the node's time zone to be printed.
		Time: p.began.UTC(), Command: command, Container: container, Source: agentapi.SourceNone,
		Seconds: map[agentapi.Phase]float64{agentapi.PhaseRead: now.Sub(p.began).Seconds()},
	}}
}

// about sets the pod of the call.
func (c *call) about(pod podArgs) {
	c.pod = pod
	c.report.Namespace, c.report.Pod, c.report.UID = string(pod.K8S_POD_NAMESPACE), string(pod.K8S_POD_NAME), string(pod.K8S_POD_UID)
}

// phase records the time since the last phase.
func (c *call) phase(p agentapi.Phase) {
	now := clock.RealClock{}.Now()
	c.report.Seconds[p] = now.Sub(c.mark).Seconds()
	c.mark = now
}

// decide stops at the first sufficient source: the pod's name, the annotations of the runtime, the node agent, the API server.
// For a pod that one of the first two excludes it reads no credential and sends nothing.
func (c *call) decide(ctx context.Context, conf cniconf.NetConf) (d sidecar.Decision, err error) {
	defer func() {
		c.phase(agentapi.PhaseDecide)
		c.report.Reason, c.report.Detail, c.report.Captured = string(d.Reason), d.Detail, d.Outcome == sidecar.Capture
	}()
	policy := conf.Policy()
	if d, done := sidecar.Early(c.report.Namespace, c.report.Pod, policy); done {
		c.report.Source = agentapi.SourceName
		return d, nil
	}
	if conf.AnnotationsDelivered {
		if d, done := sidecar.ByAnnotations(c.report.Namespace, c.report.Pod, conf.Annotations, policy); done {
			c.report.Source = agentapi.SourceAnnotations
			return d, nil
		}
	}
	facts, fromAgent := c.askAgent(ctx, conf)
	if fromAgent == nil {
		c.report.Source = agentapi.SourceAgent
		return sidecar.Decide(facts, policy), nil
	}
	facts, err = c.askServer(ctx, conf)
	if err != nil {
		if !errors.Is(fromAgent, fs.ErrNotExist) {
			err = fmt.Errorf("%w; before that: %w", err, fromAgent) // the API server, which is authoritative, comes first
		}
		return sidecar.Decision{}, err
	}
	c.report.Source = agentapi.SourceAPI
	return sidecar.Decide(facts, policy), nil
}

// askAgent requests the pod from the node agent. After any error of it, decide requests the pod from the API server.
func (c *call) askAgent(ctx context.Context, conf cniconf.NetConf) (sidecar.Facts, error) {
	if conf.RunDir == "" || c.report.UID == "" {
		return sidecar.Facts{}, fs.ErrNotExist
	}
	ctx, cancel := context.WithTimeout(ctx, min(max(agentTimeout, conf.APITimeout/agentShare), conf.APITimeout/2))
	defer cancel()
	log := c.plugin.log.Logger()
	agent, err := agentapi.Dial(ctx, filepath.Join(conf.RunDir, agentapi.SocketName))
	if err != nil {
		log.DebugContext(ctx, "not asking the node agent", "cause", err.Error())
		return sidecar.Facts{}, err
	}
	facts, err := agent.Pod(ctx, agentapi.Key{Namespace: c.report.Namespace, Name: c.report.Pod, UID: c.report.UID})
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
func (c *call) askServer(ctx context.Context, conf cniconf.NetConf) (sidecar.Facts, error) {
	lookup := c.plugin.server()
	left := conf.APITimeout - clock.RealClock{}.Now().Sub(c.mark)
	facts, requests, err := lookup(ctx, conf.Kubeconfig, agentapi.Key{Namespace: c.report.Namespace, Name: c.report.Pod, UID: c.report.UID}, left)
	c.report.Requests = requests
	return facts, err
}

// log logs each decision, at level debug for a decision by the annotations of the runtime, since the log writes to files and
// sockets.
func (c *call) log(ctx context.Context, log *slog.Logger, d sidecar.Decision) {
	for _, w := range d.Warnings {
		log.WarnContext(ctx, "a setting of the pod is ignored", "cause", oneLine(w))
	}
	level := slog.LevelInfo
	if c.report.Source == agentapi.SourceAnnotations {
		level = slog.LevelDebug
	}
	log.Log(ctx, level, "decided about the pod", "capture", d.Outcome == sidecar.Capture, "reason", string(d.Reason),
		"because", d.Reason.Sentence(), "detail", oneLine(d.Detail), "source", string(c.report.Source))
}

// programmed records the changes in the pod's namespace.
func (c *call) programmed(r redirection.Report) {
	c.phase(agentapi.PhaseProgram)
	c.report.Backend, c.report.Changed, c.report.Processes = strings.Join(r.Tools, ","), len(r.Programs) > 0, r.Processes
}

// send sends the report of the call to the node agent, also if the agent did not answer before: those calls matter most. A pod
// that passed by the annotations of the runtime is not reported: the report would double the cost of the call.
func (c *call) send(ctx context.Context, conf cniconf.NetConf, failed error) {
	defer c.end()
	if failed == nil && c.report.Source == agentapi.SourceAnnotations || conf.RunDir == "" {
		return
	}
	if failed != nil {
		c.report.Error = oneLine(failed.Error())
	}
	c.report.Seconds[agentapi.PhaseTotal] = clock.RealClock{}.Now().Sub(c.plugin.began).Seconds()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), reportTimeout)
	defer cancel()
	if err := c.deliver(ctx, conf); err != nil && !errors.Is(err, fs.ErrNotExist) {
		c.plugin.log.Logger().DebugContext(ctx, "the report did not reach the node agent", "cause", err.Error())
	}
}

// deliver writes the report to the agent's socket, on a new connection if none is open or the agent has closed it meanwhile.
func (c *call) deliver(ctx context.Context, conf cniconf.NetConf) (err error) {
	if c.agent != nil && c.agent.Report(ctx, c.report) == nil {
		return nil
	}
	c.end()
	if c.agent, err = agentapi.Dial(ctx, filepath.Join(conf.RunDir, agentapi.SocketName)); err != nil {
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
