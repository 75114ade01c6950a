// Package nftables reads and writes the rules of the current network namespace by netlink, without a process: the
// rules that iptables-nft would write, and the tables of the reference's native mode.
//
// It promises to write exactly the messages of iptables-nft 1.8.9 for the same text, all tables and both families in one
// transaction of the kernel; that a rule that it cannot decode is foreign and never changed; that it sends no transaction
// without a difference, and deletes nothing in a namespace without our rules. The caller enters the namespace. The package
// never touches the legacy tables.
//
// Start reading at Session: it reads a View of the namespace, and View.Apply applies a Plan made from the View.
package nftables

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// ErrUnsupported is returned if the kernel lacks a feature of nf_tables; the error around it names the feature. The host's
// iptables tools may still work with the legacy tables.
var ErrUnsupported = errors.New("the kernel cannot do this with nf_tables")

// ErrChanged is returned if the rules of the namespace changed since they were read. This program changed nothing.
var ErrChanged = nfnetlink.ErrChanged

// ErrUninspectable is returned if the namespace exceeds the budget: a pod can fill its own. Nothing was changed.
var ErrUninspectable = nfnetlink.ErrUninspectable

// budget bounds the tables, chains, rules and sets that are read from a namespace, for all families together. It is more
// than twice the number that a pod can cause by its annotations.
var budget = nfnetlink.Budget{Objects: maxObjects, Bytes: maxBytes} //nolint:gochecknoglobals // a constant

// The values of the budget; docs/compared.md names them.
const (
	maxObjects  = 50_000
	maxBytes    = 32 << 20
	chainWeight = 5 // a chain takes more memory than its message has bytes
)

// Session works on the network namespace of the thread that opened it. It is for one goroutine at a time.
type Session struct{ conn *nfnetlink.Conn }

// Open opens a Session in the current thread's network namespace.
func Open() (*Session, error) {
	conn, err := nfnetlink.Open()
	if err != nil {
		return nil, unsupported(err)
	}
	conn.Budget = budget
	return &Session{conn}, nil
}

// Close ends the Session.
func (s *Session) Close() error { return s.conn.Close() }

// unsupported marks the error of a kernel without nf_tables, and names the missing capability for EPERM.
func unsupported(err error) error {
	switch {
	case errors.Is(err, nfnetlink.ErrUnsupported):
		return fmt.Errorf("%w: %w", ErrUnsupported, err)
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%w%s", err, hintForErrno(err))
	}
	return err
}

// Generation returns the kernel's generation ID, which each change of the current namespace's nf_tables increments. It returns
// 0 if the kernel has no nf_tables.
func Generation() (generation uint32, err error) {
	err = session(func(s *Session) (err error) {
		generation, err = s.conn.Generation()
		return unsupported(err)
	})
	if errors.Is(err, ErrUnsupported) {
		return 0, nil
	}
	return generation, err
}

// InUse reports whether the namespace has any nf_tables table of the family, of iptables or of another program.
func InUse(ctx context.Context, f ruleset.Family) (bool, error) {
	err := session(func(s *Session) error {
		return s.dump(ctx, unix.NFT_MSG_GETTABLE, protocolFamily(f), nil, func(nfnetlink.Message) error { return fs.SkipAll })
	})
	if err != nil && !errors.Is(err, fs.SkipAll) {
		return false, fmt.Errorf("listing nf_tables tables of %s: %w", f, err)
	}
	return err != nil, nil
}

// Plan is the content of a transaction.
type Plan struct {
	// Programs have the semantics of iptables-restore --noflush.
	Programs []ruleset.Program
	// Native is the wanted content of the native tables. Other native tables are removed. Nil leaves the native tables unchanged.
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
		ruleset.Netdev: unix.NFPROTO_NETDEV,
	}[f]
}

// Handle is the kernel's number of a rule in its table.
type Handle struct {
	Family ruleset.Family
	Table  string
	Number uint64
}

// liveFamilies has the families whose packets the mesh sees, by the kernel's number.
var liveFamilies = map[uint8]ruleset.Family{ //nolint:gochecknoglobals // a constant table
	unix.NFPROTO_IPV4: ruleset.IPv4, unix.NFPROTO_IPV6: ruleset.IPv6, unix.NFPROTO_INET: ruleset.Inet, unix.NFPROTO_NETDEV: ruleset.Netdev,
}

// Live returns the rules of all tables that IP packets traverse, at the time of the View: the View's own rules and other
// programs' rules. It leaves out dormant tables. The error is ErrChanged if the rules have changed since.
func (v *View) Live(ctx context.Context) ([]ruleset.Set, error) {
	v.session.conn.Budget = budget
	others := tables{}
	for _, at := range v.others {
		others[at] = newTable(at, false, false)
	}
	for _, f := range liveFamilies {
		if err := v.readFamily(ctx, f, others, true); err != nil {
			return nil, err
		}
	}
	for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
		if err := v.lookedUp(ctx, f); err != nil {
			return nil, err
		}
	}
	all := v.sets(others)
	if len(v.others) == 0 {
		return all, nil
	}
	now, err := v.session.conn.Generation()
	if err == nil && now != v.generation {
		err = ErrChanged
	}
	return all, err
}

// sets returns the rules of the View and of other tables, by family.
func (v *View) sets(others tables) (all []ruleset.Set) {
	for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6, ruleset.Inet, ruleset.Netdev} {
		set := v.Set(f)
		set.Tables = append(set.Tables, others.rules(f)...)
		slices.SortStableFunc(set.Tables, func(a, b ruleset.Table) int { return strings.Compare(a.Name, b.Name) })
		if len(set.Tables) > 0 {
			all = append(all, set)
		}
	}
	return all
}

// lookedUp reads the rules of a family again if some rules look up sets. Rules of the mesh and of iptables use no sets, so Read does not
// read sets.
func (v *View) lookedUp(ctx context.Context, f ruleset.Family) error {
	again := tables{}
	for at, t := range v.tables {
		if at.family != f || len(t.reader.Sets) == 0 {
			continue
		}
		for _, c := range t.chains {
			c.rules = nil
		}
		again[at] = t
	}
	if len(again) == 0 {
		return nil
	}
	if err := v.session.readSets(ctx, f, again); err != nil {
		return err
	}
	return v.session.readRules(ctx, f, again, again.names(f)...)
}
