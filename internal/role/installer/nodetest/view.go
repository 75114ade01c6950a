package nodetest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/netns"
)

// The files of the container's image.
const (
	imageProgram = "/usr/local/bin/istio-cni"
	imageAgent   = "/usr/local/bin/install-cni"
)

func devices() []string { return []string{"/dev/null", "/dev/zero", "/dev/urandom"} }

func makeDevices(root string) error {
	var errs []error
	for _, device := range devices() {
		errs = append(errs, replace(filepath.Join(root, device), ""))
	}
	return errors.Join(errs...)
}

// mount creates the node's mount namespace and keeps it open. The machine's mount namespace does not see its mounts, so
// the later removal of the directories removes nothing else.
func (n *Node) mount(program string) error {
	return onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("unsharing the mount namespace: %w", err)
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return fmt.Errorf("making mounts private: %w", err)
		}
		for _, b := range n.binds(program) {
			if err := b.mount(); err != nil {
				return err
			}
		}
		if n.immutable {
			if err := readOnly(n.host); err != nil {
				return err
			}
		}
		mounts, err := os.Open("/proc/thread-self/ns/mnt")
		n.mounts = mounts
		return err
	})
}

type bind struct {
	from, to string
	flags    uintptr
}

func (b bind) mount() error {
	if err := unix.Mount(b.from, b.to, "", unix.MS_BIND|b.flags&unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mounting %q on %q: %w", b.from, b.to, err)
	}
	if b.flags&unix.MS_RDONLY == 0 {
		return nil
	}
	return readOnly(b.to)
}

func readOnly(mounted string) error {
	if err := unix.Mount("", mounted, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("making %q read-only: %w", mounted, err)
	}
	return nil
}

// binds returns the mounts of the machine's programs for the host, and of the host's directories for the container.
func (n *Node) binds(program string) []bind {
	binds := []bind{
		// The root directory must be a mount: programs may rely on it to change how mounts propagate.
		{from: n.host, to: n.host},
		{from: n.container, to: n.container},
	}
	machine := []string{"/usr", "/etc/alternatives"}
	if n.immutable {
		machine = []string{"/usr/lib", "/usr/lib64"}
		for _, dir := range writable() {
			binds = append(binds, bind{from: n.Path(dir), to: n.Path(dir)})
		}
	}
	for _, dir := range machine {
		binds = append(binds, bind{from: dir, to: n.Path(dir), flags: unix.MS_RDONLY})
	}
	binds = append(binds, []bind{
		{from: "/proc", to: n.Path("/proc"), flags: unix.MS_REC},
		{from: "/proc", to: n.inside("/proc"), flags: unix.MS_REC},
		{from: program, to: n.inside(imageProgram), flags: unix.MS_RDONLY},
		{from: n.Path(NetDir), to: n.inside("/host" + NetDir)},
		{from: n.Path(BinDir), to: n.inside("/host" + BinDir)},
		{from: n.Path("/var/lib/cni"), to: n.inside("/host/var/lib/cni")},
		{from: n.Path(netnsDir), to: n.inside("/host/var" + netnsDir)},
		{from: n.Path(RunDir), to: n.inside("/var" + RunDir)},
	}...)
	for _, device := range devices() {
		for _, root := range []string{n.host, n.container} {
			binds = append(binds, bind{from: device, to: filepath.Join(root, device)})
		}
	}
	return binds
}

// as runs do with a root directory, in the node's mount and network namespaces, and so do the processes that do starts.
// Goroutines that do starts have the machine's. An empty root is the machine's.
func (n *Node) as(root string, do func() error) error {
	return onThread(func() error {
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return fmt.Errorf("unsharing the root directory: %w", err)
		}
		if err := unix.Setns(int(n.mounts.Fd()), unix.CLONE_NEWNS); err != nil {
			return fmt.Errorf("entering the mount namespace: %w", err)
		}
		return n.inNet(root, do)
	})
}

// inNet enters the network namespace before the root directory changes because its path is the machine's.
func (n *Node) inNet(root string, do func() error) error {
	net, err := os.Open(n.Netns)
	if err != nil {
		return err
	}
	defer func() { _ = net.Close() }()
	if err := unix.Setns(int(net.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("entering the network namespace: %w", err)
	}
	if root != "" {
		if err := errors.Join(unix.Chroot(root), unix.Chdir("/")); err != nil {
			return fmt.Errorf("changing the root directory to %q: %w", root, err)
		}
	}
	return do()
}

// onThread runs do on a thread that is used for nothing else afterwards. The thread is not the first one of the process because
// the first thread cannot end.
func onThread(do func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() //nolint:forbidigo // mount namespaces and root directories are of tests only
		if unix.Gettid() == unix.Getpid() {
			done <- onThread(do)     // do cannot get this thread
			runtime.UnlockOSThread() //nolint:forbidigo // nothing was done to it
			return
		}
		done <- do()
	}()
	return <-done
}

// inNetns runs do in the node's network namespace only.
func (n *Node) inNetns(do func() error) error { return netns.Do(n.Netns, do) }
