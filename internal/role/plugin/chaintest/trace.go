package chaintest

import (
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Call is one system call.
type Call struct {
	// Text is the call as strace prints it, such as `openat(AT_FDCWD, "/etc/hosts", O_RDONLY) = 3`.
	Text string
	// Sent is the data of sendto or sendmsg.
	Sent []byte
}

// is reports whether the call has one of the names.
func (c Call) is(names ...string) bool {
	name, _, _ := strings.Cut(c.Text, "(")
	return slices.Contains(names, name)
}

// Record is the trace of a program under strace(1): every call of every thread, of the program and of all its descendants, that names a
// file, uses a socket or starts a process, and the bytes of every message to the kernel. A test can count them without relying on the
// program's own output.
type Record struct {
	// Calls are in the order of their end within a thread, thread by thread.
	Calls []Call
	// Code is the exit code of the program.
	Code int
}

// Trace runs the command and returns its trace. The command may end with any exit code.
func Trace(cmd *exec.Cmd) (*Record, error) {
	dir, err := os.MkdirTemp("", "trace")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a file of the test
	strace, err := exec.LookPath("strace")
	if err != nil {
		return nil, err
	}
	cmd.Args = slices.Concat([]string{
		"strace", "-ff", "-qq", "-o", filepath.Join(dir, "thread"), "-e", "trace=%file,%network,%process", "-e", "signal=none",
		"-e", "write=all", "--", cmd.Path,
	}, cmd.Args[1:])
	cmd.Path, cmd.Err = strace, nil
	if err = cmd.Run(); cmd.ProcessState == nil {
		return nil, err
	}
	record := &Record{Code: cmd.ProcessState.ExitCode()}
	files := os.DirFS(dir)
	threads, err := fs.Glob(files, "thread.*")
	for _, thread := range threads {
		text, unread := fs.ReadFile(files, thread)
		err = errors.Join(err, unread)
		record.read(string(text))
	}
	return record, err
}

// read adds the calls of a thread. The bytes that a call sends follow in lines of 16 with an offset, as in
//
//	sendto(3, "…", 20, 0, NULL, 0) = 20
//	 | 00000  14 00 00 00 10 0a 01 00  00 00 00 00 00 00 00 00  ................ |
func (r *Record) read(text string) {
	for line := range strings.Lines(text) {
		if dump, is := strings.CutPrefix(line, " | "); is {
			const offset, digits = 7, 50
			data, _ := hex.DecodeString(strings.ReplaceAll(dump[offset:offset+digits], " ", ""))
			last := &r.Calls[len(r.Calls)-1]
			last.Sent = append(last.Sent, data...)
		} else if !strings.HasPrefix(line, " ") {
			r.Calls = append(r.Calls, Call{Text: strings.TrimSpace(line)})
		}
	}
}

// Processes counts the processes besides the first.
func (r *Record) Processes() int {
	return r.count(func(c Call) bool {
		return c.is("fork", "vfork", "clone", "clone3") && !strings.Contains(c.Text, "CLONE_THREAD") && !strings.Contains(c.Text, " = -1 ")
	})
}

// Sockets counts the created sockets of a domain, such as AF_UNIX.
func (r *Record) Sockets(domain string) int {
	return r.count(func(c Call) bool {
		return strings.HasPrefix(c.Text, "socket("+domain+",") && !strings.Contains(c.Text, " = -1 ")
	})
}

// Opened counts how often a file was opened.
func (r *Record) Opened(name string) int {
	return r.count(func(c Call) bool { return c.is("openat") && strings.Contains(c.Text, name+`"`) })
}

func (r *Record) count(of func(Call) bool) (n int) {
	for _, c := range r.Calls {
		if of(c) {
			n++
		}
	}
	return n
}

// Under returns the calls that name a file or a socket below a directory. The arguments of a program name none.
func (r *Record) Under(dir string) []string {
	var all []string
	for _, c := range r.Calls {
		if names, _, _ := strings.Cut(c.Text, ", ["); strings.Contains(names, dir) {
			all = append(all, c.Text)
		}
	}
	return all
}

// Message is a message to the kernel by netlink(7).
type Message struct {
	// Netfilter is false for rtnetlink.
	Netfilter   bool
	Type, Flags uint16
	// Family is the address family: the first byte behind the header in the messages of both protocols.
	Family uint8
}

// Messages returns the netlink messages of a run that fit. Those of netfilter have the number of a subsystem in their type, or are
// in one call with such a message.
func (r *Record) Messages(fits func(Message) bool) []Message {
	var all []Message
	for _, c := range r.Calls {
		sent, _ := syscall.ParseNetlinkMessage(c.Sent)
		netfilter := slices.ContainsFunc(sent, func(m syscall.NetlinkMessage) bool { return m.Header.Type>>8 != 0 })
		for _, m := range sent {
			one := Message{Netfilter: netfilter, Type: m.Header.Type, Flags: m.Header.Flags}
			if len(m.Data) > 0 {
				one.Family = m.Data[0]
			}
			if fits(one) {
				all = append(all, one)
			}
		}
	}
	return all
}

// BeginsBatch reports whether the message begins a transaction of netfilter.
func (m Message) BeginsBatch() bool { return m.Netfilter && m.Type == unix.NFNL_MSG_BATCH_BEGIN }

// Removes reports whether the message removes rules, chains, tables or sets of nf_tables, or addresses, routes, policy rules
// or links.
func (m Message) Removes() bool {
	if !m.Netfilter {
		return m.Type >= unix.RTM_NEWLINK && m.Type&3 == unix.RTM_DELLINK&3
	}
	if m.Type>>8 != unix.NFNL_SUBSYS_NFTABLES {
		return false
	}
	switch m.Type & 0xff {
	case unix.NFT_MSG_DELTABLE, unix.NFT_MSG_DELCHAIN, unix.NFT_MSG_DELRULE, unix.NFT_MSG_DELSET, unix.NFT_MSG_DELSETELEM,
		unix.NFT_MSG_DELOBJ, unix.NFT_MSG_DELFLOWTABLE:
		return true
	default: // NFT_MSG_DESTROYTABLE and the others of Linux 6.3
		return m.Type&0xff >= firstDestroy && m.Type&0xff <= lastDestroy
	}
}

const firstDestroy, lastDestroy = 0x1a, 0x20

// Writes reports whether the message changes anything.
func (m Message) Writes() bool {
	if !m.Netfilter {
		return m.Type >= unix.RTM_NEWLINK && m.Type&3 != unix.RTM_GETLINK&3
	}
	return m.BeginsBatch() || m.Removes()
}
