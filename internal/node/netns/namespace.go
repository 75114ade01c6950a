package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync/atomic"
	"syscall"

	vishnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Namespace is a network namespace that a file descriptor keeps open, so that it exists until Close. It stays the same
// namespace even if its path changes: checks and later work are on the same namespace. Several goroutines may use it.
type Namespace struct {
	fd      atomic.Int64
	inode   Inode
	name    string // for messages
	current bool
	// thread is the ID of a thread that runs a function of Do, or 0.
	thread atomic.Int64
}

// Inode identifies a namespace while it exists: the kernel reuses the number later. Ino alone may repeat on another
// device.
type Inode struct{ Dev, Ino uint64 }

// String returns the text of procfs's links, such as "net:[4026532281]".
func (i Inode) String() string { return fmt.Sprintf("net:[%d]", i.Ino) }

// ErrNotNetwork means that a path leads to a file that is not a network namespace.
var ErrNotNetwork = errors.New("not a network namespace")

// Open opens the network namespace at path: a bind mount, /proc/PID/ns/net or /proc/self/fd/N. An empty path is the
// namespace of the calling thread. Open resolves the path once. The error for any other file is ErrNotNetwork, including a
// namespace of another kind and the regular file that an unmounted namespace leaves behind.
//
// Open first opens the file with O_PATH, which neither waits for the other end of a pipe nor starts a device, and opens it
// for use only if fstatfs(2) reports nsfs, the kernel's namespace file system.
func Open(path string) (*Namespace, error) {
	current := path == ""
	if current {
		path = threadPath
	}
	n, err := openNet(path)
	if err != nil {
		return nil, fmt.Errorf("opening netns %q: %w", path, err)
	}
	n.current = current
	return n, nil
}

// NamedDir is where ip netns keeps namespaces by name.
const NamedDir = "/var/run/netns"

// OpenNamed is Open of what a user writes: a text without a slash is a name, as for ip netns, or else a file of the working directory.
func OpenNamed(text string) (*Namespace, error) {
	if text == "" || strings.Contains(text, "/") {
		return Open(text)
	}
	n, err := Open(NamedDir + "/" + text)
	if !errors.Is(err, fs.ErrNotExist) {
		return n, err
	}
	if n, err = Open(text); errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("opening netns %q: neither %s/%s nor a file of that name exists (\"ip netns list\" lists names; a process has /proc/PID/ns/net)",
			text, NamedDir, text)
	}
	return n, err
}

// New creates a network namespace for this process. It has no name and a loopback interface that is down, and ends with Close
// or with the process, unless another process or mount holds it. New needs CAP_SYS_ADMIN.
func New() (n *Namespace, err error) {
	err = Do("", func() (err error) {
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("making a network namespace: %w", err)
		}
		n, err = Open(threadPath)
		return err
	})
	return n, err
}

func openNet(path string) (*Namespace, error) {
	located, err := openFile(path, unix.O_PATH)
	if err != nil {
		return nil, err
	}
	defer unix.Close(located) //nolint:errcheck // nothing was written
	inode, err := inodeInNsfs(located)
	if err != nil {
		return nil, err
	}
	fd, err := openFile(fmt.Sprintf("/proc/self/fd/%d", located), unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	if err = checkNet(fd); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	n := &Namespace{name: path, inode: inode}
	n.fd.Store(int64(fd))
	return n, nil
}

// Duplicate returns another file of the namespace, which the caller closes.
func (n *Namespace) Duplicate() (*Namespace, error) {
	fd, err := unix.FcntlInt(uintptr(n.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicating the file of netns %q: %w", n.name, err)
	}
	other := &Namespace{name: n.name, inode: n.inode}
	other.fd.Store(int64(fd))
	return other, nil
}

// Path returns a path for this process and its children. After Close it leads nowhere.
func (n *Namespace) Path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.FD()) }

// FD returns the file descriptor of the namespace, or -1 after Close.
func (n *Namespace) FD() int { return int(n.fd.Load()) }

// Inode returns the identity of the namespace.
func (n *Namespace) Inode() Inode { return n.inode }

// Current reports whether an empty path opened the namespace: it was the caller's.
func (n *Namespace) Current() bool { return n.current }

