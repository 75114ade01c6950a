package route

import (
	"fmt"
	"net"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// Loopback returns the name of the loopback device of the calling thread's namespace, which root in the namespace can change. No other
// device has IFF_LOOPBACK, and each namespace has one.
func Loopback() (string, error) { return linkName(loopback) }

// linkName returns the name of an interface. It asks by ioctl (netdevice(7)): a request of rtnetlink would wait for the RTNL mutex.
func linkName(index uint32) (string, error) {
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

// Links returns the names of the interfaces that are up, without the loopback device.
func Links() ([]string, error) {
	all, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("listing the interfaces: %w", err)
	}
	var names []string
	for _, l := range all {
		if l.Flags&net.FlagLoopback == 0 && l.Flags&net.FlagUp != 0 {
			names = append(names, l.Name)
		}
	}
	return names, nil
}
