package plugin

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"path/filepath"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/agentcall"
	"github.com/meshcni/istio-cni/internal/node/podnet"
)

// What the agent may cost. It is on the same node and knows the pod, or asks for it on a connection that it has open.
const (
	agentPatience = 250 * time.Millisecond
	// agentShare is the agent's part of api_timeout, where that is more: who lets a look-up take longer has a busy node.
	agentShare = 40
	// reportPatience is for handing a report to the kernel, which takes it at once: nobody waits until the agent has read it.
	// It is long because on a busy machine this process may get no processor for a while just then.
	reportPatience = time.Second
)

// maxDetails bounds what an answer to the runtime says about the cause, in bytes: an annotation can have 256 KiB, and what
// becomes an event must fit into one. maxNamed bounds a name, whatever the runtime hands over.
const (
	maxDetails = 4 << 10
	maxNamed   = 253
)

// clock is the time of day, for durations and reports.
func clock() time.Time { return time.Now() } //nolint:forbidigo // the plugin's only clock besides the log's

// call is one call of the runtime about one pod, and what is to be told of it.
type call struct {
	plugin *plugin
	pod    podArgs
	told   agentcall.Report
	began  time.Time
	// mark is when the last phase ended.
	mark time.Time
	// finished says that the call came to its end, whatever that was.
	finished bool
	// agent is a connection to the node agent that works, nil if there is none.
	agent *agentcall.Agent
}

func (p *plugin) begin(command, container string) *call {
	now := clock()
	return &call{plugin: p, began: p.began, mark: now, told: agentcall.Report{
		// In the node's zone it could only be printed after reading the file that describes that.
		Time: p.began.UTC(), Command: command, Container: container, Source: agentcall.SourceNone,
		Seconds: map[agentcall.Phase]float64{agentcall.PhaseRead: now.Sub(p.began).Seconds()},
	}}
}

// about notes which pod the call is about.
func (c *call) about(pod podArgs) {
	c.pod = pod
	c.told.Namespace, c.told.Pod, c.told.UID = string(pod.K8S_POD_NAMESPACE), string(pod.K8S_POD_NAME), string(pod.K8S_POD_UID)
}

// phase notes how long it took since the last one.
func (c *call) phase(p agentcall.Phase) {
	now := clock()
	c.told.Seconds[p] = now.Sub(c.mark).Seconds()
	c.mark = now
}

// decide asks only as far as it must: the pod's name, what the runtime handed over, the node agent, the API server. No
// credential is read and nothing is sent for a pod that one of the first two shows to be none of ours.
func (c *call) decide(ctx context.Context, conf cniconf.NetConf) (d sidecar.Decision, err error) {
	defer func() {
		c.phase(agentcall.PhaseDecide)
		c.told.Reason, c.told.Detail, c.told.Captured = string(d.Reason), d.Detail, d.Outcome == sidecar.Capture
	}()
	policy := conf.Policy()
	if d, done := sidecar.Early(c.told.Namespace, c.told.Pod, policy); done {
		c.told.Source = agentcall.SourceName
		return d, nil
	}
	if conf.AnnotationsDelivered {
		if d, done := sidecar.ByAnnotations(c.told.Namespace, c.told.Pod, conf.Annotations, policy); done {
			c.told.Source = agentcall.SourceAnnotations
			return d, nil
		}
	}
	facts, fromAgent := c.askAgent(ctx, conf)
	if fromAgent == nil {
		c.told.Source = agentcall.SourceAgent
		return sidecar.Decide(facts, policy), nil
	}
	facts, err = c.askServer(ctx, conf)
	if err != nil {
		if !errors.Is(fromAgent, fs.ErrNotExist) {
			err = lookupFailed{err, fromAgent}
		}
		return sidecar.Decision{}, err
	}
	c.told.Source = agentcall.SourceAPI
	return sidecar.Decide(facts, policy), nil
}

// lookupFailed is a look-up that failed on both ways. What the API server said comes first: it has the last word.
type lookupFailed struct{ server, agent error }

func (e lookupFailed) Error() string   { return e.server.Error() + "; before that: " + e.agent.Error() }
func (e lookupFailed) Unwrap() []error { return []error{e.server, e.agent} }

