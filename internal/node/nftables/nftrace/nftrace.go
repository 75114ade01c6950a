// Package nftrace follows packets through the nf_tables of a network namespace, by the kernel's packet trace (nftrace).
//
// It promises that the table which marks packets is removed when the tracer is closed or its process ends (owner flag, Linux 5.12; on
// older kernels when the tracer is closed, and at the start of the next trace), that the table's rules have no verdict, and that at most
// a fixed number of packets per second is traced. It never changes other programs' tables, whatever their names, and starts no process.
//
// Start at Open; event.go has the kernel's messages.
package nftrace

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/decode"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// ErrUnsupported is returned by a kernel without nf_tables, which has no packet trace either.
var ErrUnsupported = nfnetlink.ErrUnsupported

// Filter selects packets that match all its fields. The zero Filter selects the first packet of every TCP connection and all UDP packets.
type Filter struct {
	// Source and Destination match the packet's addresses; the zero prefix matches any. A packet with a Source arrives from outside.
	Source, Destination netip.Prefix
	// Port is the destination port, 0 for any.
	Port uint16
}

// Tracer is a running trace. It is for one goroutine at a time.
type Tracer struct {
	conn  *nfnetlink.Conn
	table string
	// marks reports whether the table exists, owned whether the kernel removes it with the socket.
	marks, owned bool
}

// tableName returns the table of a process, which runs one trace at a time in a namespace. No other process can take the name first.
func tableName(pid int) string {
	const random = 8
	return fmt.Sprintf("%s%d-%s", redirect.TraceTable, pid, rand.Text()[:random])
}

// ownerFlag is NFT_TABLE_F_OWNER, linux/netfilter/nf_tables.h.
const ownerFlag = 2

// Priorities of the chains: before all other hooks of the mesh (table raw has -300), and after them.
const (
	ahead  = -400
	behind = 400
)

// receiveBuffer has room for a burst of packets: each has about twenty events, and the kernel counts half a kilobyte for each.
const receiveBuffer = 4 << 20

// Open starts a trace in the network namespace of the calling thread.
func Open(f Filter) (*Tracer, error) { return open(f, ownerFlag) }

func open(f Filter, flags uint32) (*Tracer, error) {
	conn, err := nfnetlink.Open()
	if err != nil {
		return nil, fmt.Errorf("starting a packet trace: %w", err)
	}
	t := &Tracer{conn: conn, table: tableName(os.Getpid())}
	if err := t.begin(f, flags); err != nil {
		return nil, errors.Join(fmt.Errorf("starting a packet trace: %w", err), t.Close())
	}
	return t, nil
}

func (t *Tracer) begin(f Filter, flags uint32) error {
	if t.owned = flags == ownerFlag; !t.owned {
		if err := t.removeStale(); err != nil {
			return err
		}
	}
	err := t.mark(f, flags)
	if t.owned && (errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL)) { // before Linux 5.12
		return t.begin(f, 0)
	}
	if err != nil {
		return err
	}
	t.marks = true
	const traceGroup = 9 // NFNLGRP_NFTRACE, linux/netfilter/nfnetlink.h
	return t.conn.Join(traceGroup, receiveBuffer)
}

// Run calls each with every event until ctx ends. It calls lost when the kernel dropped events.
func (t *Tracer) Run(ctx context.Context, each func(Event), lost func()) error {
	return t.conn.Listen(ctx, func(m nfnetlink.Message) {
		if e, ok := parse(m); ok {
			e.Own = e.Family == unix.NFPROTO_INET && e.Table == t.table
			each(e)
		}
	}, lost)
}

// Close ends the trace and removes its table. The kernel removes an owned table with the socket, but a process that was just
// started may still hold the socket open. A nil Tracer is closed.
func (t *Tracer) Close() error {
	if t == nil {
		return nil
	}
	var err error
	if t.marks {
		err = t.remove(t.table)
		for range 3 { // queued events may have displaced the answer
			if errors.Is(err, unix.ENOBUFS) {
				err = t.remove(t.table)
			}
		}
	}
	if t.owned || errors.Is(err, unix.ENOENT) {
		err = nil
	}
	return errors.Join(err, t.conn.Close())
}

