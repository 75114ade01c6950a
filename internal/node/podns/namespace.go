package podns

import (
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Inode tells namespaces apart, for as long as they live: a number is used again later.
type Inode struct{ Dev, Ino uint64 }

// String is the number as the links of procfs have it, such as "net:[4026532281]".
func (i Inode) String() string { return fmt.Sprintf("net:[%d]", i.Ino) }

// Namespace is a network namespace that is held open, and so lives on, until Close. It may be used by several goroutines.
type Namespace struct {
	fd     atomic.Int64
	inode  Inode
	source Source
}

// Path names the namespace for this process and for nothing else: /proc/self/fd/N of the open file, so that it is the
// same namespace whatever becomes of the place where it was found. After Close it leads nowhere.
// A process that is started finds something else, or nothing, at it.
func (n *Namespace) Path() string { return fdPath(int(n.fd.Load())) }

// Inode tells which namespace it is.
func (n *Namespace) Inode() Inode { return n.inode }

// Source says where it was found.
func (n *Namespace) Source() Source { return n.source }

// Close lets it go. It may be called twice.
func (n *Namespace) Close() {
	if fd := n.fd.Swap(-1); fd >= 0 {
		_ = unix.Close(int(fd)) // nothing was written
	}
}

func fdPath(fd int) string { return fmt.Sprintf("/proc/self/fd/%d", fd) }

// What a place may hold instead of a network namespace.
var (
	errNoNamespace = errors.New("it is no namespace")
	errNotNet      = errors.New("it is a namespace of another kind")
)

// hold opens the network namespace at a path. The file is taken with O_PATH first, which neither waits nor wakes
// anything, and opened for use when it has turned out to be a namespace.
func hold(path string) (*Namespace, error) {
	place, err := retry(func() (int, error) { return unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0) })
	if err != nil {
		return nil, fmt.Errorf("opening %q: %w", path, err)
	}
	defer unix.Close(place) //nolint:errcheck // nothing was written
	var kind unix.Statfs_t
	if err = unix.Fstatfs(place, &kind); err != nil {
		return nil, fmt.Errorf("looking at %q: %w", path, err)
	}
	if int64(kind.Type) != unix.NSFS_MAGIC { //nolint:unconvert // the field's size differs between machines
		return nil, fmt.Errorf("opening %q: %w", path, errNoNamespace)
	}
	fd, err := retry(func() (int, error) { return unix.Open(fdPath(place), unix.O_RDONLY|unix.O_CLOEXEC, 0) })
	if err != nil {
		return nil, fmt.Errorf("opening namespace %q: %w", path, err)
	}
	n, err := checked(fd)
	if err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("opening namespace %q: %w", path, err)
	}
	return n, nil
}

// checked makes a Namespace of an open file, if it is one of the network (NS_GET_NSTYPE, linux/nsfs.h).
func checked(fd int) (*Namespace, error) {
	kind, err := unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE)
	if err != nil {
		return nil, fmt.Errorf("asking for its kind: %w", err)
	}
	if kind != unix.CLONE_NEWNET {
		return nil, errNotNet
	}
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		return nil, err
	}
	n := &Namespace{inode: Inode{Dev: stat.Dev, Ino: stat.Ino}}
	n.fd.Store(int64(fd))
	return n, nil
}

// inodeOf tells which file a path leads to, without opening it.
func inodeOf(path string) (Inode, error) {
	var stat unix.Stat_t
	if _, err := retry(func() (int, error) { return 0, unix.Stat(path, &stat) }); err != nil {
		return Inode{}, fmt.Errorf("looking at %q: %w", path, err)
	}
	return Inode{Dev: stat.Dev, Ino: stat.Ino}, nil
}

// retry repeats what a signal interrupted.
func retry(call func() (int, error)) (int, error) {
	for {
		result, err := call()
		if !errors.Is(err, unix.EINTR) {
			return result, err
		}
	}
}
