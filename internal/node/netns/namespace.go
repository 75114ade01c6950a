package netns

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"

	vishnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Namespace is a network namespace that is held open by a file descriptor, and so exists, until Close. It stays the same
// namespace even if its path changes: checks and later work are on the same namespace. Several goroutines may use it.
type Namespace struct {
	fd      atomic.Int64
	inode   Inode
	name    string // for messages
	current bool
	// thread is one that runs a function of Do, 0 for none.
	thread atomic.Int64
}

// Inode identifies a namespace for as long as it lives: a number is used again later. The number alone may repeat on
// another device.
type Inode struct{ Dev, Ino uint64 }

// String is the number as the links of procfs have it, such as "net:[4026532281]".
func (i Inode) String() string { return fmt.Sprintf("net:[%d]", i.Ino) }

// ErrNotNetwork means that a path leads to a file that is no network namespace.
var ErrNotNetwork = errors.New("not a network namespace")

// Open opens the network namespace at path: a bind mount, /proc/PID/ns/net or /proc/self/fd/N. An empty path is the
// namespace of the calling thread. The path is resolved once. Any other file is ErrNotNetwork, also a namespace of another
// kind and the plain file that an unmounted namespace leaves behind.
//
// Open first opens the file with O_PATH, which neither waits for the other end of a pipe nor starts a device, and opens it
// for use only if fstatfs(2) shows that it lies in nsfs, the kernel's namespace file system.
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

// New creates a network namespace for this process alone: it has a loopback interface that is down, no name, and ends with
// Close or with the process, unless another process or mount holds it. New needs CAP_SYS_ADMIN.
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

// Path names the namespace for this process and those that it starts. After Close it leads nowhere.
func (n *Namespace) Path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.FD()) }

// FD is the open file of the namespace, -1 after Close.
func (n *Namespace) FD() int { return int(n.fd.Load()) }

// Inode identifies the namespace.
func (n *Namespace) Inode() Inode { return n.inode }

// Current reports whether the namespace was opened as that of the caller, by an empty path.
func (n *Namespace) Current() bool { return n.current }

// Close ends the use. It may be called twice.
func (n *Namespace) Close() {
	if fd := n.fd.Swap(-1); fd >= 0 {
		_ = unix.Close(int(fd)) // nothing was written
	}
}

// IsHost reports whether n is the network namespace of this process or of process 1, that is, whether programming it
// would program the node. IsHost ignores process 1 if this process may not read its namespace.
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

// Users identifies the user namespace that owns n, whose ids the rules in n have (NS_GET_USERNS, linux/nsfs.h), and reports whether
// it is that of this process. The pod with hostUsers: false has one of its own.
func (n *Namespace) Users() (users Inode, own bool, err error) {
	owner, err := unix.IoctlRetInt(n.FD(), unix.NS_GET_USERNS)
	if errors.Is(err, unix.EPERM) {
		return Inode{}, true, nil // the owner is a parent of ours, as in a container whose user namespace is newer than its network
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

// checkNet checks the type of a namespace (ioctl NS_GET_NSTYPE, linux/nsfs.h, Linux 4.11). An older kernel returns ENOTTY;
// its setns(2) refuses a namespace of another type.
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

// enter moves the calling thread, which must be locked, into n. Staying in n needs no privilege.
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

// inodeInNsfs identifies an open file. It returns an error that names the kind of the file unless that lies in nsfs, the
// kernel's namespace file system.
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

// InodeOf identifies the file that a path leads to now, without opening it for use.
func InodeOf(path string) (Inode, error) {
	info, err := os.Stat(path)
	if err != nil {
		return Inode{}, err
	}
	stat := info.Sys().(*syscall.Stat_t) //nolint:forcetypeassert // of every file of Linux
	return Inode{Dev: stat.Dev, Ino: stat.Ino}, nil
}
