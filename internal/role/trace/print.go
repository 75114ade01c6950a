package trace

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/node/follow"
	"github.com/meshcni/istio-cni/internal/node/inspect"
)

// maxLine bounds a text of the pod in a line.
const maxLine = 2 << 10

// printer shows records as they come.
type printer struct {
	w            io.Writer
	form         output.Form
	begun, ended bool
	// end has the records that were shown, or the last one.
	end follow.End
}

// record shows a record.
func (p *printer) record(r follow.Record) error {
	p.begun = p.begun || r.Begin != nil
	p.end.Add(r)
	if r.End != nil {
		p.end, p.ended = *r.End, true
	}
	if r.Error != "" {
		return errors.New(printable.Text(r.Error, maxLine))
	}
	if p.form == output.JSON {
		text, err := json.Marshal(r)
		if err == nil {
			_, err = p.w.Write(append(printable.Lines(text), '\n'))
		}
		return err
	}
	_, err := io.WriteString(p.w, text(r))
	return err
}

// interrupted shows the end of a trace that the user ended.
func (p *printer) interrupted() error {
	if p.ended {
		return nil
	}
	end := p.end
	end.Reason = "it was interrupted"
	return p.record(follow.Record{End: &end})
}

func text(r follow.Record) string {
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
		return fmt.Sprintf("\n+ %d packets of %s matched %s\n", r.Count.Packets, r.Count.Family, hop(r.Count.Hop))
	case r.End != nil:
		return end(*r.End)
	}
	return ""
}

func packet(p follow.Packet) string {
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
	mark := map[inspect.Wanted]string{inspect.AsWanted: "✓", inspect.Past: "✗"}[p.Wanted]
	if mark == "" {
		mark = "?"
	}
	fmt.Fprintf(&b, "%s the packet %s\n", mark, printable.Text(p.Sentence, maxLine))
	return b.String()
}

// hop is a rule in a line; a number of the rule is not known in a table that is not read.
func hop(h inspect.Hop) string {
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

func end(e follow.End) string {
	var b strings.Builder
	fmt.Fprintf(&b, "\n%d packets: %d as the mesh wants it, %d past the mesh, %d unknown", e.Packets, e.Wanted, e.Past, e.Unknown)
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
