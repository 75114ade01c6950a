package redirection

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/nftables"
)

// mode is the backend for the rules of a namespace, and whether tools may be used.
type mode struct {
	backend redirect.Backend // Netlink, Native or Tools
	// tools allows the host's iptables programs: for backend Tools, and to clear the legacy tables.
	tools bool
}

var (
	errNoNamespace = errors.New("no network namespace is given")
	// errNeedsTools ends an attempt that found rules of the mesh in the legacy tables, which netlink cannot change.
	errNeedsTools = errors.New("the iptables tools of the host are needed for the legacy tables")
)

// backend returns the configured backend. A forced variant of the tools selects Tools. Native is never used for a sandboxed pod: the
// pod would bypass the mesh.
func (n Namespace) backend() redirect.Backend {
	switch open := n.Backend == "" || n.Backend == redirect.Auto || n.Sandboxed && n.Backend == redirect.Native; {
	case open && n.Tools.Force != "":
		return redirect.Tools
	case open:
		return redirect.Auto
	}
	return n.Backend
}

// mode resolves backend auto. It is Native in a namespace of another user namespace (a pod with hostUsers: false) because
// the kernel refuses iptables' owner match there (net/netfilter/xt_owner.c, owner_check), even for a sandboxed pod.
func (n Namespace) mode() (mode, error) {
	if b := n.backend(); b != redirect.Auto {
		return mode{backend: b, tools: b == redirect.Tools}, nil
	}
	_, own, err := n.NetNS.Users()
	switch {
	case err != nil:
		return mode{}, err
	case !own:
		return mode{backend: redirect.Native}, nil
	}
	by := cmp.Or(n.Auto, redirect.Netlink)
	if n.Sandboxed && by == redirect.Native {
		by = redirect.Netlink
	}
	return mode{backend: by, tools: by == redirect.Tools}, nil
}

// fallback returns another mode that avoids the error of an attempt, if there is one. The attempt has changed nothing.
func (n Namespace) fallback(m mode, failed error) (mode, bool) {
	switch {
	case errors.Is(failed, errNeedsTools) && !m.tools:
		m.tools = true
		return m, true
	case !errors.Is(failed, nftables.ErrUnsupported) || n.backend() != redirect.Auto || m.backend == redirect.Tools:
		return m, false
	case m.backend == redirect.Netlink && !n.Sandboxed: // a kernel without nft_compat
		return mode{backend: redirect.Native, tools: m.tools}, true
	}
	return mode{backend: redirect.Tools, tools: true}, true
}

// access says whether other runs of this program may use the namespace at the same time.
type access bool

const (
	shared    access = false
	exclusive access = true
)

// run reads the namespace, compares it with want (nil: no rules of the owner) and passes the result to fn.
func (n Namespace) run(ctx context.Context, a access, owner redirect.Owner, want redirect.Wanted, fn func(*pass) error) (Report, error) {
	var r Report
	err := n.retry(ctx, a, func(n Namespace, m mode) error {
		r = Report{}
		p, failed := n.inspect(ctx, m, owner, want)
		if failed != nil {
			return failed
		}
		defer p.close()
		failed = fn(p)
		r = p.report
		r.Processes = p.tools.Started()
		return failed
	})
	return r, err
}

// attempts bounds the number of attempts on a namespace, whatever the reasons for a retry.
const attempts = 10

// retry calls attempt in the namespace. It repeats the call if the rules changed during it, and in another mode if
// fallback returns one.
func (n Namespace) retry(ctx context.Context, a access, attempt func(Namespace, mode) error) error {
	if n.NetNS == nil {
		return errNoNamespace
	}
	m, err := n.mode()
	if err != nil {
		return err
	}
	for range attempts {
		err = n.in(ctx, a, m, attempt)
		next, fallback := n.fallback(m, err)
		changed := errors.Is(err, nftables.ErrChanged) || errors.Is(err, iptables.ErrChanged)
		switch {
		case ctx.Err() != nil || !fallback && !changed:
			return err
		case next.backend != m.backend:
			n.Log.WarnContext(ctx, "the kernel lacks a feature for this backend; trying another one",
				"backend", string(m.backend), "next", string(next.backend), "cause", err.Error())
		}
		m = next
	}
	return fmt.Errorf("retries exhausted: the rules of the namespace keep changing (%d attempts): %w", attempts, err)
}

// in calls attempt in the namespace. Netlink uses no lock: the kernel refuses a transaction with an old generation of the
// rules, and a process in the pod could hold a lock.
func (n Namespace) in(ctx context.Context, a access, m mode, attempt func(Namespace, mode) error) error {
	if !m.tools {
		return n.NetNS.Do(func() error { return attempt(n, m) })
	}
	return n.isolated(ctx, func() error {
		if a == shared {
			return attempt(n, m)
		}
		held, err := lock(ctx)
		if err != nil {
			return err
		}
		n.Tools.Held = held
		return errors.Join(attempt(n, m), held.Close())
	})
}

// isolated calls fn in the namespace, with the pod's own iptables lock and without name service: the tools would look up
// the names of user IDs, which can take a minute (a node with a directory service) or deadlock.
func (n Namespace) isolated(ctx context.Context, fn func() error) error {
	binds := []netns.Bind{{Source: "/dev/null", Target: "/etc/nsswitch.conf"}}
	level := slog.LevelDebug
	if lock := n.lockFile(); lock != "" {
		// Legacy tools from 1.8.6 on read the lock's path from their environment. Earlier ones use only this path.
		binds = append(binds, netns.Bind{Source: lock, Target: "/run/xtables.lock"})
		level = slog.LevelWarn
	}
	binds = slices.DeleteFunc(binds, func(b netns.Bind) bool {
		_, err := os.Stat(b.Target)
		return err != nil // there is no file to hide
	})
	isolation, err := n.NetNS.DoIsolated(binds, fn)
	if isolation != nil {
		n.Log.Log(ctx, level, "running iptables without full isolation from the node", "cause", isolation.Error())
	}
	return err
}

// lockFile returns the lock of legacy tools: the namespace's own file, or "" for the host's lock in the current namespace.
func (n Namespace) lockFile() string {
	if n.NetNS.Current() {
		return ""
	}
	return n.NetNS.Path()
}

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
