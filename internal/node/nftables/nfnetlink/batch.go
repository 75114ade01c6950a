package nfnetlink

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Batch builds a transaction: the kernel applies all of it or nothing.
type Batch struct {
	conn   *Conn
	buffer Buffer
	first  uint32 // sequence number of the first message
	starts []int  // offsets of the messages between begin and end
}

// initialCapacity has room for the rules of one pod.
const initialCapacity = 1 << 14

// Batch begins a transaction that the kernel refuses, with ErrChanged, if the namespace's nf_tables have left the
// generation. Kernels before 4.14 lack that check and apply the transaction regardless.
func (c *Conn) Batch(generation uint32) *Batch {
	b := &Batch{conn: c, buffer: Buffer{data: make([]byte, 0, initialCapacity)}}
	at := c.begin(&b.buffer, unix.NFNL_MSG_BATCH_BEGIN, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES)
	b.buffer.Uint32(unix.NFNL_BATCH_GENID, generation)
	finish(&b.buffer, at)
	b.first = c.sequence + 1
	return b
}

// Add adds a message of nf_tables (NFT_MSG_NEWRULE, …) with the attributes that fill adds.
func (b *Batch) Add(kind, flags uint16, family uint8, fill func(*Buffer)) {
	at := b.conn.begin(&b.buffer, nfTables(kind), flags, family, 0)
	fill(&b.buffer)
	finish(&b.buffer, at)
	b.starts = append(b.starts, at)
}

// Refused is the error for a message of a Batch that the kernel refused.
type Refused struct {
	// Message is the number of calls of Add before that of the message, or -1 if the kernel refused the transaction as a whole.
	Message int
	// Attributes are the attributes of the message.
	Attributes Attributes
	// Offset is the position of the wrong attribute in Attributes, or -1 if it is unknown.
	Offset int
	// Cause holds the errno and the text of the extended ACK.
	Cause error
}

// Error returns the text of the cause. The caller adds the content of the message.
func (r *Refused) Error() string { return r.Cause.Error() }

// Unwrap returns the cause.
func (r *Refused) Unwrap() error { return r.Cause }

// Commit sends the transaction and reads the answers. A refusal by the kernel is a *Refused: then the
// kernel applied nothing. Commit does not send an empty Batch.
func (b *Batch) Commit() error {
	if len(b.starts) == 0 {
		return nil
	}
	flags := b.buffer.data[b.starts[len(b.starts)-1]+6:] // of the last message
	binary.NativeEndian.PutUint16(flags, binary.NativeEndian.Uint16(flags)|unix.NLM_F_ACK)
	last := b.conn.sequence
	at := b.conn.begin(&b.buffer, unix.NFNL_MSG_BATCH_END, 0, unix.AF_UNSPEC, unix.NFNL_SUBSYS_NFTABLES)
	finish(&b.buffer, at)
	request, err := b.buffer.Bytes()
	if err != nil {
		return err
	}
	if err := b.conn.send(request); err != nil {
		return err
	}
	return b.answers(last)
}

// Transact commits what fill adds to a Batch for the current generation. It repeats this, a bounded number of times, if another program
// changes the rules meanwhile; then it returns ErrChanged.
func (c *Conn) Transact(fill func(*Batch) error) (err error) {
	const attempts = 10
	for range attempts {
		var generation uint32
		if generation, err = c.Generation(); err != nil {
			return err
		}
		b := c.Batch(generation)
		if err = fill(b); err == nil {
			err = b.Commit()
		}
		if !errors.Is(err, ErrChanged) {
			break
		}
	}
	return err
}

// answers reads the answers to a batch: refusals, in the order of the messages, and the acknowledgement of the last one. The
// kernel processes a batch before the send returns, so no answer comes later.
func (b *Batch) answers(last uint32) error {
	acknowledged := false
	var lost error
	for !acknowledged {
		data, err := b.conn.datagram(unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return errors.Join(errNoAnswer, lost)
		case errors.Is(err, unix.ENOBUFS):
			// The receive buffer overflowed. Only refusals can fill it.
			lost = fmt.Errorf("the kernel refused more messages than it can report: %w", err)
			continue
		case err != nil:
			return err
		}
		for len(data) > 0 {
			m, rest, err := next(data)
			if err != nil {
				return err
			}
			data = rest
			if m.kind != unix.NLMSG_ERROR {
				continue
			}
			r := readError(m.payload)
			if err := b.refused(r); err != nil {
				return err
			}
			acknowledged = acknowledged || r.sequence == last
		}
	}
	return lost
}

// errNoAnswer means that the transaction may or may not have been applied.
var errNoAnswer = errors.New("the kernel did not answer the transaction")

// refused returns the error for a refusal; nil for an acknowledgement, and for a message of another batch.
func (b *Batch) refused(r refusal) error {
	n := int(r.sequence) - int(b.first) // -1 is the begin message, len(b.starts) the end message
	cause := r.asError()
	if cause == nil || n < -1 || n > len(b.starts) {
		return nil
	}
	out := &Refused{Message: -1, Offset: -1, Cause: cause}
	if n >= 0 && n < len(b.starts) {
		out.Message = n
		message, _, err := next(b.buffer.data[b.starts[out.Message]:])
		if err == nil {
			out.Attributes = message.payload[headers-unix.NLMSG_HDRLEN:]
		}
	}
	if r.offset >= headers {
		out.Offset = r.offset - headers
	}
	return out
}
