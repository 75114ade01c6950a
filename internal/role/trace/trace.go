// Package trace is the role "istio-cni trace": it shows real packets of a pod or network namespace, with the rules that they match.
//
// It promises that packets take the same way as without it, that it leaves nothing behind, and an exit code for scripts.
//
// Start at Run.
package trace

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/command"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/follow"
	"github.com/meshcni/istio-cni/internal/node/subject"
)

const head = `NAME:
   istio-cni trace - packets of a pod with the rules that they match (root)

USAGE:
   istio-cni trace POD [flags]              by the node agent; POD is NAMESPACE/NAME, or NAME with -n NAMESPACE
   istio-cni trace --pid N [flags]          in a process' network namespace, without the agent
   istio-cni trace --netns NAME [flags]     the same for a name as in ip netns, or a path

It shows the first packet of each new TCP connection, and UDP packets, until the time is over or Ctrl-C: at most 50 a
second of each kind, and 1000 in all. It does not change the packets' way. The kernel does not trace rules of
iptables-legacy: for these it shows the rules whose packet counters rise.

EXIT CODES:
   %d  packets were seen, and all went as the mesh wants it
   %d  the packets could not be traced
   %d  a bad value or flag
   3  some packets went past the mesh, or to a port on which nothing listens
   4  no packet was seen, or the way of some packets is unknown

`

// grace is the time for the beginning and the end of a trace.
const grace = 30 * time.Second

type config struct{ command.Trace }

