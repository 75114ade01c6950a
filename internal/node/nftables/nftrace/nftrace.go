// Package nftrace follows packets through the nf_tables of a network namespace, by the kernel's packet trace (nftrace).
//
// It promises that the table which marks packets is removed when the tracer is closed or its process ends (owner flag, Linux
// 5.12; before that by name at the start and at the end), and that at most a fixed number of packets a second is traced. It never
// changes a rule of another table, and starts no process.
//
// Start at Open; event.go has the kernel's messages.
package nftrace

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// Filter selects the packets. The zero Filter selects the first packet of every TCP connection and all UDP packets.
type Filter struct {
	// Destination is the packet's address; the zero prefix is any. Port is its destination port, 0 for any.
	Destination netip.Prefix
	Port        uint16
}

// Tracer is a running trace. It is for one goroutine at a time.
type Tracer struct {
	conn *nfnetlink.Conn
	// owned says that the kernel removes the table with the socket.
	owned bool
}

// tableName is the table that marks the packets. A process has one trace at a time in a namespace.
func tableName() string { return fmt.Sprintf("istio-cni-trace-%d", os.Getpid()) }

// ownerFlag is NFT_TABLE_F_OWNER, linux/netfilter/nf_tables.h.
const ownerFlag = 2

// priority is ahead of all other hooks of the mesh: those of table raw have -300.
const priority = -400

// Open begins a trace in the network namespace of the calling thread.
func Open(f Filter) (*Tracer, error) {
	conn, err := nfnetlink.Open()
	if err != nil {
		return nil, err
	}
	t := &Tracer{conn: conn, owned: true}
	err = t.mark(f, ownerFlag)
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) { // before Linux 5.12
		t.owned = false
		err = t.mark(f, 0)
	}
	const traceGroup = 9 // NFNLGRP_NFTRACE, linux/netfilter/nfnetlink.h
	if err == nil {
		err = conn.Join(traceGroup)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("starting a packet trace: %w", err), t.Close())
	}
	return t, nil
}

// Run calls each with every event until ctx ends. lost counts the messages that the kernel dropped.
func (t *Tracer) Run(ctx context.Context, each func(Event)) (lost int, err error) {
	err = t.conn.Listen(ctx, func(m nfnetlink.Message) {
		if e, ok := parse(m); ok && e.Table != tableName() {
			each(e)
		}
	}, func() { lost++ })
	return lost, err
}

// Close ends the trace and removes its table.
func (t *Tracer) Close() error {
	var err error
	if !t.owned {
		err = t.commit(func(b *nfnetlink.Batch) {
			b.Add(unix.NFT_MSG_DELTABLE, 0, unix.NFPROTO_INET, func(b *nfnetlink.Buffer) { b.String(unix.NFTA_TABLE_NAME, tableName()) })
		})
	}
	return errors.Join(err, t.conn.Close())
}

func (t *Tracer) commit(fill func(*nfnetlink.Batch)) error {
	const attempts = 10
	var err error
	for range attempts {
		var generation uint32
		if generation, err = t.conn.Generation(); err != nil {
			return err
		}
		batch := t.conn.Batch(generation)
		fill(batch)
		if err = batch.Commit(); !errors.Is(err, nfnetlink.ErrChanged) {
			return err
		}
	}
	return err
}

// mark creates the table: a chain ahead of all others in each hook at which packets begin, with a rule for each protocol.
func (t *Tracer) mark(f Filter, flags uint32) error {
	return t.commit(func(batch *nfnetlink.Batch) {
		table := tableName()
		batch.Add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, unix.NFPROTO_INET, func(b *nfnetlink.Buffer) {
			b.String(unix.NFTA_TABLE_NAME, table)
			b.Uint32(unix.NFTA_TABLE_FLAGS, flags)
		})
		for chain, hook := range map[string]uint32{"prerouting": unix.NF_INET_PRE_ROUTING, "output": unix.NF_INET_LOCAL_OUT} {
			batch.Add(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, unix.NFPROTO_INET, func(b *nfnetlink.Buffer) {
				b.String(unix.NFTA_CHAIN_TABLE, table)
				b.String(unix.NFTA_CHAIN_NAME, chain)
				b.String(unix.NFTA_CHAIN_TYPE, "filter")
				b.Nested(unix.NFTA_CHAIN_HOOK, func() {
					b.Uint32(unix.NFTA_HOOK_HOOKNUM, hook)
					b.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(0xffffffff+1+priority)) //nolint:gosec // two's complement
				})
			})
			for _, protocol := range []uint8{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
				batch.Add(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, unix.NFPROTO_INET, func(b *nfnetlink.Buffer) {
					b.String(unix.NFTA_RULE_TABLE, table)
					b.String(unix.NFTA_RULE_CHAIN, chain)
					b.Nested(unix.NFTA_RULE_EXPRESSIONS, func() { f.rule(b, protocol) })
				})
			}
		}
	})
}

// rule marks the selected packets of a protocol: of TCP those with SYN and without ACK.
func (f Filter) rule(b *nfnetlink.Buffer, protocol uint8) {
	if f.Destination.IsValid() {
		family := uint8(unix.NFPROTO_IPV4)
		if f.Destination.Addr().Is6() {
			family = unix.NFPROTO_IPV6
		}
		b.Meta(unix.NFT_META_NFPROTO)
		b.Compare(false, []byte{family})
		if f.Destination.Bits() > 0 {
			b.Network(false, false, f.Destination)
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
	const perSecond, burst = 100, 100 // packets: a busy pod must not fill the socket, nor a terminal
	b.Expression("limit", func() {
		b.Uint64(unix.NFTA_LIMIT_RATE, perSecond)
		b.Uint64(unix.NFTA_LIMIT_UNIT, 1)
		b.Uint32(unix.NFTA_LIMIT_BURST, burst)
	})
	b.Expression("immediate", func() {
		b.Uint32(unix.NFTA_IMMEDIATE_DREG, nfnetlink.Register)
		b.Data(unix.NFTA_IMMEDIATE_DATA, binary.NativeEndian.AppendUint32(nil, 1)[:1])
	})
	b.Expression("meta", func() {
		b.Uint32(unix.NFTA_META_KEY, unix.NFT_META_NFTRACE)
		b.Uint32(unix.NFTA_META_SREG, nfnetlink.Register)
	})
}
