package logrelay

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
)

// losses counts what became of records and connections, and tells the log about what was given up, not each time but
// once in a while: whoever floods the socket must not flood the log by it.
type losses struct {
	metrics *metrics.Metrics

	mu    sync.Mutex
	since tally
}

// tally is what was given up since the last report.
type tally struct {
	dropped, rejected int
	strangers, slow   int
	lastStranger      uint32
	accept            error
}

func (l *losses) relayed(n int) {
	l.metrics.LogRecords(metrics.LogRelayed, n)
}

func (l *losses) dropped(n int) {
	l.metrics.LogRecords(metrics.LogDropped, n)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.since.dropped += n
}

func (l *losses) rejected(n int) {
	l.metrics.LogRecords(metrics.LogRejected, n)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.since.rejected += n
}

// Stranger, Slow and CannotAccept are what the socket tells.
func (l *losses) Stranger(uid uint32) {
	l.metrics.LogConnectionRefused(metrics.RefusedStranger)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.since.strangers++
	l.since.lastStranger = uid
}

func (l *losses) Slow() {
	l.metrics.LogConnectionRefused(metrics.RefusedSlow)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.since.slow++
}

func (l *losses) CannotAccept(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.since.accept = err
}

// reportEach reports after each interval in which something was given up, and once more at the end.
func (l *losses) reportEach(ctx context.Context, interval time.Duration, log *slog.Logger) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for ctx.Err() == nil {
		select {
		case <-ticker.C:
			l.report(log)
		case <-ctx.Done():
		}
	}
	l.report(log)
}

func (l *losses) report(log *slog.Logger) {
	l.mu.Lock()
	t := l.since
	l.since = tally{}
	l.mu.Unlock()
	if t.dropped > 0 || t.rejected > 0 {
		log.Warn("plugin log records were not relayed", "dropped", t.dropped, "rejected", t.rejected)
	}
	if t.strangers > 0 {
		log.Warn("connections to the log socket were refused: not of an allowed user",
			"connections", t.strangers, "last_uid", t.lastStranger)
	}
	if t.slow > 0 {
		log.Warn("connections to the log socket were closed: slow while others waited", "connections", t.slow)
	}
	if t.accept != nil {
		log.Warn("connections to the log socket could not be accepted", "error", t.accept)
	}
}