// Run runs the role.
func Run(c applet.Call) int {
	var cfg config
	operands, args := settings.Operands(cfg.Rows(), c.Args)
	c.Args = args
	if code, done := service.Settings(c, "trace", cfg.Rows(), head); done {
		return code
	}
	query := cfg.query()
	filter, duration, err := follow.Parse(query.Get)
	if err = errors.Join(cfg.Check(operands), err); err != nil {
		return c.Refuse("trace", err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, duration+grace)
	defer cancel()
	p := &printer{call: c, form: cfg.Output}
	if cfg.Pod != "" {
		err = cfg.ask(ctx, query, p)
	} else {
		searchPath, _ := c.Getenv("PATH")
		now := time.Now //nolint:forbidigo // the only clock of the role
		err = cfg.local(ctx, searchPath, follow.Options{Filter: filter, For: duration, Now: now}, p)
	}
	if err != nil && p.begun && !p.ended && errors.Is(ctx.Err(), context.Canceled) { // Ctrl-C
		err = p.interrupted()
	}
	if err != nil {
		return c.Fail(err)
	}
	return code(p.end)
}

// query has the selected packets as parameters.
func (c *config) query() url.Values {
	query := url.Values{}
	for name, text := range map[string]string{"to": c.To, "from": c.From, "port": c.Port, "for": c.For} {
		if text != "" {
			query.Set(name, text)
		}
	}
	return query
}

// local traces a namespace in this process.
func (c *config) local(ctx context.Context, searchPath string, o follow.Options, p *printer) error {
	space, err := subject.Open(c.Path(), searchPath)
	if err != nil {
		return err
	}
	defer space.NetNS.Close()
	o.Subject = "namespace " + c.Path()
	return follow.Run(ctx, space, nil, o, p.event)
}

// ask makes the node agent trace a pod.
func (c *config) ask(ctx context.Context, query url.Values, p *printer) error {
	_, err := subject.Ask(ctx, c.Socket, func(agent *agentapi.Agent) (bool, error) {
		namespace, name := c.Split()
		return true, agent.Trace(ctx, namespace, name, query, func(line []byte) error {
			var r follow.Record
			if bad := json.Unmarshal(line, &r); bad != nil {
				return bad
			}
			if r.Error != "" {
				return errors.New(printable.Text(r.Error, maxLine))
			}
			return p.event(r.TraceEvent)
		})
	})
	if refusal := (*agentapi.Refusal)(nil); errors.As(err, &refusal) && refusal.Status == http.StatusNotFound {
		err = fmt.Errorf("%w (see kubectl get pod -o wide for its node; the audit may be switched off)", err)
	}
	if err == nil && !p.ended {
		err = errors.New("the node agent ended the trace before its time")
	}
	return err
}

// code is the exit code of a trace.
func code(e document.TraceEnd) int {
	switch {
	case e.Past > 0 || e.CountedPast > 0:
		return applet.ExitPast
	case e.Unknown > 0 || e.Wanted == 0 && e.CountedWanted == 0:
		return applet.ExitUnknown
	}
	return applet.ExitOK
}

// maxLine bounds a text of the pod in a line.
const maxLine = 2 << 10

// printer prints records as they come.
type printer struct {
	call         applet.Call
	form         output.Form
	begun, ended bool
	// end has the end record's counts, or the last record.
	end document.TraceEnd
}

// event shows an event.
func (p *printer) event(r document.TraceEvent) error {
	p.begun = p.begun || r.Begin != nil
	p.end.Add(r)
	if r.End != nil {
		p.end, p.ended = *r.End, true
	}
	if p.form != output.Table {
		return output.Event(p.call.Stdout, r, p.form)
	}
	return output.Show(p.call, output.Fold(text(r), p.call.Columns()))
}

// interrupted prints the end of a trace that the user interrupted.
func (p *printer) interrupted() error {
	end := p.end
	end.Reason = "it was interrupted"
	return p.event(document.TraceEvent{End: &end})
}

func text(r document.TraceEvent) string {
	switch {
	case r.Begin != nil:
		b := r.Begin
		line := fmt.Sprintf("tracing %s until %s (Ctrl-C ends it): %s\n", b.Subject, b.Until.Local().Format(time.TimeOnly), b.Packets)
		if b.Note != "" {
			line += "note: " + printable.Text(b.Note, maxLine) + "\n"
		}
		return line
	case r.Packet != nil:
		return packet(*r.Packet)
	case r.Count != nil:
		return fmt.Sprintf("\n+ %s of %s matched %s\n", output.Plural(r.Count.Packets, "packet"), r.Count.Family, hop(r.Count.Hop))
	case r.End != nil:
		return end(*r.End)
	}
	return ""
}

func packet(p document.TracePacket) string {
	var b strings.Builder
	way := "arrives"
	if p.Outgoing {
		way = "is sent by the pod"
	}
	fmt.Fprintf(&b, "\n%s %s %s -> %s %s\n", p.Time.Local().Format("15:04:05.000"), p.Protocol, p.Source, p.Destination, way)
	for _, h := range p.Hops {
		b.WriteString("→ " + hop(h) + "\n")
	}
	if p.Omitted > 0 {
		fmt.Fprintf(&b, "  and %d more rules\n", p.Omitted)
	}
	mark := map[document.Wanted]string{document.AsWanted: "✓", document.Past: "✗"}[p.Wanted]
	if mark == "" {
		mark = "?"
	}
	fmt.Fprintf(&b, "%s the packet %s\n", mark, printable.Text(p.Sentence, maxLine))
	return b.String()
}

// hop formats a rule as a line; the rule's number is unknown in a table that is not read.
func hop(h document.Hop) string {
	line := strings.TrimSpace(fmt.Sprintf("%s %s/%s", h.Hook, h.Table, h.Chain))
	if h.Number > 0 {
		line += fmt.Sprintf(" %d", h.Number)
	}
	line += ": " + h.Rule
	if h.Why != "" {
		line += "    # " + h.Why
	}
	return printable.Text(line, maxLine)
}

func end(e document.TraceEnd) string {
	var b strings.Builder
	fmt.Fprintf(&b, "\n%s: %d as the mesh wants it, %d past the mesh, %d unknown", output.Plural(e.Packets, "packet"), e.Wanted, e.Past, e.Unknown)
	if e.ByLegacy > 0 {
		fmt.Fprintf(&b, ", %d by rules of legacy tables", e.ByLegacy)
	}
	fmt.Fprintf(&b, "; ended because %s\n", e.Reason)
	if e.Counted > 0 {
		fmt.Fprintf(&b, "rules of legacy tables counted %d packets as the mesh wants it, %d past the mesh\n", e.CountedWanted, e.CountedPast)
	}
	if e.Lost > 0 {
		fmt.Fprintf(&b, "the kernel dropped messages %d times: packets or rules are missing above\n", e.Lost)
	}
	if e.Hint != "" {
		b.WriteString(printable.Text(e.Hint, maxLine) + "\n")
	}
	return b.String()
}
