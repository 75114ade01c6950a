package installation

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
)

// A rewrite conflict is two programs that undo each other's work: more than so many rewrites without a quiet period
// between two of them. From then on this one backs off, longer each time, so that neither the node's disk nor its runtime
// is kept busy.
const (
	freeRewrites = 5
	quietPeriod  = time.Minute
	firstPause   = 5 * time.Second
	longestPause = time.Minute
)

// rewrites are those of one artifact since it was quiet for a period.
type rewrites struct {
	count  int
	last   time.Time
	pause  time.Duration // after the last one
	logged bool
}

// conflictError is a rewrite that waits.
type conflictError struct {
	file  string
	other metrics.Writer
	wait  time.Duration
}

func (e *conflictError) Error() string {
	return fmt.Sprintf("another program (%s) keeps rewriting %s, backing off; %s", e.other, e.file, remedy(e.other))
}

// remedy is how a conflict is ended.
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

// rewrite writes an artifact, unless a conflict makes it wait, and counts that if it was as wanted before.
func (i *Installation) rewrite(a metrics.Artifact, file string, other metrics.Writer, write func() error) error {
	r, now := i.rewrites[a], i.now()
	if !i.asWanted[a] {
		return write()
	}
	if r == nil || now.Sub(r.last) > r.pause+quietPeriod {
		r = &rewrites{}
		i.rewrites[a] = r
	}
	if wait := r.last.Add(r.pause).Sub(now); wait > 0 {
		err := &conflictError{file, other, wait}
		if !r.logged {
			r.logged = true
			i.log.Warn("backing off", slog.Duration("for", wait), slog.String("error", err.Error()))
			i.report.Metrics.RewriteConflict(other)
			i.report.Warn("CNIConfigFight", err.Error())
		}
		return err
	}
	if err := write(); err != nil {
		return err
	}
	r.count, r.last, r.logged = r.count+1, now, false
	if r.count > freeRewrites {
		r.pause = min(max(2*r.pause, firstPause), longestPause)
	}
	return nil
}

// rewriteFile is rewrite for a file of this program's own. One that is missing is put back at once: pods need it.
func (i *Installation) rewriteFile(a metrics.Artifact, file string, write func() error) error {
	if _, err := os.Lstat(file); err != nil {
		return write() // which reports whatever keeps the file from being examined
	}
	return i.rewrite(a, file, metrics.WriterInstaller, write)
}

// waitOf is how long the conflicts among the errors wait at least, 0 if there is none.
func waitOf(err error) time.Duration {
	if conflict, ok := errors.AsType[*conflictError](err); ok {
		return conflict.wait
	}
	return 0
}

// otherWriter looks for the program that writes the configuration, too: by a stanza that differs, as a program that
// overwrites the file for other reasons leaves none, by the plugins, and by the names that Cilium gives.
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
