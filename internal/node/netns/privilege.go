package netns

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Lacking returns the capabilities (capabilities(7)) that the calling thread lacks to find the network namespaces of other processes
// (CAP_SYS_PTRACE), to enter them (CAP_SYS_ADMIN) and to read their rules (CAP_NET_ADMIN).
func Lacking() ([]string, error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData // 32 capabilities each
	if err := unix.Capget(&header, &data[0]); err != nil {
		return nil, fmt.Errorf("reading the capabilities of this process: %w", err)
	}
	var all []string
	for _, c := range []struct {
		number int
		name   string
	}{{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN"}, {unix.CAP_NET_ADMIN, "CAP_NET_ADMIN"}, {unix.CAP_SYS_PTRACE, "CAP_SYS_PTRACE"}} {
		if data[c.number/32].Effective&(1<<(c.number%32)) == 0 {
			all = append(all, c.name)
		}
	}
	return all, nil
}
