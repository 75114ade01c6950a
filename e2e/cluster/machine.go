package cluster

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Machine is one machine of a cluster: namespaces with a first process, a directory, and a link to the test. The first one
// runs the control plane. In tier Node each is a node.
type Machine struct {
	cluster *Cluster
	name    string
	// number is 0 for the first machine.
	number  int
	run     directory
	address address
	inside  *initProcess
	// images are the archives that are still to be imported.
	images []string

	mu       sync.Mutex
	commands map[Server][]string
}

// newMachine returns a machine of the cluster that does not run yet.
func (c *Cluster) newMachine() (*Machine, error) {
	m := &Machine{cluster: c, name: NodeName, number: len(c.machines), images: c.options.Images, commands: map[Server][]string{}}
	if m.number > 0 {
		m.name += "-" + strconv.Itoa(m.number+1)
	}
	var err error
	if m.run, err = newDirectory(c.options.Dir); err != nil {
		return nil, err
	}
	c.machines = append(c.machines, m)
	return m, nil
}

// Join starts one more machine with containerd and a kubelet, which registers as node e2e-node-N (N from 2) with the
// options of the first. It does not wait until the node is ready. Only tier Node with IPv4. Not to be called concurrently
// with itself or Stop, which ends this machine too.
func (c *Cluster) Join(ctx context.Context) (*Machine, error) {
	if c.options.Tier != Node || c.options.Families != IPv4 {
		return nil, fmt.Errorf("joining a cluster of tier %q and families %q: it needs tier %q and IPv4", c.options.Tier, c.options.Families, Node)
	}
	began := time.Now()
	m, err := c.newMachine()
	if err != nil {
		return nil, err
	}
	credentials := func(context.Context) error { return c.ca.kubelet(m.run.pki(), m.name, m.address, c.address.url()) }
	for _, step := range []func(context.Context) error{m.startInit, m.connect, credentials, m.configureNode, m.startNode} {
		if err := step(ctx); err != nil {
			return nil, fmt.Errorf("starting %s: %w", m.name, err)
		}
	}
	c.logf("the kubelet of %s started after %s", m.name, time.Since(began).Round(10*time.Millisecond))
	return m, nil
}

// On returns the machine with the name of a node, nil if there is none.
func (c *Cluster) On(node string) *Machine {
	for _, m := range c.machines {
		if m.name == node {
			return m
		}
	}
	return nil
}

// Machines returns all machines, the first one first.
func (c *Cluster) Machines() []*Machine { return c.machines }

// Node returns the name of the machine's node.
func (m *Machine) Node() string { return m.name }

// Runs reports whether the machine has power.
func (m *Machine) Runs() bool { return m.inside.runs() }

// PowerOff kills all processes at once, as a power failure does. The files of the machine remain.
func (m *Machine) PowerOff() error {
	return errors.Join(m.inside.end(), removeCgroups(m.run.cgroups()))
}

// PowerOn starts a machine again that has joined, at the same address and with another boot ID. It does not wait until
// the node is ready.
func (m *Machine) PowerOn(ctx context.Context) error {
	if err := m.boot(ctx); err != nil {
		return err
	}
	return m.startNode(ctx)
}

// boot starts the first process again, with its links.
func (m *Machine) boot(ctx context.Context) error {
	if err := m.startInit(ctx); err != nil {
		return err
	}
	return m.reconnect(ctx)
}

// stop kills all processes and removes what is left of the machine.
func (m *Machine) stop() error {
	var errs []error
	if m.inside != nil {
		errs = append(errs, m.inside.end())
	}
	return errors.Join(append(errs, m.disconnect(), removeCgroups(m.run.cgroups()), m.run.remove())...)
}

// Dir returns the machine's directory, which Stop removes.
func (m *Machine) Dir() string { return string(m.run) }

// Pid returns the process ID of the first process of the PID namespace; the machine ends with it.
func (m *Machine) Pid() int { return m.inside.pid }

// Command returns a command that runs in the namespaces of the machine, as on its node, and is killed with it.
func (m *Machine) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	target := strconv.Itoa(m.inside.pid)
	enter := []string{"--target", target, "--mount", "--net", "--pid", "--uts", "--ipc"}
	if m.cluster.options.Tier == Node {
		enter = append(enter, "--cgroup")
	}
	return exec.CommandContext(ctx, "nsenter", append(append(enter, "--", name), args...)...)
}

// do runs a command in the namespaces of the machine and waits for it.
func (m *Machine) do(ctx context.Context, name string, args ...string) error {
	return finish(m.Command(ctx, name, args...))
}

// each runs commands in the namespaces of the machine, one after the other.
func (m *Machine) each(ctx context.Context, lines ...string) error {
	for _, line := range lines {
		words := strings.Fields(line)
		if err := m.do(ctx, words[0], words[1:]...); err != nil {
			return err
		}
	}
	return nil
}