func (t *Tracer) remove(tables ...string) error {
	return t.conn.Transact(func(b *nfnetlink.Batch) error {
		for _, name := range tables {
			b.Add(unix.NFT_MSG_DELTABLE, 0, unix.NFPROTO_INET, func(b *nfnetlink.Buffer) { b.String(unix.NFTA_TABLE_NAME, name) })
		}
		return nil
	})
}

// chains returns the base chains of the table by name.
func chains() map[string]nfnetlink.Hook {
	return map[string]nfnetlink.Hook{
		"prerouting":  {Number: unix.NF_INET_PRE_ROUTING, Priority: ahead, Type: "filter"},
		"output":      {Number: unix.NF_INET_LOCAL_OUT, Priority: ahead, Type: "filter"},
		"input":       {Number: unix.NF_INET_LOCAL_IN, Priority: behind, Type: "filter"},
		"postrouting": {Number: unix.NF_INET_POST_ROUTING, Priority: behind, Type: "filter"},
	}
}

// mark creates the table: for each hook at which packets begin, a chain before all others with a rule per protocol; for each
// hook at which they end, a chain after all others without rules. Their events say where the packet is.
func (t *Tracer) mark(f Filter, flags uint32) error {
	return t.conn.Transact(func(batch *nfnetlink.Batch) error {
		batch.Add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE|unix.NLM_F_EXCL, unix.NFPROTO_INET, func(b *nfnetlink.Buffer) {
			b.String(unix.NFTA_TABLE_NAME, t.table)
			b.Uint32(unix.NFTA_TABLE_FLAGS, flags)
		})
		for name, hook := range chains() {
			batch.Add(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, unix.NFPROTO_INET, func(b *nfnetlink.Buffer) {
				b.Chain(t.table, name)
				b.Base(hook)
			})
		}
		for _, chain := range []string{"prerouting", "output"} {
			for _, protocol := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
				batch.Add(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, unix.NFPROTO_INET, func(b *nfnetlink.Buffer) {
					b.In(t.table, chain)
					b.Nested(unix.NFTA_RULE_EXPRESSIONS, func() { f.rule(b, chain, protocol) })
				})
			}
		}
		return nil
	})
}

// rule marks the selected packets of a protocol; for TCP, packets with SYN and without ACK. It ignores packets that arrive by lo:
// the output chain has already decided about them.
func (f Filter) rule(b *nfnetlink.Buffer, chain string, protocol uint8) {
	if chain == "prerouting" {
		b.Meta(unix.NFT_META_IIF)
		b.Compare(true, binary.NativeEndian.AppendUint32(nil, loopback))
	}
	for _, network := range []struct {
		netip.Prefix
		source bool
	}{{f.Source, true}, {f.Destination, false}} {
		if network.IsValid() {
			b.Family(network.Addr().Is6())
		}
		if network.Bits() > 0 {
			b.Network(network.source, false, network.Prefix)
		}
	}
	b.Meta(unix.NFT_META_L4PROTO)
	b.Compare(false, []byte{protocol})
	if f.Port != 0 {
		b.Port(false, false, f.Port)
	}
	if protocol == unix.IPPROTO_TCP {
		const syn, ack = 2, 16
		b.Payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, nfnetlink.TCPFlagsOffset, 1)
		b.And([]byte{syn | ack})
		b.Compare(false, []byte{syn})
	}
	const perSecond, burst = 50, 50 // packets: a busy pod must not fill the socket, nor a terminal
	b.Expression("limit", func() {
		b.Uint64(unix.NFTA_LIMIT_RATE, perSecond)
		b.Uint64(unix.NFTA_LIMIT_UNIT, 1)
		b.Uint32(unix.NFTA_LIMIT_BURST, burst)
	})
	b.Immediate(binary.NativeEndian.AppendUint32(nil, 1)[:1])
	b.SetMeta(unix.NFT_META_NFTRACE)
}