// Close closes the file descriptor. It may be called twice.
func (n *Namespace) Close() {
	if fd := n.fd.Swap(-1); fd >= 0 {
		_ = unix.Close(int(fd)) // nothing was written
	}
}

// IsHost reports whether n is the network namespace of this process or of process 1, so that rules in it would affect the
// node. IsHost ignores process 1 if this process may not read its namespace.
func (n *Namespace) IsHost() (bool, error) {
	own, err := InodeOf(processPath)
	if err != nil {
		return false, fmt.Errorf("reading the network namespace of this process: %w", err)
	}
	if n.inode == own {
		return true, nil
	}
	first, err := InodeOf(initPath)
	return err == nil && n.inode == first, nil
}

// Users returns the user namespace that owns n (NS_GET_USERNS, linux/nsfs.h), and whether it is this process's. The rules in n use
// its IDs. A pod with hostUsers: false has its own user namespace.
func (n *Namespace) Users() (users Inode, own bool, err error) {
	owner, err := unix.IoctlRetInt(n.FD(), unix.NS_GET_USERNS)
	if errors.Is(err, unix.EPERM) {
		return Inode{}, true, nil // the owner is a parent of ours: a container can have a user namespace newer than its network
	}
	if err == nil {
		defer unix.Close(owner) //nolint:errcheck // nothing was written
		users, err = InodeOf(fmt.Sprintf("/proc/self/fd/%d", owner))
	}
	if err != nil {
		return Inode{}, false, fmt.Errorf("reading the owner of network namespace %q: %w", n.name, err)
	}
	ours, err := InodeOf("/proc/self/ns/user")
	if err != nil {
		return Inode{}, false, fmt.Errorf("reading the user namespace of this process: %w", err)
	}
	return users, users == ours, nil
}

// checkNet checks the type of a namespace (ioctl NS_GET_NSTYPE, linux/nsfs.h, Linux 4.11). An older kernel returns ENOTTY,
// and its setns(2) refuses a namespace of another type.
func checkNet(fd int) error {
	kind, err := unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE)
	switch {
	case errors.Is(err, unix.ENOTTY):
		return nil
	case err != nil:
		return fmt.Errorf("reading the kind of namespace: %w", err)
	case kind != unix.CLONE_NEWNET:
		return fmt.Errorf("it is a namespace of another kind (%#x), %w", kind, ErrNotNetwork)
	}
	return nil
}

// enter moves the calling thread, which must be locked, into n. It needs no privilege if the thread is in n already.
func (n *Namespace) enter() error {
	if now, err := InodeOf(threadPath); err == nil && now == n.inode {
		return nil
	}
	if err := vishnetns.Set(vishnetns.NsHandle(n.FD())); err != nil {
		return fmt.Errorf("entering netns %q: %w", n.name, err)
	}
	return nil
}

// openFile calls open(2), again after EINTR.
func openFile(path string, flags int) (int, error) {
	for {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}

// inodeInNsfs returns the inode of an open file in nsfs, the kernel's namespace file system. For any other file the error names
// the kind of the file.
func inodeInNsfs(fd int) (Inode, error) {
	var stat unix.Stat_t
	var fs unix.Statfs_t
	if err := errors.Join(unix.Fstat(fd, &stat), unix.Fstatfs(fd, &fs)); err != nil {
		return Inode{}, err
	}
	if int64(fs.Type) == unix.NSFS_MAGIC { //nolint:unconvert // the field's size differs between machines
		return Inode{Dev: stat.Dev, Ino: stat.Ino}, nil
	}
	switch stat.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		return Inode{}, fmt.Errorf("it is a regular file, %w; one that was mounted there is gone", ErrNotNetwork)
	case unix.S_IFDIR:
		return Inode{}, fmt.Errorf("it is a directory, %w", ErrNotNetwork)
	default:
		return Inode{}, fmt.Errorf("it is %w", ErrNotNetwork)
	}
}

// InodeOf returns the inode of the file at a path without opening the file.
func InodeOf(path string) (Inode, error) {
	info, err := os.Stat(path)
	if err != nil {
		return Inode{}, err
	}
	stat := info.Sys().(*syscall.Stat_t) //nolint:forcetypeassert // always on Linux
	return Inode{Dev: stat.Dev, Ino: stat.Ino}, nil
}
