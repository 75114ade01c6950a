package iptables

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
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

// ErrChanged says that a legacy table changed while it was read.
var ErrChanged = errors.New("the legacy table was changed meanwhile")

// LegacyMesh reports whether the legacy tables of the current namespace hold chains of the mesh, without a tool: those
// are found by the names that the entries carry, so no entry has to be understood.
func LegacyMesh(f ruleset.Family) (bool, error) {
	tables, err := legacyTables(f)
	if err != nil {
		return false, err
	}
	for _, table := range tables {
		entries, err := legacyEntries(f, table)
		if err != nil {
			return false, fmt.Errorf("reading legacy table %q of %s: %w", table, f, err)
		}
		if bytes.Contains(entries, []byte("ISTIO_")) {
			return true, nil
		}
	}
	return false, nil
}

// LegacyInUse reports whether the namespace has legacy tables of the family, whoever's they are.
func LegacyInUse(f ruleset.Family) bool {
	tables, err := legacyTables(f)
	return err == nil && len(tables) > 0
}

// legacyTables gives the names of the family's legacy tables. The kernel lists them for the namespace of the reading
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

func legacyEntries(f ruleset.Family, table string) ([]byte, error) {
	domain, level := unix.AF_INET, unix.IPPROTO_IP
	if f == ruleset.IPv6 {
		domain, level = unix.AF_INET6, unix.IPPROTO_IPV6
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd) //nolint:errcheck // nothing was written
	var info getInfo
	copy(info.name[:tableNameLen-1], table)
	if err := getsockopt(fd, level, soGetInfo, unsafe.Pointer(&info), uint32(unsafe.Sizeof(info))); err != nil { //nolint:gosec // a struct of the kernel
		return nil, err
	}
	buffer := make([]byte, getEntriesHead+int(info.size))
	copy(buffer[:tableNameLen-1], table)
	binary.NativeEndian.PutUint32(buffer[tableNameLen:], info.size)
	err = getsockopt(fd, level, soGetEntries, unsafe.Pointer(&buffer[0]), uint32(len(buffer))) //nolint:gosec // the kernel's own size
	if errors.Is(err, unix.EAGAIN) {
		return nil, ErrChanged // the table has another size by now
	}
	return buffer, err
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
