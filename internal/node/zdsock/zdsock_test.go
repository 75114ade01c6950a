package zdsock_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/socketfile"
	"github.com/meshcni/istio-cni/internal/node/zdsock"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func listen(t *testing.T, path string) zdsock.Listener {
	t.Helper()
	l, err := zdsock.Listen(t.Context(), path)
	check.OK(t, err)
	t.Cleanup(l.Remove)
	return l
}

// pair returns both ends of a connection.
func pair(t *testing.T) (agent, ztunnel *zdsock.Conn) {
	t.Helper()
	path := filepath.Join(agenttest.SocketDir(t), "z.sock")
	l := listen(t, path)
	ztunnel, err := zdsock.Dial(path)
	check.OK(t, err)
	agent, err = l.Accept()
	check.OK(t, err)
	t.Cleanup(func() { _, _ = agent.Close(), ztunnel.Close() })
	return agent, ztunnel
}

func receive(t *testing.T, c *zdsock.Conn) (text string, descriptor int, err error) {
	t.Helper()
	packet, descriptor, err := c.Receive(new([zdsock.MaxPacket]byte))
	return string(packet), descriptor, err
}

func TestListen_File(t *testing.T) {
	dir := filepath.Join(agenttest.SocketDir(t), "ztunnel")
	path := filepath.Join(dir, "z.sock")
	stale, err := zdsock.Listen(t.Context(), path)
	check.OK(t, err)
	info, err := os.Lstat(path)
	check.OK(t, err)
	check.Equal(t, info.Mode(), fs.ModeSocket|0o600)
	info, err = os.Lstat(dir)
	check.OK(t, err)
	check.Equal(t, info.Mode().Perm(), 0o755)
	if _, err := zdsock.Listen(t.Context(), path); !errors.Is(err, socketfile.ErrServed) {
		t.Errorf("another agent's socket: %v", err)
	}
	check.OK(t, stale.Close()) // the file stays, as a killed agent's
	l := listen(t, path)
	check.Equal(t, l.InPlace(), true)
	l.Remove()
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file stays: %v", err)
	}
}

// A socket of any mode is for root.
func TestAccept_OtherUser(t *testing.T) {
	netnstest.New(t) // needs root
	path := filepath.Join(agenttest.SocketDir(t), "z.sock")
	l := listen(t, path)
	check.OK(t, errors.Join(os.Chmod(path, 0o666), os.Chmod(filepath.Dir(path), 0o755)))
	dialed := make(chan *zdsock.Conn)
	go func() {
		runtime.LockOSThread()                                               // and the thread ends with the goroutine
		_, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, 1337, 1337, 1337) // of this thread alone
		c, err := zdsock.Dial(path)
		if errno != 0 || err != nil {
			t.Error(errno, err)
		}
		dialed <- c
	}()
	if _, err := l.Accept(); !errors.Is(err, zdsock.ErrPeer) || !strings.Contains(err.Error(), "user 1337") {
		t.Errorf("got %v", err)
	}
	other := <-dialed
	if _, _, err := receive(t, other); !errors.Is(err, io.EOF) {
		t.Errorf("the refused one gets %v", err)
	}
	check.OK(t, other.Close())
	root, err := zdsock.Dial(path)
	check.OK(t, err)
	accepted, err := l.Accept()
	check.OK(t, err)
	check.OK(t, errors.Join(root.Close(), accepted.Close()))
}

func TestConn_Packets(t *testing.T) {
	agent, ztunnel := pair(t)
	ns, err := netns.Open(netnstest.New(t))
	check.OK(t, err)
	long := strings.Repeat("x", zdsock.MaxPacket)
	before := netnstest.OpenFiles(t) - 1 // without ns
	check.OK(t, agent.Send([]byte("first"), ns.FD()))
	ns.Close() // the packet has its own reference
	check.OK(t, agent.Send([]byte(long), zdsock.NoDescriptor))
	text, fd, err := receive(t, ztunnel)
	check.OK(t, err)
	check.Equal(t, text, "first")
	received, err := netns.Open(fmt.Sprint("/proc/self/fd/", fd))
	check.OK(t, err)
	check.Equal(t, received.Inode(), ns.Inode())
	received.Close()
	zdsock.CloseDescriptor(fd)
	text, fd, err = receive(t, ztunnel)
	check.OK(t, err)
	check.Equal(t, fd, zdsock.NoDescriptor)
	check.Equal(t, text, long)
	check.Equal(t, netnstest.OpenFiles(t), before, "open files")
}

