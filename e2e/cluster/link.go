package cluster

import (
	"context"
	"fmt"
	"net"
	"os/exec"
	"strconv"
	"strings"
)

// address derives the addresses of a machine from the number of its link. 0 is no address.
type address struct{ number int }

const maxLinks = 200

func (a address) link() string  { return "kube-e2e-" + strconv.Itoa(a.number) }
func (a address) host() string  { return fmt.Sprintf("10.99.%d.1", a.number) }
func (a address) node() string  { return fmt.Sprintf("10.99.%d.2", a.number) }
func (a address) host6() string { return fmt.Sprintf("fd00:99:%x::1", a.number) }
func (a address) node6() string { return fmt.Sprintf("fd00:99:%x::2", a.number) }
func (a address) url() string   { return "https://" + net.JoinHostPort(a.node(), apiPort) }

// nodeIP returns the InternalIP of the node, at which the first one's API server listens too.
func (m *Machine) nodeIP() string {
	if m.cluster.options.Families == IPv6 {
		return m.address.node6()
	}
	return m.address.node()
}

// podCIDR returns the IPv4 network of the node's pods.
func (m *Machine) podCIDR() string { return fmt.Sprintf("10.88.%d.0/24", m.number) }

// connect creates a veth pair between the test's network namespace and the machine's, with the first free name: the
// creation reserves the name.
func (m *Machine) connect(ctx context.Context) error {
	for number := 1; number <= maxLinks; number++ {
		a := address{number: number}
		err := m.makeLink(ctx, a)
		if err != nil && strings.Contains(err.Error(), "File exists") {
			continue
		}
		if err != nil {
			return err
		}
		m.address = a
		return m.setAddresses(ctx)
	}
	return fmt.Errorf("all links kube-e2e-1 to kube-e2e-%d are in use", maxLinks)
}

// reconnect creates the same link again. The old one may still exist, because open TCP connections keep its network
// namespace for minutes.
func (m *Machine) reconnect(ctx context.Context) error {
	if err := m.disconnect(); err != nil {
		return err
	}
	if err := m.makeLink(ctx, m.address); err != nil {
		return err
	}
	return m.setAddresses(ctx)
}

func (m *Machine) makeLink(ctx context.Context, a address) error {
	return finish(exec.CommandContext(ctx, "ip", "link", "add", a.link(), "type", "veth", "peer", "name", "eth0",
		"netns", strconv.Itoa(m.inside.pid)))
}

func (m *Machine) setAddresses(ctx context.Context) error {
	a := m.address
	outside := [][]string{
		{"ip", "addr", "add", a.host() + "/24", "dev", a.link()},
		{"ip", "link", "set", a.link(), "up"},
	}
	if m.cluster.options.Families != IPv4 {
		outside = append(outside, []string{"ip", "addr", "add", a.host6() + "/64", "dev", a.link(), "nodad"})
	}
	for _, line := range outside {
		if err := finish(exec.CommandContext(ctx, line[0], line[1:]...)); err != nil {
			return err
		}
	}
	inside := [][]string{
		{"ip", "link", "set", "lo", "up"},
		{"ip", "addr", "add", a.node() + "/24", "dev", "eth0"},
		{"ip", "link", "set", "eth0", "up"},
		{"ip", "route", "add", "default", "via", a.host()},
		{"sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward"},
		// Addresses for documentation (RFC 5737) are rejected at once instead of timing out.
		{"ip", "route", "add", "unreachable", "192.0.2.0/24"},
	}
	if m.number == 0 {
		// The address of the Service "kubernetes" is on lo because there is no kube-proxy: the API server listens on all
		// addresses.
		inside = append(inside, []string{"ip", "addr", "add", serviceIP + "/32", "dev", "lo"})
	}
	if m.cluster.options.Families != IPv4 {
		inside = append(inside, [][]string{
			{"ip", "addr", "add", a.node6() + "/64", "dev", "eth0", "nodad"},
			{"ip", "-6", "route", "add", "default", "via", a.host6()},
			{"ip", "addr", "add", serviceIP6 + "/128", "dev", "lo", "nodad"},
			{"sh", "-c", "echo 1 >/proc/sys/net/ipv6/conf/all/forwarding"},
			{"ip", "-6", "route", "add", "unreachable", "2001:db8::/32"}, // RFC 3849
		}...)
	}
	for _, line := range inside {
		if err := m.do(ctx, line[0], line[1:]...); err != nil {
			return err
		}
	}
	return m.meet(ctx)
}

// meet links the machine with each other one that runs, by a veth pair: nodes and pods reach each other by their own
// addresses, and those that join reach the Service "kubernetes".
func (m *Machine) meet(ctx context.Context) error {
	for _, other := range m.cluster.machines {
		if other == m || !other.inside.runs() {
			continue
		}
		link, back := "to-"+other.name, "to-"+m.name
		// The link to a machine that has lost power may still exist, see reconnect.
		if err := other.do(ctx, "ip", "link", "del", back); err != nil && !strings.Contains(err.Error(), "Cannot find device") {
			return err
		}
		err := finish(exec.CommandContext(ctx, "ip", "link", "add", "name", link, "netns", strconv.Itoa(m.inside.pid), "type", "veth",
			"peer", "name", back, "netns", strconv.Itoa(other.inside.pid)))
		if err != nil {
			return err
		}
		if err := m.route(ctx, other, link); err != nil {
			return err
		}
		if err := other.route(ctx, m, back); err != nil {
			return err
		}
	}
	return nil
}

// route adds the routes to another machine by a link. Plugin bridge would translate the addresses of pods (ipMasq).
func (m *Machine) route(ctx context.Context, to *Machine, link string) error {
	own, other := m.address.node(), to.address.node()
	lines := []string{
		"ip link set " + link + " up",
		"ip route add " + other + " dev " + link + " src " + own,
		"ip route add " + to.podCIDR() + " via " + other + " dev " + link + " src " + own,
		"iptables -t nat -I POSTROUTING -s " + m.podCIDR() + " -d " + to.podCIDR() + " -j ACCEPT",
	}
	if to.number == 0 {
		lines = append(lines, "ip route add "+serviceIP+" via "+other+" dev "+link+" src "+own)
	}
	return m.each(ctx, lines...)
}

// disconnect deletes the link if it still exists: the kernel deletes it asynchronously with the network namespace.
func (m *Machine) disconnect() error {
	if m.address.number == 0 {
		return nil
	}
	name := m.address.link()
	if _, err := net.InterfaceByName(name); err != nil {
		return nil //nolint:nilerr // it is gone
	}
	command := exec.CommandContext(context.Background(), "ip", "link", "del", name)
	if err := finish(command); err != nil && !strings.Contains(err.Error(), "Cannot find device") {
		return err
	}
	return nil
}
