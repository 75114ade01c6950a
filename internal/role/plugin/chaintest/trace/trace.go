// Package trace runs a program and records the system calls of it and all its descendants, so that a test can count them
// without relying on the program's own output.
//
// It promises to see every call of every thread and of every process, from the first instruction to the last exit, through
// ptrace(2), with the arguments that the kernel received. It never changes a call, and never waits for, or reaps, a child of
// the test that it did not start.
//
// Start reading at Run, then Messages for the netlink messages to the kernel.
package trace

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Call is one system call.
type Call struct {
	// Process is the id of the process, regardless of the calling thread.
	Process int
	Number  uint64
	Args    [6]uint64
	// Result is the result, a negated errno after an error; calls that did not return have no result.
	Result int64
	// Path is the file of the call, or the socket's file of a connect or bind; "@name" is an abstract one.
	Path string
	// Socket is the socket of the call, nil for any other file.
	Socket *Socket
	// Sent is the data of sendto or sendmsg.
	Sent []byte
}

// Socket is a socket that the program created.
type Socket struct{ Domain, Protocol int }

// Record is the trace of a run.
type Record struct {
	Calls []Call
	// Processes counts the processes besides the first, Programs names the executed programs of all processes.
	Processes int
	Programs  []string
	Status    unix.WaitStatus
	// Memory is the largest VmHWM of any of the processes, in kB.
	Memory int
}

// Run starts a command, waits for the end of the command and of all its descendants, and returns their trace. It also calls the
// command's own Wait. A failure of the command is not an error: see Record.Status.
func Run(cmd *exec.Cmd) (*Record, error) {
	runtime.LockOSThread()         //nolint:forbidigo // ptrace(2): a tracer is a thread
	defer runtime.UnlockOSThread() //nolint:forbidigo // see above
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	// A separate process group lets wait4 skip other children of the test.
	cmd.SysProcAttr.Ptrace, cmd.SysProcAttr.Setpgid = true, true
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	t := &tracer{
		first: cmd.Process.Pid, record: &Record{}, threads: map[int]*thread{}, sockets: map[descriptor]Socket{},
	}
	err := t.follow()
	if err != nil {
		_ = unix.Kill(-t.first, unix.SIGKILL)
		var status unix.WaitStatus
		for gone := error(nil); gone == nil; { // it is not a zombie as long as one of its threads is ours
			_, gone = wait(-t.first, &status)
		}
	}
	// follow has waited for the process, so Wait may report ECHILD. After Wait, the output is complete.
	if waited := cmd.Wait(); waited != nil && !errors.Is(waited, unix.ECHILD) && err == nil {
		err = waited
	}
	return t.record, err
}

type tracer struct {
	first   int
	record  *Record
	threads map[int]*thread
	sockets map[descriptor]Socket
}

// thread is a thread of a traced process.
type thread struct {
	process int
	// call is the thread's current call.
	call *Call
}

type descriptor struct{ process, fd int }

const options = unix.PTRACE_O_TRACESYSGOOD | unix.PTRACE_O_TRACECLONE | unix.PTRACE_O_TRACEFORK | unix.PTRACE_O_TRACEVFORK |
	unix.PTRACE_O_TRACEEXEC | unix.PTRACE_O_EXITKILL

// follow traces until the process group is empty.
func (t *tracer) follow() error {
	var status unix.WaitStatus
	if _, err := wait(t.first, &status); err != nil {
		return fmt.Errorf("waiting for the program to start: %w", err)
	}
	if !status.Stopped() {
		return fmt.Errorf("the program ended before it could be traced: %v", status)
	}
	if err := unix.PtraceSetOptions(t.first, options); err != nil {
		return fmt.Errorf("tracing: %w", err)
	}
	t.threads[t.first] = &thread{process: t.first}
	t.record.Programs = append(t.record.Programs, executable(t.first))
	if err := resume(t.first, 0); err != nil {
		return err
	}
	for {
		id, err := wait(-t.first, &status)
		switch {
		case errors.Is(err, unix.ECHILD):
			return nil
		case err != nil:
			return fmt.Errorf("waiting: %w", err)
		case !status.Stopped():
			t.ended(id, status)
			continue
		}
		signal, err := t.stopped(id, status)
		// Another thread's exit_group, or a signal, can still end a stopped thread.
		if err != nil && !errors.Is(err, unix.ESRCH) && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		if err := resume(id, signal); err != nil {
			return err
		}
	}
}

