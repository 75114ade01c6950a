package route

import (
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// Loopback returns the name of the loopback device of the calling thread's namespace, which root in the namespace can change. No other
// device has IFF_LOOPBACK, and each namespace has one.
func Loopback() (string, error) { return LinkName(loopback) }

// LinkName returns the name of an interface. It asks by ioctl (netdevice(7)): a request of rtnetlink would wait for the RTNL mutex.
func LinkName(index uint32) (string, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("reading the name of interface %d: %w", index, err)
	}
	defer unix.Close(fd) //nolint:errcheck // only read from
	request, err := unix.NewIfreq("")
	if err == nil {
		request.SetUint32(index)
		err = unix.IoctlIfreq(fd, unix.SIOCGIFNAME, request)
	}
	if err != nil {
		return "", fmt.Errorf("reading the name of interface %d: %w", index, err)
	}
	return request.Name(), nil
}

// checkLoopback holds the name to which the rules for loopback traffic refer.
func checkLoopback() ([]string, error) {
	const name = "lo"
	found, err := Loopback()
	if err != nil || found == name {
		return nil, err
	}
	return []string{"interface lo is not the loopback device (that is " + printable.Text(found, 100) + ")"}, nil
}

// Links returns the names of the interfaces that are up, without the loopback device. It reads procfs and asks by ioctl: a list by
// rtnetlink would wait for the RTNL mutex.
func Links() (names []string, err error) {
	text, err := os.ReadFile("/proc/thread-self/net/dev")
	if err != nil {
		return nil, fmt.Errorf("listing the interfaces: %w", err)
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("listing the interfaces: %w", err)
	}
	defer unix.Close(fd) //nolint:errcheck // only read from
	for line := range strings.Lines(string(text)) {
		name, _, is := strings.Cut(strings.TrimSpace(line), ":")
		request, err := unix.NewIfreq(name)
		if !is || err != nil { // the heading
			continue
		}
		err = unix.IoctlIfreq(fd, unix.SIOCGIFFLAGS, request)
		if flags := request.Uint16(); err == nil && flags&unix.IFF_UP != 0 && flags&unix.IFF_LOOPBACK == 0 {
			names = append(names, name)
		}
	}
	return names, nil
}
