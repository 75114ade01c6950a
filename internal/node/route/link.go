package route

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// Loopback returns the name of the loopback device of the calling thread's namespace. Root in the namespace can change the name. Each
// namespace has exactly one device with IFF_LOOPBACK.
func Loopback() (string, error) { return LinkName(loopback) }

// LinkName returns the name of an interface. It uses an ioctl (netdevice(7)) because rtnetlink would wait for the RTNL mutex.
func LinkName(index uint32) (string, error) {
	request, err := unix.NewIfreq("")
	if err == nil {
		request.SetUint32(index)
		err = ioctl(unix.SIOCGIFNAME, request)
	}
	if err != nil {
		return "", fmt.Errorf("reading the name of interface %d: %w", index, err)
	}
	return request.Name(), nil
}

// ioctl sends a request about an interface. The kernel writes the response into it.
func ioctl(number uint, request *unix.Ifreq) error {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd) //nolint:errcheck // only read from
	return unix.IoctlIfreq(fd, number, request)
}

// checkLoopback checks that the loopback device is named lo, as in the rules for loopback traffic.
func checkLoopback() ([]string, error) {
	const name = "lo"
	found, err := Loopback()
	if err != nil || found == name {
		return nil, err
	}
	return []string{"interface lo is not the loopback device (that is " + printable.Text(found, 100) + ")"}, nil
}

// Links returns the names of the interfaces that are up, without the loopback device. It uses procfs and an ioctl because rtnetlink
// would wait for the RTNL mutex.
func Links() (names []string, err error) {
	text, err := os.ReadFile("/proc/thread-self/net/dev")
	if err != nil {
		return nil, fmt.Errorf("listing the interfaces: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		name, _, is := strings.Cut(strings.TrimSpace(line), ":")
		request, err := unix.NewIfreq(name)
		if !is || err != nil { // the heading
			continue
		}
		err = ioctl(unix.SIOCGIFFLAGS, request)
		switch flags := request.Uint16(); {
		case errors.Is(err, unix.ENODEV): // the interface is gone
		case err != nil:
			return nil, fmt.Errorf("listing the interfaces: %w", err)
		case flags&unix.IFF_UP != 0 && flags&unix.IFF_LOOPBACK == 0:
			names = append(names, name)
		}
	}
	return names, nil
}