// resume continues a thread up to its next system call. For a thread that was killed meanwhile, wait reports the end.
func resume(id, signal int) error {
	if err := unix.PtraceSyscall(id, signal); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("letting thread %d go on: %w", id, err)
	}
	return nil
}

// wait waits for all threads of a process or, with a negative number, of a process group.
func wait(id int, status *unix.WaitStatus) (int, error) {
	for {
		got, err := unix.Wait4(id, status, unix.WALL, nil)
		if !errors.Is(err, unix.EINTR) {
			return got, err
		}
	}
}

func (t *tracer) ended(id int, status unix.WaitStatus) {
	if th := t.threads[id]; th != nil && th.call != nil { // as exit_group
		t.record.Calls = append(t.record.Calls, *th.call)
	}
	if id == t.first {
		t.record.Status = status
	}
	delete(t.threads, id)
}

// stopped handles a stop of a thread and returns the signal with which the thread continues.
func (t *tracer) stopped(id int, status unix.WaitStatus) (signal int, err error) {
	th := t.threads[id]
	if th == nil {
		// A new thread stops before it begins. Its process is read at its first call: the event of its parent may come later.
		t.threads[id] = &thread{}
		return 0, nil
	}
	if th.process == 0 {
		if th.process, err = statusOf(id, "Tgid:"); err != nil {
			return 0, err
		}
	}
	switch stop := status.StopSignal(); {
	case stop == unix.SIGTRAP|0x80:
		return 0, t.syscall(id, th)
	case stop == unix.SIGTRAP && status.TrapCause() > 0:
		return 0, t.event(id, status.TrapCause())
	default:
		return int(stop), nil
	}
}

// event records new processes and programs.
func (t *tracer) event(id, cause int) error {
	switch cause {
	case unix.PTRACE_EVENT_EXEC:
		t.record.Programs = append(t.record.Programs, executable(id))
	case unix.PTRACE_EVENT_CLONE, unix.PTRACE_EVENT_FORK, unix.PTRACE_EVENT_VFORK:
		made, err := unix.PtraceGetEventMsg(id)
		if err != nil {
			return fmt.Errorf("asking what thread %d made: %w", id, err)
		}
		process, err := statusOf(int(made), "Tgid:")
		if err != nil {
			return err
		}
		if process == int(made) {
			t.record.Processes++
		}
	}
	return nil
}

func executable(id int) string {
	name, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", id))
	if err != nil {
		return err.Error()
	}
	return name
}

// statusOf returns a numeric field of /proc/ID/status.
func statusOf(id int, field string) (int, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", id))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if value, found := strings.CutPrefix(line, field); found {
			var number int
			_, err := fmt.Sscan(value, &number)
			return number, err
		}
	}
	return 0, fmt.Errorf("thread %d has no %s", id, field)
}

// info is struct ptrace_syscall_info of linux/ptrace.h, since Linux 5.3.
type info struct {
	op      uint8
	_       [3]uint8
	_       uint32
	_, _    uint64
	numbers [8]uint64 // of an entry: the call and its arguments; of an exit: the result
}

// syscall records the beginning or end of a call.
func (t *tracer) syscall(id int, th *thread) error {
	var got info
	_, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_GET_SYSCALL_INFO, uintptr(id), unsafe.Sizeof(got),
		uintptr(unsafe.Pointer(&got)), 0, 0) //nolint:gosec // the call has no wrapper, and takes the size as an argument
	if errno != 0 {
		return fmt.Errorf("asking for the system call of thread %d: %w", id, errno)
	}
	switch got.op {
	case unix.PTRACE_SYSCALL_INFO_ENTRY:
		th.call = &Call{Process: th.process, Number: got.numbers[0]}
		copy(th.call.Args[:], got.numbers[1:7])
		t.begin(id, th.call)
	case unix.PTRACE_SYSCALL_INFO_EXIT:
		if th.call == nil { // the clone that created it, or an execve before the trace
			return nil
		}
		th.call.Result = int64(got.numbers[0]) //nolint:gosec // it is signed
		t.end(th.call)
		t.record.Calls = append(t.record.Calls, *th.call)
		th.call = nil
	}
	return nil
}

