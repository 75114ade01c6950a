package document

import "time"

// TraceEvent is one line of a trace, or with -o yaml one document of its stream. It has one of the fields: begin in the first event,
// end in the last one.
type TraceEvent struct {
	// Begin is the beginning of the trace.
	Begin *TraceBegin `json:"begin,omitempty"`
	// Packet is a traced packet.
	Packet *TracePacket `json:"packet,omitempty"`
	// Count is a rule of a legacy table that packets have matched.
	Count *TraceCount `json:"count,omitempty"`
	// End is the end of the trace.
	End *TraceEnd `json:"end,omitempty"`
}

// TraceBegin describes what the trace covers.
type TraceBegin struct {
	// Subject is the pod or network namespace.
	Subject string `json:"subject"`
	// Packets describes the selected packets.
	Packets string `json:"packets"`
	// Until is when the trace will end.
	Until time.Time `json:"until"`
	// Note says what the kernel cannot trace here.
	Note string `json:"note,omitempty"`
}

// TracePacket is a traced packet with the rules that it matched.
type TracePacket struct {
	// Time is when the packet was seen.
	Time time.Time `json:"time"`
	// Protocol is the protocol, such as TCP.
	Protocol string `json:"protocol"`
	// Source is the source, with the port if the protocol has ports.
	Source string `json:"source"`
	// Destination is the destination before any redirection.
	Destination string `json:"destination"`
	// Outgoing marks a packet that the pod sends.
	Outgoing bool `json:"outgoing"`
	Way
}

// TraceCount is a rule of a legacy table that packets matched since the last reading.
type TraceCount struct {
	Hop

	// Family is the address family.
	Family string `json:"family" jsonschema:"enum=IPv4,enum=IPv6"`
	// Packets is the number of packets.
	Packets uint64 `json:"packets"`
	// Wanted says whether the rule treats these packets as the mesh wants. It is absent for a rule that decides nothing.
	Wanted Wanted `json:"wanted,omitempty" jsonschema:"enum=as-wanted,enum=past-the-mesh,enum=unknown"`
}

// TraceEnd is the result of a trace.
type TraceEnd struct {
	// Reason is why the trace ended.
	Reason string `json:"reason"`
	// Packets is the number of traced packets.
	Packets int `json:"packets"`
	// Wanted of them went as the mesh wants.
	Wanted int `json:"wanted"`
	// Past of them went past the mesh.
	Past int `json:"past"`
	// ByLegacy of them were decided by rules of legacy tables that the trace cannot see.
	ByLegacy int `json:"byLegacy,omitempty"`
	// Unknown of them went a way that is not known.
	Unknown int `json:"unknown"`
	// Counted is the number of packets that rules of legacy tables counted: a packet counts once for each rule that it matched.
	Counted uint64 `json:"counted,omitempty"`
	// CountedWanted is the count of the rules that decide as the mesh wants.
	CountedWanted uint64 `json:"countedWanted,omitempty"`
	// CountedPast is the count of the rules that decide otherwise.
	CountedPast uint64 `json:"countedPast,omitempty"`
	// Lost counts the times that the kernel dropped events.
	Lost int `json:"lost"`
	// Hint is what to try after a trace without packets.
	Hint string `json:"hint,omitempty"`
}

// Add counts an event.
func (e *TraceEnd) Add(r TraceEvent) {
	switch {
	case r.Packet != nil:
		e.Packets++
		switch r.Packet.Wanted {
		case AsWanted:
			e.Wanted++
		case Past:
			e.Past++
		case Unknown:
			e.Unknown++
		default:
			e.ByLegacy++
		}
	case r.Count != nil:
		e.Counted += r.Count.Packets
		switch r.Count.Wanted {
		case AsWanted:
			e.CountedWanted += r.Count.Packets
		case Past:
			e.CountedPast += r.Count.Packets
		case Unknown: // no rule decided
		}
	}
}
