package netns

import (
	"fmt"

	vishnetns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// A namespace is an open network namespace.
type namespace struct {
	handle vishnetns.NsHandle
	path   string
	id     identity
}

// An identity tells files, and so namespaces, apart: the inode number alone may repeat on another device.
type identity struct{ dev, ino uint64 }

// open opens the network namespace at path, or the calling thread's. It answers for nothing else: not for a
// namespace of another kind, and not for the plain file that an unmounted namespace leaves behind.
//
// The file is first taken with O_PATH, which neither waits for the other end of a pipe nor wakes a device,
// and opened for use only when it has turned out to lie in the kernel's namespace file system.
func open(path string) (*namespace, error) {
	if path == "" {
		path = threadPath
	}
	n, err := openNet(path)
	if err != nil {
		return nil, fmt.Errorf("opening netns %q: %w", path, err)
	}
	return n, nil
}

func openNet(path string) (*namespace, error) {
	located, err := locate(path)
	if err != nil {
		return nil, err
	}
	defer located.close()
	if err = located.inNsfs(); err != nil {
		return nil, err
	}
	handle, err := vishnetns.GetFromPath(located.procPath())
	if err != nil {
		return nil, err
	}
	if err = checkNet(handle); err != nil {
		_ = handle.Close()
		return nil, err
	}
	return &namespace{handle: handle, path: path, id: located.id}, nil
}

// checkNet asks the kernel what kind of namespace it is (NS_GET_NSTYPE, linux/nsfs.h, Linux 4.11). A kernel
// that does not know the question answers ENOTTY; it still refuses the wrong kind when it is entered.
func checkNet(handle vishnetns.NsHandle) error {
	kind, err := unix.IoctlRetInt(int(handle), unix.NS_GET_NSTYPE)
	switch {
	case err == unix.ENOTTY:
		return nil
	case err != nil:
		return fmt.Errorf("asking for the kind of namespace: %w", err)
	case kind != unix.CLONE_NEWNET:
		return fmt.Errorf("it is a %s namespace, not a network namespace", kindName(kind))
	}
	return nil
}

func kindName(kind int) string {
	names := map[int]string{
		unix.CLONE_NEWCGROUP: "cgroup",
		unix.CLONE_NEWIPC:    "ipc",
		unix.CLONE_NEWNS:     "mount",
		unix.CLONE_NEWPID:    "pid",
		unix.CLONE_NEWTIME:   "time",
		unix.CLONE_NEWUSER:   "user",
		unix.CLONE_NEWUTS:    "uts",
	}
	if name, ok := names[kind]; ok {
		return name
	}
	return fmt.Sprintf("%#x", kind)
}

// enter moves the calling thread, which must be locked, into n. Staying in n needs no privilege.
func (n *namespace) enter() error {
	if now, err := identify(threadPath); err == nil && now == n.id {
		return nil
	}
	if err := vishnetns.Set(n.handle); err != nil {
		return fmt.Errorf("entering netns %q: %w", n.path, err)
	}
	return nil
}

func (n *namespace) close() { _ = n.handle.Close() }

// A file is a place in the file system held with O_PATH: it stays the same file whatever happens to the path.
type file struct {
	fd   int
	mode uint32
	id   identity
}

func locate(path string) (*file, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	for err == unix.EINTR {
		fd, err = unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		return nil, err
	}
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return &file{fd: fd, mode: stat.Mode, id: identity{dev: stat.Dev, ino: stat.Ino}}, nil
}

// inNsfs says, as an error, what f is if it is no file of the kernel's namespace file system.
func (f *file) inNsfs() error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(f.fd, &fs); err != nil {
		return err
	}
	if int64(fs.Type) == unix.NSFS_MAGIC { //nolint:unconvert // the field's size differs between machines
		return nil
	}
	switch f.mode & unix.S_IFMT {
	case unix.S_IFREG:
		return fmt.Errorf("it is a regular file, not a network namespace; one that was mounted there is gone")
	case unix.S_IFDIR:
		return fmt.Errorf("it is a directory, not a network namespace")
	default:
		return fmt.Errorf("it is not a network namespace")
	}
}

// procPath names f for system calls that take a path.
func (f *file) procPath() string { return fmt.Sprintf("/proc/self/fd/%d", f.fd) }

func (f *file) close() { _ = unix.Close(f.fd) }

func identify(path string) (identity, error) {
	f, err := locate(path)
	if err != nil {
		return identity{}, err
	}
	defer f.close()
	return f.id, nil
}
