package ambient

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"os"
	"strconv"
	"strings"
	"time"
)

// process is a process of an agent.
type process struct {
	*node

	pid int
}

// memory is in KiB: of all, and without pages of files.
type memory struct{ resident, own int64 }

// cpu returns the CPU time of the process with the programs that it has started (proc_pid_stat(5)).
func (p process) cpu() (used time.Duration) {
	p.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.pid))
	p.Must(err)
	const utime, cstime = 11, 14   // behind the name
	const tick = time.Second / 100 // USER_HZ
	_, rest, _ := bytes.Cut(text, []byte(") "))
	for _, field := range strings.Fields(string(rest))[utime : cstime+1] {
		n, err := strconv.ParseInt(field, 10, 64)
		p.Must(err)
		used += time.Duration(n) * tick
	}
	return used
}

// files returns the number of open files.
func (p process) files() int {
	p.Helper()
	all, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.pid))
	p.Must(err)
	return len(all)
}

func (p process) memory() (m memory) {
	p.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.pid))
	p.Must(err)
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(line, ":")
		n, _ := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(value), " kB"), 10, 64)
		switch name {
		case "VmRSS":
			m.resident = n
		case "RssAnon":
			m.own = n
		}
	}
	return m
}

// programs returns the names of the programs that the agents and the plugin have started and that have ended, in this order, by the
// accounting of the machine's PID namespace (acct(5), version 3).
func (n *node) programs() (names []string) {
	n.Helper()
	text, err := os.ReadFile(n.file(accountingFile))
	n.Must(err)
	type ended struct {
		pid  uint32
		name string
	}
	const size, pidAt, parentAt, nameAt = 64, 16, 20, 48
	const forked = 1 // AFORK: without a program of its own, as Go's runtime tries what the kernel can do
	var all []ended
	parents, roots := map[uint32]uint32{}, maps.Clone(n.agents)
	for ; len(text) >= size; text = text[size:] {
		if text[0]&forked != 0 {
			continue
		}
		e := ended{binary.NativeEndian.Uint32(text[pidAt:]), string(bytes.TrimRight(text[nameAt:size], "\x00"))}
		all = append(all, e)
		parents[e.pid] = binary.NativeEndian.Uint32(text[parentAt:])
		if parents[e.pid] == 0 && e.name == pluginName { // metered, which nsenter has started
			roots[e.pid] = true
		}
	}
	for _, e := range all {
		pid := parents[e.pid]
		for range len(parents) { // PIDs of ended processes are used again only after some thousands
			if pid == 0 || roots[pid] {
				break
			}
			pid = parents[pid]
		}
		if roots[pid] {
			names = append(names, e.name)
		}
	}
	return names
}