// loopback is the index of lo in every namespace.
const loopback = 1

// maxObjects bounds the tables, chains and rules in which removeStale searches because the processes of a pod can make any number.
const maxObjects = 4096

// rulesOf is the number of rules in a trace's table.
const rulesOf = 4

// removeStale removes the tables that the traces of dead processes left behind, and the table of an earlier process with the same
// PID. A pod can give any table such a name, so the content must match too. A table with an owner goes with its process.
func (t *Tracer) removeStale() error {
	if _, err := t.conn.Generation(); err != nil {
		return err
	}
	t.conn.Budget = nfnetlink.Budget{Objects: maxObjects, Bytes: maxObjects << 10}
	var named, stale []string
	err := t.dump(unix.NFT_MSG_GETTABLE, "", func(table nfnetlink.Attributes) {
		if isStale(table) {
			named = append(named, table.Get(unix.NFTA_TABLE_NAME).Text())
		}
	})
	for _, name := range named {
		traces, failed := t.isTrace(name)
		if failed != nil {
			return failed
		}
		if traces {
			stale = append(stale, name)
		}
	}
	if err != nil || len(stale) == 0 {
		return err
	}
	return t.remove(stale...)
}

// isTrace reports whether a table has the chains and the rules of a trace, and no others.
func (t *Tracer) isTrace(name string) (bool, error) {
	marks, rules := 0, 0
	err := t.dump(unix.NFT_MSG_GETCHAIN, name, func(chain nfnetlink.Attributes) {
		if isMarkChain(chain) {
			marks++
		}
	})
	if err == nil {
		err = t.dump(unix.NFT_MSG_GETRULE, name, func(rule nfnetlink.Attributes) {
			if rules++; isMark(rule.Get(unix.NFTA_RULE_EXPRESSIONS).Value) {
				marks++
			}
		})
	}
	return rules == rulesOf && marks == len(chains())+rulesOf, err
}

// isStale reports whether a table has no owner, the name of a trace whose process is gone, and as many objects as a trace's table.
func isStale(table nfnetlink.Attributes) bool {
	flags, _ := table.Get(unix.NFTA_TABLE_FLAGS).Uint32()
	holds, _ := table.Get(unix.NFTA_TABLE_USE).Uint32()
	number, found := strings.CutPrefix(table.Get(unix.NFTA_TABLE_NAME).Text(), redirect.TraceTable)
	number, _, _ = strings.Cut(number, "-")
	pid, err := strconv.Atoi(number)
	return found && err == nil && flags == 0 && int(holds) == len(chains()) && (pid == os.Getpid() || errors.Is(unix.Kill(pid, 0), unix.ESRCH))
}

// dump calls each with the tables of the family inet, or with the chains or rules of a table.
func (t *Tracer) dump(kind uint16, table string, each func(nfnetlink.Attributes)) error {
	narrow := func(b *nfnetlink.Buffer) {
		if table != "" {
			b.String(unix.NFTA_RULE_TABLE, table)
		}
	}
	return t.conn.Dump(context.Background(), kind, unix.NFPROTO_INET, narrow, func(m nfnetlink.Message) error {
		if table == "" || m.Attributes.Get(unix.NFTA_RULE_TABLE).Text() == table { // chains have the same number for it
			each(m.Attributes)
		}
		return nil
	})
}

// isMarkChain reports whether a chain equals one that mark makes.
func isMarkChain(a nfnetlink.Attributes) bool {
	hook, drops, base := nfnetlink.ReadHook(a)
	want, known := chains()[a.Get(unix.NFTA_CHAIN_NAME).Text()]
	return base && !drops && known && hook == want
}

// isMark reports whether a rule only marks packets for the trace, whatever packets it selects.
func isMark(expressions nfnetlink.Attributes) bool {
	r := decode.Table{}.Rule(0, expressions, nil)
	return r.Target == ruleset.Target(decode.Trace) && strings.HasSuffix(r.String(), decode.Trace.Text)
}