// askAgent asks the node agent. No error of it is the last word.
func (c *call) askAgent(ctx context.Context, conf cniconf.NetConf) (sidecar.Facts, error) {
	if conf.RunDir == "" || c.told.UID == "" {
		return sidecar.Facts{}, fs.ErrNotExist
	}
	ctx, cancel := context.WithTimeout(ctx, min(max(agentPatience, conf.APITimeout/agentShare), conf.APITimeout/2))
	defer cancel()
	log := c.plugin.log.Logger()
	agent, err := agentcall.Dial(ctx, filepath.Join(conf.RunDir, agentcall.SocketName))
	if err != nil {
		log.DebugContext(ctx, "not asking the node agent", "cause", err.Error())
		return sidecar.Facts{}, err
	}
	facts, err := agent.Pod(ctx, agentcall.Key{Namespace: c.told.Namespace, Name: c.told.Pod, UID: c.told.UID})
	if _, answered := errors.AsType[*agentcall.Refusal](err); err == nil || answered {
		c.agent = agent // it works, and hears what becomes of the pod
	} else {
		_ = agent.Close() // nothing more is wanted of it
	}
	if err != nil {
		log.WarnContext(ctx, "the node agent does not tell about the pod; asking the API server", "pod", c.pod.String(), "cause", err.Error())
	}
	return facts, err
}

// askServer asks the API server with what is left of the time for finding out.
func (c *call) askServer(ctx context.Context, conf cniconf.NetConf) (sidecar.Facts, error) {
	client, err := kube.NewClient(kube.Config{Kubeconfig: conf.Kubeconfig, Once: true})
	if err != nil {
		return sidecar.Facts{}, err
	}
	left := conf.APITimeout - clock().Sub(c.mark)
	key := kube.PodKey{Namespace: c.told.Namespace, Name: c.told.Pod, UID: c.told.UID}
	facts, err := client.Lookup(ctx, key, kube.Budget{Total: left})
	c.told.Requests = client.Requests()
	return facts, err
}

// say logs the one line that every decision gets. One that took nothing but what the runtime handed over costs nothing
// more, unless somebody wants to know everything: the log's places are files and sockets.
func (c *call) say(ctx context.Context, log *slog.Logger, d sidecar.Decision) {
	for _, w := range d.Warnings {
		log.WarnContext(ctx, "a setting of the pod is ignored", "cause", oneLine(w))
	}
	level := slog.LevelInfo
	if c.told.Source == agentcall.SourceAnnotations {
		level = slog.LevelDebug
	}
	log.Log(ctx, level, "decided about the pod", "capture", d.Outcome == sidecar.Capture, "reason", string(d.Reason),
		"because", d.Reason.Sentence(), "detail", oneLine(d.Detail), "source", string(c.told.Source))
}

// programmed notes what was done in the pod's namespace.
func (c *call) programmed(r podnet.Report) {
	c.phase(agentcall.PhaseProgram)
	c.told.Backend, c.told.Changed, c.told.Processes = strings.Join(r.Tools, ","), len(r.Programs) > 0, r.Processes
}

// report tells the node agent what became of the pod, also if it did not answer before: those are the calls that somebody
// wants to see. Only for a pod that was passed by what the runtime handed over even that would cost too much.
func (c *call) report(ctx context.Context, conf cniconf.NetConf, failed error) {
	defer c.end()
	if failed == nil && !c.finished {
		failed = errUnfinished
	}
	if failed == nil && c.told.Source == agentcall.SourceAnnotations || conf.RunDir == "" {
		return
	}
	if failed != nil {
		c.told.Error = oneLine(failed.Error())
	}
	c.told.Seconds[agentcall.PhaseTotal] = clock().Sub(c.began).Seconds()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), reportPatience)
	defer cancel()
	if err := c.send(ctx, conf); err != nil && !errors.Is(err, fs.ErrNotExist) {
		c.plugin.log.Logger().DebugContext(ctx, "the node agent was not told", "cause", err.Error())
	}
}

// send hands the report over, on a new connection if there is none or the agent has closed it meanwhile.
func (c *call) send(ctx context.Context, conf cniconf.NetConf) (err error) {
	if c.agent != nil && c.agent.Report(ctx, c.told) == nil {
		return nil
	}
	c.end()
	if c.agent, err = agentcall.Dial(ctx, filepath.Join(conf.RunDir, agentcall.SocketName)); err != nil {
		return err
	}
	return c.agent.Report(ctx, c.told)
}

// errUnfinished is a panic on its way up.
var errUnfinished = errors.New("the plugin panicked")

// oneLine makes an error's text, which may quote all that a stranger wrote, fit for an answer, a report or a log.
func oneLine(text string) string {
	return printable.Text(strings.ReplaceAll(text, "\n", "; "), maxDetails)
}

// end lets go the connection to the agent.
func (c *call) end() {
	if c.agent != nil {
		_ = c.agent.Close() // all is said
		c.agent = nil
	}
}
