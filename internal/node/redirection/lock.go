package redirection

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// lockName is an address of unix(7)'s abstract namespace. Such addresses belong to the network namespace of the
// socket, so each namespace has its own lock.
const lockName = "@istio-cni/rules"

// Bounds of the wait for another run that programs the namespace.
const (
	lockEvery   = 5 * time.Millisecond
	lockTimeout = 30 * time.Second // the same as the wait of iptables for its own lock
)

// lock excludes other runs of this program from the current namespace: their reading, comparing and writing must not
// interleave. The lock is held until the file is closed here and in every process that inherited it, so that the lock
// outlives this process if a tool does.
func lock(ctx context.Context) (*os.File, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, lockTimeout,
		fmt.Errorf("another run has been programming this network namespace for %s", lockTimeout))
	defer cancel()
	ticker := time.NewTicker(lockEvery)
	defer ticker.Stop()
	for {
		socket, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: lockName, Net: "unixgram"})
		if err == nil {
			defer socket.Close() //nolint:errcheck // the file is the same socket
			return socket.File()
		}
		if !errors.Is(err, unix.EADDRINUSE) {
			return nil, fmt.Errorf("locking the namespace: %w", err)
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("locking the namespace: %w", context.Cause(ctx))
		}
	}
}
