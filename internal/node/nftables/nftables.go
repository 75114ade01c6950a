// Package nftables reads and writes the rules of the current network namespace by netlink, without a process: those
// that iptables-nft would write, and the tables of the reference's native mode.
//
// It promises that what it writes is what iptables-nft 1.8.9 writes for the same text, all tables and both families in
// one transaction of the kernel; that a rule it does not understand is foreign and never changed;
// that nothing is sent where nothing is to be done, and nothing deleted in a namespace that holds nothing of ours. It
// never enters a namespace (the caller has) and never touches the legacy tables.
//
// Start reading at Session: it reads a View of the namespace, and View.Apply carries out a Plan that was made of it.
package nftables

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// ErrUnsupported is returned if the kernel cannot do this with nf_tables; the error around it names what is missing. The
// iptables tools of the host may still be able to, by the legacy tables.
var ErrUnsupported = errors.New("the kernel cannot do this with nf_tables")

// ErrChanged is returned if the rules of the namespace changed in between. Nothing was done.
var ErrChanged = nfnetlink.ErrChanged

// ErrUninspectable is returned if the namespace holds more than is read: a pod can fill its own. Nothing was done.
var ErrUninspectable = nfnetlink.ErrUninspectable

// budget is what is read of a namespace: tables, chains, rules and sets of all families together. It is more than twice
// what a pod can ask for by its annotations.
var budget = nfnetlink.Budget{Objects: maxObjects, Bytes: maxBytes} //nolint:gochecknoglobals // a constant

// The numbers of the budget; docs/design.md names them.
const (
	maxObjects  = 50_000
	maxBytes    = 32 << 20
	chainWeight = 5 // a chain that is read takes more memory than it has bytes
)

// families are those whose tables are read: iptables', and that of the native tables.
func families() []ruleset.Family { return []ruleset.Family{ruleset.IPv4, ruleset.IPv6, ruleset.Inet} }

// Session works on the network namespace of the thread that opened it. It is for one goroutine at a time.
type Session struct{ conn *nfnetlink.Conn }

// Open begins to work on the current thread's network namespace.
func Open() (*Session, error) {
	conn, err := nfnetlink.Open()
	if err != nil {
		return nil, unsupported(err)
	}
	conn.Budget = budget
	return &Session{conn}, nil
}

// Close ends the work.
func (s *Session) Close() error { return s.conn.Close() }

// unsupported marks the error of a kernel without nf_tables, and adds the missing capability to EPERM.
func unsupported(err error) error {
	switch {
	case errors.Is(err, nfnetlink.ErrUnsupported):
		return fmt.Errorf("%w: %w", ErrUnsupported, err)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w%s", err, hintForErrno(err))
	}
	return err
}

// Supported reports why the rules of the current namespace cannot be read and written here: with ErrUnsupported if the
// kernel has no nf_tables. Whether it has every match is seen when a rule needs it.
func Supported() error {
	return session(func(s *Session) error {
		_, err := s.conn.Generation()
		return unsupported(err)
	})
}

// InUse reports whether the namespace has any nf_tables table of the family, iptables' or not.
func InUse(ctx context.Context, f ruleset.Family) (bool, error) {
	err := session(func(s *Session) error {
		return s.dump(ctx, unix.NFT_MSG_GETTABLE, protocolFamily(f), nil, func(nfnetlink.Message) error { return fs.SkipAll })
	})
	if err != nil && !errors.Is(err, fs.SkipAll) {
		return false, fmt.Errorf("listing nf_tables tables of %s: %w", f, err)
	}
	return err != nil, nil
}

// Plan is what a transaction is to do.
type Plan struct {
	// Programs are carried out as iptables-restore --noflush would.
	Programs []ruleset.Program
	// Native is what the native tables are to be; tables it lacks are removed. Nil leaves them as they are.
	Native *ruleset.Set
}

func session(do func(*Session) error) error {
	s, err := Open()
	if err != nil {
		return err
	}
	return errors.Join(do(s), s.Close())
}

func protocolFamily(f ruleset.Family) uint8 {
	return map[ruleset.Family]uint8{
		ruleset.IPv4: unix.NFPROTO_IPV4, ruleset.IPv6: unix.NFPROTO_IPV6, ruleset.Inet: unix.NFPROTO_INET,
	}[f]
}
