package installation

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/time/rate"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
)

// A rewrite conflict means that two programs undo each other's writes. A token bucket spares the node's disk and its runtime:
// it allows a burst of rewrites of an artifact, and then one more per interval.
const (
	freeRewrites    = 5
	rewriteInterval = 30 * time.Second
)

// rewrites limits the rewrites of one artifact.
type rewrites struct {
	*rate.Limiter

	logged bool // whether the log has the back-off
}

// conflictError is the error of a rewrite that backs off.
type conflictError struct {
	file  string
	other metrics.Writer
	wait  time.Duration
}

func (e *conflictError) Error() string {
	return fmt.Sprintf("another program (%s) keeps rewriting %s, backing off; %s", e.other, e.file, remedy(e.other))
}

// remedy returns the action that ends a conflict with the other writer.
func remedy(other metrics.Writer) string {
	switch other {
	case metrics.WriterCilium:
		return "set cni.exclusive=false in Cilium's chart"
	case metrics.WriterMultus:
		return "give multus a configuration file instead of multus-conf-file=auto, or install with chained=false and provider=multus"
	case metrics.WriterInstaller:
		return "another istio-cni node agent works on this node: remove one of the two"
	case metrics.WriterUnknown:
	}
	return "find the program that writes it, or use CNI_CONF_MODE=owned or dropin"
}

// rewrite writes an artifact unless a conflict delays it, and counts the write if the artifact was in its desired state before.
func (i *Installation) rewrite(a metrics.Artifact, file string, other metrics.Writer, write func() error) error {
	if !i.asWanted[a] {
		return write()
	}
	r, now := i.rewrites[a], i.now()
	if r == nil {
		r = &rewrites{Limiter: rate.NewLimiter(rate.Every(rewriteInterval), freeRewrites)}
		i.rewrites[a] = r
	}
	token := r.ReserveN(now, 1)
	if wait := token.DelayFrom(now); wait > 0 {
		token.CancelAt(now)
		err := &conflictError{file, other, wait}
		if !r.logged {
			r.logged = true
			i.log.Warn("backing off", slog.Duration("for", wait), slog.String("error", err.Error()))
			i.report.Metrics.RewriteConflict(other)
			i.report.Warn(eventConflict, err.Error())
		}
		return err
	}
	if err := write(); err != nil {
		token.CancelAt(now)
		return err
	}
	r.logged = false
	return nil
}

// rewriteFile is rewrite for a file that this program owns. It writes a missing file at once because pods need the file.
func (i *Installation) rewriteFile(a metrics.Artifact, file string, write func() error) error {
	if _, err := os.Lstat(file); err != nil {
		return write() // write reports the error that Lstat met
	}
	return i.rewrite(a, file, metrics.WriterInstaller, write)
}

// waitOf returns the shortest delay of the conflicts among the errors, 0 without a conflict.
func waitOf(err error) time.Duration {
	if conflict, ok := errors.AsType[*conflictError](err); ok {
		return conflict.wait
	}
	return 0
}

// otherWriter guesses which other program writes the configuration: from a stanza that differs (a program that overwrites the
// file for other reasons leaves no stanza), from the plugins' types, and from Cilium's file names.
func otherWriter(d cniconf.Dir, primary string, others []string) metrics.Writer {
	_, n, _ := d.Loaded()
	text := strings.ToLower(strings.Join(append(slices.Clone(n.Types), append(others, primary)...), " "))
	switch {
	case slices.Contains(n.Types, cniconf.PluginType):
		return metrics.WriterInstaller
	case strings.Contains(text, "cilium"):
		return metrics.WriterCilium
	case strings.Contains(text, "multus"):
		return metrics.WriterMultus
	}
	return metrics.WriterUnknown
}
