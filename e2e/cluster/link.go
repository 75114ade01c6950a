package cluster

import (
	"context"
	"fmt"
	"net"
	"os/exec"
	"strconv"
	"strings"
)

// address derives the addresses of a cluster from the number of its link. 0 is no address.
type address struct{ number int }

const maxLinks = 200

func (a address) link() string  { return "kube-e2e-" + strconv.Itoa(a.number) }
func (a address) host() string  { return fmt.Sprintf("10.99.%d.1", a.number) }
func (a address) node() string  { return fmt.Sprintf("10.99.%d.2", a.number) }
func (a address) host6() string { return fmt.Sprintf("fd00:99:%x::1", a.number) }
func (a address) node6() string { return fmt.Sprintf("fd00:99:%x::2", a.number) }
func (a address) url() string   { return "https://" + net.JoinHostPort(a.node(), apiPort) }

// nodeIP returns the InternalIP of the node, at which the API server listens too.
func (c *Cluster) nodeIP() string {
	if c.options.Families == IPv6 {
		return c.address.node6()
	}
	return c.address.node()
}

// connect creates a veth pair between the test's network namespace and the cluster's, with the first free name: the
// creation reserves the name.
func (c *Cluster) connect(ctx context.Context) error {
	for number := 1; number <= maxLinks; number++ {
		a := address{number: number}
		err := c.makeLink(ctx, a)
		if err != nil && strings.Contains(err.Error(), "File exists") {
			continue
		}
		if err != nil {
			return err
		}
		c.address = a
		return c.setAddresses(ctx)
	}
	return fmt.Errorf("all links kube-e2e-1 to kube-e2e-%d are in use", maxLinks)
}

// reconnect creates the same link again. The old one may still exist, because open TCP connections keep its network
// namespace for minutes.
func (c *Cluster) reconnect(ctx context.Context) error {
	if err := c.disconnect(); err != nil {
		return err
	}
	if err := c.makeLink(ctx, c.address); err != nil {
		return err
	}
	return c.setAddresses(ctx)
}

func (c *Cluster) makeLink(ctx context.Context, a address) error {
	return finish(exec.CommandContext(ctx, "ip", "link", "add", a.link(), "type", "veth", "peer", "name", "eth0",
		"netns", strconv.Itoa(c.inside.pid)))
}

func (c *Cluster) setAddresses(ctx context.Context) error {
	a := c.address
	outside := [][]string{
		{"ip", "addr", "add", a.host() + "/24", "dev", a.link()},
		{"ip", "link", "set", a.link(), "up"},
	}
	if c.options.Families != IPv4 {
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
		// The address of the Service "kubernetes" is on lo, as there is no kube-proxy: the API server listens on all
		// addresses.
		{"ip", "addr", "add", serviceIP + "/32", "dev", "lo"},
		{"sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward"},
		// Addresses for documentation (RFC 5737) are rejected at once instead of timing out.
		{"ip", "route", "add", "unreachable", "192.0.2.0/24"},
	}
	if c.options.Families != IPv4 {
		inside = append(inside, [][]string{
			{"ip", "addr", "add", a.node6() + "/64", "dev", "eth0", "nodad"},
			{"ip", "-6", "route", "add", "default", "via", a.host6()},
			{"ip", "addr", "add", serviceIP6 + "/128", "dev", "lo", "nodad"},
			{"sh", "-c", "echo 1 >/proc/sys/net/ipv6/conf/all/forwarding"},
			{"ip", "-6", "route", "add", "unreachable", "2001:db8::/32"}, // RFC 3849
		}...)
	}
	for _, line := range inside {
		if err := c.do(ctx, line[0], line[1:]...); err != nil {
			return err
		}
	}
	return nil
}

// disconnect deletes the link if it still exists: the kernel deletes it asynchronously with the network namespace.
func (c *Cluster) disconnect() error {
	if c.address.number == 0 {
		return nil
	}
	name := c.address.link()
	if _, err := net.InterfaceByName(name); err != nil {
		return nil //nolint:nilerr // it is gone
	}
	command := exec.CommandContext(context.Background(), "ip", "link", "del", name)
	if err := finish(command); err != nil && !strings.Contains(err.Error(), "Cannot find device") {
		return err
	}
	return nil
}