func TestReceive_Refused(t *testing.T) {
	file, err := os.Open("/dev/null")
	check.OK(t, err)
	defer file.Close() //nolint:errcheck // nothing was written
	fd := int(file.Fd())
	for name, c := range map[string]struct {
		packet      []byte
		descriptors []int
		err         string
	}{
		"too long":                     {make([]byte, zdsock.MaxPacket+1), nil, "more than 1024 bytes"},
		"too long, with a descriptor":  {make([]byte, zdsock.MaxPacket+1), []int{fd}, "more than 1024 bytes"},
		"two descriptors":              {[]byte("x"), []int{fd, fd}, "more than one descriptor"},
		"three descriptors":            {[]byte("x"), []int{fd, fd, fd}, "more than one descriptor"},
		"as many as the kernel allows": {[]byte("x"), slices.Repeat([]int{fd}, 253), "more than one descriptor"},
	} {
		t.Run(name, func(t *testing.T) {
			agent, ztunnel := pair(t)
			before := netnstest.OpenFiles(t)
			_, _, err := ztunnel.WriteMsgUnix(c.packet, unix.UnixRights(c.descriptors...), nil)
			check.OK(t, err)
			if _, fd, err := receive(t, agent); err == nil || !strings.Contains(err.Error(), c.err) || fd != zdsock.NoDescriptor {
				t.Errorf("got %d, %v", fd, err)
			}
			check.Equal(t, netnstest.OpenFiles(t), before, "open files")
		})
	}
}

// The kernel's queue is finite, and a sender does not wait for room.
func TestSend_Full(t *testing.T) {
	agent, ztunnel := pair(t)
	sent, err := 0, error(nil)
	for ; err == nil; sent++ {
		err = agent.Send(bytes.Repeat([]byte("x"), zdsock.MaxPacket), zdsock.NoDescriptor)
	}
	if !errors.Is(err, zdsock.ErrFull) || sent < 2 {
		t.Errorf("got %v after %d packets", err, sent)
	}
	_, _, err = receive(t, ztunnel)
	check.OK(t, err)
	check.OK(t, agent.Send([]byte("x"), zdsock.NoDescriptor), "with room again")
}

func TestSend_PacketWaiting(t *testing.T) {
	agent, ztunnel := pair(t)
	check.OK(t, ztunnel.Send([]byte("early"), zdsock.NoDescriptor))
	if err := agent.Send([]byte("x"), zdsock.NoDescriptor); !errors.Is(err, zdsock.ErrWaiting) {
		t.Errorf("got %v", err)
	}
	text, _, err := receive(t, agent)
	check.OK(t, err)
	check.Equal(t, text, "early")
	check.OK(t, agent.Send([]byte("x"), zdsock.NoDescriptor))
	check.OK(t, ztunnel.Close())
	if err := agent.Send([]byte("x"), zdsock.NoDescriptor); err == nil {
		t.Error("sent to nobody")
	}
}

func TestReceive_Ends(t *testing.T) {
	t.Run("other side", func(t *testing.T) {
		agent, ztunnel := pair(t)
		check.OK(t, ztunnel.Close())
		if _, _, err := receive(t, agent); !errors.Is(err, io.EOF) {
			t.Errorf("got %v", err)
		}
		if err := agent.Send([]byte("x"), zdsock.NoDescriptor); !errors.Is(err, io.EOF) {
			t.Errorf("sending: got %v", err)
		}
	})
	t.Run("this side", func(t *testing.T) {
		agent, _ := pair(t)
		ended := make(chan error)
		go func() { _, _, err := agent.Receive(new([zdsock.MaxPacket]byte)); ended <- err }()
		check.OK(t, agent.Close())
		if err := <-ended; !zdsock.Closed(err) {
			t.Errorf("got %v", err)
		}
		if err := agent.Send([]byte("x"), zdsock.NoDescriptor); !zdsock.Closed(err) {
			t.Errorf("sending: got %v", err)
		}
	})
	t.Run("deadline", func(t *testing.T) {
		agent, _ := pair(t)
		check.OK(t, agent.SetReadDeadline(time.Now().Add(-time.Second)))
		var timeout net.Error
		if _, _, err := receive(t, agent); !errors.As(err, &timeout) || !timeout.Timeout() {
			t.Errorf("got %v", err)
		}
	})
}
