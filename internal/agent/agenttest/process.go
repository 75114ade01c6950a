package agenttest

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/test/check"
)

// Generous is the time after which a test reports a short operation as hung.
const Generous = 30 * time.Second

// Eventually waits for a condition.
func Eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	Until(t, func() string { return what }, condition)
}

// Buffer is a bytes.Buffer that is safe for concurrent use.
type Buffer struct {
	mu  sync.Mutex
	all bytes.Buffer
}

func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.all.Write(p)
}

func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.all.String()
}

// SocketDir creates a directory with a name short enough for a socket in it.
func SocketDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "run") //nolint:usetesting // a socket's path is 107 bytes at most
	check.OK(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// Child returns a command that runs this test binary, under any user.
func Child(t *testing.T, environment ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), "/proc/self/exe") // t.Context ends before the test's cleanups
	cmd.Env = append(os.Environ(), environment...)                                   //nolint:forbidigo // go test's own environment
	cmd.Dir = "/"
	return cmd
}