// The path arguments by call, for the calls that every architecture has and that Go and glibc use.
func paths(number uint64) []int {
	switch number {
	case unix.SYS_OPENAT, unix.SYS_OPENAT2, unix.SYS_NEWFSTATAT, unix.SYS_STATX, unix.SYS_FACCESSAT, unix.SYS_FACCESSAT2,
		unix.SYS_READLINKAT, unix.SYS_UNLINKAT, unix.SYS_MKDIRAT, unix.SYS_MKNODAT, unix.SYS_FCHMODAT, unix.SYS_FCHMODAT2,
		unix.SYS_FCHOWNAT, unix.SYS_UTIMENSAT, unix.SYS_NAME_TO_HANDLE_AT, unix.SYS_INOTIFY_ADD_WATCH, unix.SYS_OPEN_TREE,
		unix.SYS_EXECVEAT:
		return []int{1}
	case unix.SYS_RENAMEAT, unix.SYS_RENAMEAT2, unix.SYS_LINKAT, unix.SYS_MOVE_MOUNT:
		return []int{1, 3}
	case unix.SYS_SYMLINKAT:
		return []int{0, 2}
	case unix.SYS_MOUNT, unix.SYS_PIVOT_ROOT:
		return []int{0, 1}
	case unix.SYS_EXECVE, unix.SYS_CHDIR, unix.SYS_CHROOT, unix.SYS_STATFS, unix.SYS_TRUNCATE, unix.SYS_UMOUNT2:
		return []int{0}
	default:
		return nil
	}
}

func (t *tracer) begin(id int, c *Call) {
	if s, found := t.sockets[descriptor{c.Process, int(c.Args[0])}]; found { //nolint:gosec // of a call on a file
		c.Socket = &s
	}
	var names []string
	for _, i := range paths(c.Number) {
		names = append(names, text(id, c.Args[i]))
	}
	switch c.Number {
	case unix.SYS_EXIT_GROUP:
		if peak, err := statusOf(id, "VmHWM:"); err == nil {
			t.record.Memory = max(t.record.Memory, peak)
		}
	case unix.SYS_CONNECT, unix.SYS_BIND:
		names = append(names, address(memory(id, c.Args[1], c.Args[2])))
	case unix.SYS_SENDTO:
		c.Sent = memory(id, c.Args[1], c.Args[2])
		if c.Args[4] != 0 {
			names = append(names, address(memory(id, c.Args[4], c.Args[5])))
		}
	case unix.SYS_SENDMSG:
		// struct msghdr: name, its length, vector, its length; all of 8 bytes with padding.
		if m := memory(id, c.Args[1], 32); len(m) == 32 {
			c.Sent = vector(id, binary.NativeEndian.Uint64(m[16:]), binary.NativeEndian.Uint64(m[24:]))
		}
	}
	c.Path = strings.Join(names, " ")
}

func (t *tracer) end(c *Call) {
	at := descriptor{c.Process, int(c.Result)}
	switch {
	case c.Result < 0:
	case c.Number == unix.SYS_SOCKET:
		t.sockets[at] = Socket{Domain: int(c.Args[0]), Protocol: int(c.Args[2])} //nolint:gosec // small numbers
		s := t.sockets[at]
		c.Socket = &s
	case c.Number == unix.SYS_CLOSE:
		delete(t.sockets, descriptor{c.Process, int(c.Args[0])}) //nolint:gosec // a file
	case c.Number == unix.SYS_DUP || c.Number == unix.SYS_DUP3 || c.Number == unix.SYS_FCNTL && c.Args[1] == unix.F_DUPFD_CLOEXEC:
		if c.Socket != nil {
			t.sockets[at] = *c.Socket
		}
	}
}

// memory returns the readable bytes at an address of a process, up to a size.
func memory(id int, at, size uint64) []byte {
	file, err := os.Open(fmt.Sprintf("/proc/%d/mem", id))
	if err != nil {
		return nil
	}
	defer file.Close()                         //nolint:errcheck // only read from
	content := make([]byte, min(size, 16<<20)) // a larger size is invalid
	n, _ := file.ReadAt(content, int64(at))    //nolint:gosec // an address in a process
	return content[:n]
}

