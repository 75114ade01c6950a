package iptables

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"maps"
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

// ErrChanged is returned if a legacy table changed while it was read.
var ErrChanged = errors.New("the legacy table was changed meanwhile")

// ErrUninspectable is returned if the namespace holds more rules than the bounds: a pod can fill its own.
var ErrUninspectable = nftables.ErrUninspectable

// Bounds of all tables of a family, and of the text that a tool prints of them. A rule takes about 200 bytes.
const (
	maxRules = 50_000
	maxBytes = 32 << 20
)

func overBudget() error {
	return fmt.Errorf("%w: it holds more than %d rules of iptables, or more than %d MiB of them", ErrUninspectable, maxRules, maxBytes>>20)
}

// LegacyHas reports whether the legacy tables of the current namespace hold chains with the prefix, without a tool: it finds
// chains by the names in the entries, so it decodes no entry. It returns ErrUninspectable if the tables of the family exceed
// the bounds, before it reads any of them.
func LegacyHas(f ruleset.Family, prefix string) (found bool, err error) {
	err = eachLegacy(f, func(entries []byte) { found = found || bytes.Contains(entries, []byte(prefix)) })
	return found && err == nil, err
}

// Digest stands for rules: those of two equal ones are equal, whoever wrote them. It is zero without tables.
type Digest [sha256.Size]byte

// LegacyDigest returns the digest of the rules of all legacy tables of the family in the current namespace, without their counters.
// It runs no tool.
func LegacyDigest(f ruleset.Family) (sum Digest, err error) {
	digest, some := sha256.New(), false
	err = eachLegacy(f, func(entries []byte) {
		some = true
		clearCounters(f, entries[getEntriesHead:])
		_, _ = digest.Write(entries)
	})
	if some {
		digest.Sum(sum[:0])
	}
	return sum, err
}

// eachLegacy calls do with the head and the entries of each legacy table, by name.
func eachLegacy(f ruleset.Family, do func(entries []byte)) error {
	return inLegacy(f, func(l legacy, tables []string) error {
		sizes, err := l.sizes(tables)
		for _, table := range slices.Sorted(maps.Keys(sizes)) {
			entries, failed := l.entries(table, sizes[table])
			if failed != nil {
				return failed
			}
			do(entries)
		}
		return err
	})
}

// inLegacy calls do with the names of the legacy tables and a socket, if there are any.
func inLegacy(f ruleset.Family, do func(l legacy, tables []string) error) error {
	tables, err := legacyTables(f)
	if err != nil || len(tables) == 0 {
		return err
	}
	l, err := openLegacy(f)
	if err != nil {
		return err
	}
	defer l.close()
	return do(l, tables)
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

// LegacyRules returns the legacy tables of the family that may do something to a packet: those with rules, or with a policy DROP.
func LegacyRules(f ruleset.Family) (filled []string, err error) {
	err = inLegacy(f, func(l legacy, tables []string) error {
		for _, table := range tables {
			info, failed := l.info(table)
			if failed != nil {
				return failed
			}
			const end = 1 // the entry behind the last chain
			acts := int(info.entries) > bits.OnesCount32(info.validHooks)+end
			if !acts {
				entries, unread := l.entries(table, info.size)
				if unread != nil {
					return unread
				}
				acts = drops(f, entries[getEntriesHead:])
			}
			if acts {
				filled = append(filled, table)
			}
		}
		return nil
	})
	return filled, err
}

// drops reports whether a policy in a table without rules is DROP: a struct xt_standard_target whose verdict is -NF_DROP-1.
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

// nextOffset is the place of next_offset, behind target_offset, in struct ipt_entry (linux/netfilter_ipv4/ip_tables.h) and ip6t_entry
// (linux/netfilter_ipv6/ip6_tables.h).
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

// counted holds a text of iptables-legacy-save to the kernel's number of rules: names in rules can have line ends, and look like rules.
func counted(s ruleset.Set) error {
	l, err := openLegacy(s.Family)
	if err != nil {
		return err
	}
	defer l.close()
	for _, t := range s.Tables {
		info, err := l.info(t.Name)
		if err != nil {
			return err
		}
		rules, entries := 0, bits.OnesCount32(info.validHooks)+1 // policies, and the entry behind the last chain
		for _, c := range t.Chains {
			if rules += len(c.Rules); c.Policy == ruleset.NoPolicy {
				entries += 2 // its name, and the return at its end
			}
		}
		if kernel := int(info.entries) - entries; rules != kernel {
			return fmt.Errorf("%w: iptables-legacy-save prints %d rules of table %q of %s, and the kernel has %d", ErrUninspectable, rules, t.Name, s.Family, kernel)
		}
	}
	return nil
}

// LegacyInUse reports whether the namespace has legacy tables of the family, the mesh's or not.
func LegacyInUse(f ruleset.Family) bool {
	tables, err := legacyTables(f)
	return err == nil && len(tables) > 0
}

// legacyTables returns the names of the family's legacy tables. The kernel lists them for the namespace of the reading
// thread; the list is absent if it was built without legacy iptables.
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

// legacy is a socket by which the legacy tables of a family are read.
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

func (l legacy) close() { _ = unix.Close(l.fd) } // nothing was written

func (l legacy) info(table string) (getInfo, error) {
	var info getInfo
	copy(info.name[:tableNameLen-1], table)
	err := getsockopt(l.fd, l.level, soGetInfo, unsafe.Pointer(&info), uint32(unsafe.Sizeof(info))) //nolint:gosec // a struct of the kernel
	if err != nil {
		err = fmt.Errorf("querying the size of legacy table %q of %s: %w", table, l.family, err)
	}
	return info, err
}

// sizes returns how many bytes each table has, or ErrUninspectable if all together exceed the bounds.
func (l legacy) sizes(tables []string) (map[string]uint32, error) {
	sizes := map[string]uint32{}
	rules, total := 0, 0
	for _, table := range tables {
		info, err := l.info(table)
		if err != nil {
			return nil, err
		}
		sizes[table] = info.size
		rules, total = rules+int(info.entries), total+int(info.size)
	}
	if rules > maxRules || total > maxBytes {
		return nil, fmt.Errorf("reading the legacy tables of %s: %w", l.family, overBudget())
	}
	return sizes, nil
}

func (l legacy) entries(table string, size uint32) ([]byte, error) {
	buffer := make([]byte, getEntriesHead+int(size))
	copy(buffer[:tableNameLen-1], table)
	binary.NativeEndian.PutUint32(buffer[tableNameLen:], size)
	err := getsockopt(l.fd, l.level, soGetEntries, unsafe.Pointer(&buffer[0]), uint32(len(buffer))) //nolint:gosec // the kernel's own size
	if errors.Is(err, unix.EAGAIN) {                                                                // the table has another size by now
		err = ErrChanged
	}
	if err != nil {
		return nil, fmt.Errorf("reading legacy table %q of %s: %w", table, l.family, err)
	}
	return buffer, nil
}

func getsockopt(fd, level, option int, value unsafe.Pointer, size uint32) error {
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option), uintptr(value),
		uintptr(unsafe.Pointer(&size)), 0) //nolint:gosec // as getsockopt(2) wants it
	runtime.KeepAlive(value)
	if errno != 0 {
		return errno
	}
	return nil
}
