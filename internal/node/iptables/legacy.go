package iptables

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"math/bits"
	"os"
	"runtime"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables"
)

// Socket options of the legacy tables, the same for both families (linux/netfilter_ipv4/ip_tables.h,
// linux/netfilter_ipv6/ip6_tables.h).
const (
	soGetInfo    = 64
	soGetEntries = 65
	tableNameLen = 32 // XT_TABLE_MAXNAMELEN, linux/netfilter/x_tables.h
)

// getInfo is struct ipt_getinfo, which is ip6t_getinfo as well.
type getInfo struct {
	name       [tableNameLen]byte
	validHooks uint32
	hookEntry  [5]uint32
	underflow  [5]uint32
	entries    uint32
	size       uint32
}

// getEntries is the head of struct ipt_get_entries; the entries follow, aligned to 8 bytes.
const getEntriesHead = tableNameLen + 8

// ErrChanged is returned if a legacy table changed during a read.
var ErrChanged = errors.New("the legacy table was changed meanwhile")

// ErrUninspectable is returned if the namespace holds more rules than the bounds allow: a pod can fill its own.
var ErrUninspectable = nftables.ErrUninspectable

// Bounds of all tables of a family, and of the tool's output for them. A rule takes about 200 bytes.
const (
	maxRules = 50_000
	maxBytes = 32 << 20
)

func overBudget() error {
	return fmt.Errorf("%w: it holds more than %d rules of iptables, or more than %d MiB of them", ErrUninspectable, maxRules, maxBytes>>20)
}

// LegacyHas reports whether the legacy tables of the current namespace hold chains with the prefix. It runs no tool and
// decodes no entry: it searches the entries for the names of chains. It returns ErrUninspectable if the tables of the family
// exceed the bounds, before it reads any of them.
func LegacyHas(f ruleset.Family, prefix string) (found bool, err error) {
	err = eachLegacy(f, func(t legacyTable) error {
		entries, failed := t.read()
		found = found || bytes.Contains(entries, []byte(prefix))
		return failed
	})
	return found && err == nil, err
}

// Digest identifies rules: equal rules have equal digests, whoever wrote them. It is zero without tables.
type Digest [sha256.Size]byte

// LegacyDigest returns the digest of the rules of all legacy tables of the family in the current namespace, without their counters.
// It runs no tool.
func LegacyDigest(f ruleset.Family) (sum Digest, err error) {
	digest, some := sha256.New(), false
	err = eachLegacy(f, func(t legacyTable) error {
		entries, failed := t.read()
		if some = failed == nil; some {
			clearCounters(f, entries[getEntriesHead:])
			_, _ = digest.Write(entries)
		}
		return failed
	})
	if some {
		digest.Sum(sum[:0])
	}
	return sum, err
}

// legacyTable is a legacy table of the current namespace; read returns its entries.
type legacyTable struct {
	name string
	info getInfo
	read func() (entries []byte, err error)
}

// eachLegacy calls do with the legacy tables of a family, in the order of their names, unless all together exceed the bounds.
func eachLegacy(f ruleset.Family, do func(legacyTable) error) error {
	names, err := legacyTables(f)
	if err != nil || len(names) == 0 {
		return err
	}
	l, err := openLegacy(f)
	if err != nil {
		return err
	}
	defer unix.Close(l.fd) //nolint:errcheck // nothing was written
	var all []legacyTable
	rules, size := 0, 0
	for _, name := range slices.Sorted(slices.Values(names)) {
		info, err := l.info(name)
		if err != nil {
			return err
		}
		rules, size = rules+int(info.entries), size+int(info.size)
		all = append(all, legacyTable{name, info, func() ([]byte, error) { return l.entries(name, info.size) }})
	}
	if rules > maxRules || size > maxBytes {
		return fmt.Errorf("reading the legacy tables of %s: %w", f, overBudget())
	}
	for _, t := range all {
		if err := do(t); err != nil {
			return err
		}
	}
	return nil
}

// clearCounters sets the counters of entries to zero.
func clearCounters(f ruleset.Family, entries []byte) {
	counters := 96
	if f == ruleset.IPv6 {
		counters = 152
	}
	const size = 16 // struct xt_counters
	for entry := range split(f, entries) {
		if len(entry) >= counters+size {
			clear(entry[counters : counters+size])
		}
	}
}

// LegacyRules returns the legacy tables of the family that may affect a packet: tables with rules or with a policy DROP.
func LegacyRules(f ruleset.Family) (filled []string, err error) {
	err = eachLegacy(f, func(t legacyTable) error {
		const end = 1 // the entry after the last chain
		acts := int(t.info.entries) > bits.OnesCount32(t.info.validHooks)+end
		if !acts {
			entries, failed := t.read()
			if failed != nil {
				return failed
			}
			acts = drops(f, entries[getEntriesHead:])
		}
		if acts {
			filled = append(filled, t.name)
		}
		return nil
	})
	return filled, err
}