func text(id int, at uint64) string {
	name, _, _ := bytes.Cut(memory(id, at, unix.PathMax), []byte{0})
	return string(name)
}

// vector returns the data of an array of struct iovec.
func vector(id int, at, count uint64) []byte {
	all := memory(id, at, 16*count)
	var content []byte
	for part := range slices.Chunk(all, 16) {
		if len(part) == 16 {
			content = append(content, memory(id, binary.NativeEndian.Uint64(part), binary.NativeEndian.Uint64(part[8:]))...)
		}
	}
	return content
}

// address returns the file of a unix socket's address, or the number of another family.
func address(a []byte) string {
	if len(a) < 2 {
		return ""
	}
	family := binary.NativeEndian.Uint16(a)
	if family != unix.AF_UNIX {
		return fmt.Sprintf("family %d", family)
	}
	name := a[2:]
	if len(name) > 0 && name[0] == 0 {
		return "@" + string(name[1:])
	}
	name, _, _ = bytes.Cut(name, []byte{0})
	return string(name)
}

// Message is a message to the kernel by netlink(7).
type Message struct {
	// Protocol is the socket's: NETLINK_NETFILTER, NETLINK_ROUTE.
	Protocol    int
	Type, Flags uint16
	// Family is the address family: the first byte behind the header in the messages of both protocols.
	Family uint8
}

// Messages returns the netlink messages of a run, grouped by system call.
func (r *Record) Messages(protocol int) [][]Message {
	var all [][]Message
	for _, c := range r.Calls {
		if len(c.Sent) == 0 || c.Socket == nil || c.Socket.Domain != unix.AF_NETLINK || c.Socket.Protocol != protocol {
			continue
		}
		var messages []Message
		sent, _ := syscall.ParseNetlinkMessage(c.Sent)
		for _, m := range sent {
			one := Message{Protocol: protocol, Type: m.Header.Type, Flags: m.Header.Flags}
			if len(m.Data) > 0 {
				one.Family = m.Data[0]
			}
			messages = append(messages, one)
		}
		all = append(all, messages)
	}
	return all
}

// BeginsBatch reports whether the message begins a transaction of netfilter.
func (m Message) BeginsBatch() bool {
	return m.Protocol == unix.NETLINK_NETFILTER && m.Type == unix.NFNL_MSG_BATCH_BEGIN
}

// Removes reports whether the message removes rules, chains, tables or sets of nf_tables, or addresses, routes, policy rules
// or links.
func (m Message) Removes() bool {
	if m.Protocol == unix.NETLINK_ROUTE {
		return m.Type >= unix.RTM_NEWLINK && m.Type&3 == unix.RTM_DELLINK&3
	}
	if m.Protocol != unix.NETLINK_NETFILTER || m.Type>>8 != unix.NFNL_SUBSYS_NFTABLES {
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
	if m.Protocol == unix.NETLINK_ROUTE {
		return m.Type >= unix.RTM_NEWLINK && m.Type&3 != unix.RTM_GETLINK&3
	}
	return m.BeginsBatch() || m.Removes()
}

// Under returns the names of files and sockets below a directory in all system calls of a run.
func (r *Record) Under(dir string) []string {
	var all []string
	for _, c := range r.Calls {
		if strings.Contains(c.Path, dir) {
			all = append(all, c.Path)
		}
	}
	return all
}

// Sockets returns the number of created sockets of a domain: AF_UNIX, AF_INET, AF_NETLINK.
func (r *Record) Sockets(domain int) int {
	count := 0
	for _, c := range r.Calls {
		if c.Number == unix.SYS_SOCKET && c.Result >= 0 && int(c.Args[0]) == domain { //nolint:gosec // a small number
			count++
		}
	}
	return count
}

// Connections returns the addresses of connect calls except netlink: the file of a unix socket, or the number of the family.
func (r *Record) Connections() []string {
	var all []string
	for _, c := range r.Calls {
		if c.Number == unix.SYS_CONNECT {
			all = append(all, c.Path)
		}
	}
	return all
}
