package scale

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

const (
	// pluginDir is where agents install their plugins.
	pluginDir = "/opt/cni/bin"
	// meteredPlugins is where containerd looks for plugins, with command metered in the place of istio-cni: an agent would replace
	// another program in its own directory, and the kernel's accounting has a resolution of 10 ms (acct(5)). The program in
	// between costs each call a process start, in any kind alike.
	meteredPlugins = "/opt/cni/metered"
	meteredLog     = "/run/metered"
)

// meter puts command metered in the place of the plugin.
func (s *scenario) meter() {
	s.Helper()
	s.Plugin("istio-cni", s.Metered)
	s.OnNode("touch", meteredLog)
}

// usage is CPU time, and calls of the plugin.
type usage struct {
	// node is the CPU time of all processes of the node and of the control plane, which runs there too; agent is the agent's.
	node, agent time.Duration
	// resident is the agent's memory now, own the part of it that is not pages of files.
	resident, own int64 // KiB
	// plugin is the CPU time of the plugin's ADDs with the programs that they start, call their duration, calls their number.
	plugin, call time.Duration
	calls        int
}

// minus is the usage since before, with the memory of now.
func (u usage) minus(before usage) usage {
	return usage{
		node: u.node - before.node, agent: u.agent - before.agent, resident: u.resident, own: u.own,
		plugin: u.plugin - before.plugin, call: u.call - before.call, calls: u.calls - before.calls,
	}
}

// usage reads the usage since the start of the node, and the agent's usage since its own start.
func (s *scenario) usage() (u usage) {
	s.Helper()
	const cgroups = "cat /sys/fs/cgroup/cpuacct/cpuacct.usage 2>/dev/null || sed -n 's/^usage_usec \\(.*\\)/\\1000/p' /sys/fs/cgroup/cpu.stat"
	nanoseconds, err := strconv.ParseInt(strings.TrimSpace(s.OnNode("sh", "-c", cgroups)), 10, 64)
	s.Must(err)
	u.node = time.Duration(nanoseconds)
	// A process may end between the listing and the reading.
	for line := range strings.Lines(s.OnNode("sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null; true")) {
		u.agent += agentTime(line)
	}
	const memory = `for p in $(grep -slx install-cni /proc/[0-9]*/comm); do sed -n 's/^\(VmRSS\|RssAnon\):/\1/p' "${p%comm}status" 2>/dev/null; done; true`
	for line := range strings.Lines(s.OnNode("sh", "-c", memory)) {
		var name string
		var kib int64
		if _, err := fmt.Sscan(line, &name, &kib); err != nil {
			s.Fatalf("/proc/PID/status: %q: %v", line, err)
		}
		if name == "VmRSS" {
			u.resident += kib
		} else {
			u.own += kib
		}
	}
	for line := range strings.Lines(s.OnNode("cat", meteredLog)) {
		var command string
		var cpu, took int64
		if _, err := fmt.Sscan(line, &command, &cpu, &took); err != nil {
			s.Fatalf("%s: %q: %v", meteredLog, line, err)
		}
		if command == "ADD" {
			u.plugin += time.Duration(cpu) * time.Microsecond
			u.call += time.Duration(took) * time.Microsecond
			u.calls++
		}
	}
	return u
}

// agentTime is the CPU time in a line of /proc/PID/stat (proc_pid_stat(5)) if the process is an agent.
func agentTime(line string) time.Duration {
	const utime, stime = 11, 12    // behind the name
	const tick = time.Second / 100 // USER_HZ
	_, rest, found := strings.Cut(line, "(install-cni) ")
	fields := strings.Fields(rest)
	if !found || len(fields) <= stime {
		return 0
	}
	user, _ := strconv.ParseInt(fields[utime], 10, 64) // the kernel writes numbers
	system, _ := strconv.ParseInt(fields[stime], 10, 64)
	return time.Duration(user+system) * tick
}