// drops reports whether a table without rules has a policy DROP: a struct xt_standard_target whose verdict is -NF_DROP-1.
func drops(f ruleset.Family, entries []byte) bool {
	const nameAt, verdictAt = 2, 32
	for entry := range split(f, entries) {
		target := int(binary.NativeEndian.Uint16(entry[nextOffset(f)-2:]))
		if len(entry) >= target+verdictAt+4 && entry[target+nameAt] == 0 && binary.NativeEndian.Uint32(entry[target+verdictAt:]) == 1<<32-1 {
			return true
		}
	}
	return false
}

// nextOffset is the position of next_offset, after target_offset, in struct ipt_entry (linux/netfilter_ipv4/ip_tables.h) and
// ip6t_entry (linux/netfilter_ipv6/ip6_tables.h).
func nextOffset(f ruleset.Family) int {
	if f == ruleset.IPv6 {
		return 142
	}
	return 90
}

// split yields the entries of a table.
func split(f ruleset.Family, entries []byte) iter.Seq[[]byte] {
	next := nextOffset(f)
	return func(yield func([]byte) bool) {
		for len(entries) > next+2 {
			length := int(binary.NativeEndian.Uint16(entries[next:]))
			if length <= next || length > len(entries) || !yield(entries[:length]) {
				return
			}
			entries = entries[length:]
		}
	}
}

// checkRuleCount compares the output of iptables-legacy-save with the kernel's count of rules: names can contain newlines and fake rules.
func checkRuleCount(s ruleset.Set) error {
	return eachLegacy(s.Family, func(t legacyTable) error {
		rules, entries := 0, bits.OnesCount32(t.info.validHooks)+1 // policies, and the entry after the last chain
		for _, c := range s.Table(t.name).Chains {
			if rules += len(c.Rules); c.Policy == ruleset.NoPolicy {
				entries += 2 // the name of the chain, and the return at its end
			}
		}
		if kernel := int(t.info.entries) - entries; rules != kernel {
			return fmt.Errorf("%w: iptables-legacy-save prints %d rules of table %q of %s, and the kernel has %d", ErrUninspectable, rules, t.name, s.Family, kernel)
		}
		return nil
	})
}

// LegacyInUse reports whether the namespace has legacy tables of the family, of the mesh or of other programs.
func LegacyInUse(f ruleset.Family) bool {
	tables, err := legacyTables(f)
	return err == nil && len(tables) > 0
}

// legacyTables returns the names of the family's legacy tables. The kernel lists them for the namespace of the reading
// thread; a kernel without legacy iptables has no list.
func legacyTables(f ruleset.Family) ([]string, error) {
	list := "ip_tables_names"
	if f == ruleset.IPv6 {
		list = "ip6_tables_names"
	}
	names, err := os.ReadFile("/proc/thread-self/net/" + list)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("listing legacy tables of %s: %w", f, err)
	}
	return strings.Fields(string(names)), nil
}

// legacy is a socket for reading the legacy tables of a family.
type legacy struct {
	family    ruleset.Family
	fd, level int
}

func openLegacy(f ruleset.Family) (legacy, error) {
	domain, level := unix.AF_INET, unix.IPPROTO_IP
	if f == ruleset.IPv6 {
		domain, level = unix.AF_INET6, unix.IPPROTO_IPV6
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return legacy{}, fmt.Errorf("opening a socket for the legacy tables of %s: %w", f, err)
	}
	return legacy{f, fd, level}, nil
}

func (l legacy) info(table string) (getInfo, error) {
	var info getInfo
	copy(info.name[:tableNameLen-1], table)
	err := getsockopt(l.fd, l.level, soGetInfo, unsafe.Pointer(&info), uint32(unsafe.Sizeof(info))) //nolint:gosec // a struct of the kernel
	if err != nil {
		err = fmt.Errorf("querying the size of legacy table %q of %s: %w", table, l.family, err)
	}
	return info, err
}

func (l legacy) entries(table string, size uint32) ([]byte, error) {
	buffer := make([]byte, getEntriesHead+int(size))
	copy(buffer[:tableNameLen-1], table)
	binary.NativeEndian.PutUint32(buffer[tableNameLen:], size)
	err := getsockopt(l.fd, l.level, soGetEntries, unsafe.Pointer(&buffer[0]), uint32(len(buffer))) //nolint:gosec // the kernel's size
	if errors.Is(err, unix.EAGAIN) {                                                                // the table has changed its size
		err = ErrChanged
	}
	if err != nil {
		return nil, fmt.Errorf("reading legacy table %q of %s: %w", table, l.family, err)
	}
	return buffer, nil
}

func getsockopt(fd, level, option int, value unsafe.Pointer, size uint32) error {
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option), uintptr(value),
		uintptr(unsafe.Pointer(&size)), 0) //nolint:gosec // the types of getsockopt(2)
	runtime.KeepAlive(value)
	if errno != 0 {
		return errno
	}
	return nil
}
