// Package logrelay is the socket by which the CNI plugin's log reaches the node agent's: each record that a plugin
// process sends is logged again, with its own time.
//
// It promises to understand the plugin of this program and the reference's, to keep the records of one invocation
// together, and that nobody who can connect is able to harm the agent: strangers are refused by the kernel's word for
// who they are, slow clients lose their place to those that wait, and memory, log volume and the length of a record have
// limits. What is given up to keep those is log records, and log and metrics say how many. A record cannot pass for one
// of the agent's own, nor for several.
//
// It never takes over a socket that somebody serves, never removes a file that is not its own, and never ends the agent:
// only Open returns errors that a caller has to act on.
//
// Start reading at Server. The socket is of package unixsock; batch.go has a request, record.go a record.
package logrelay

import (
	"context"
	"io/fs"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/unixsock"
)

// scope is the value of the attribute "scope" of every relayed record, by which it is told from the agent's own.
const scope = "cni-plugin"

// Options are where the socket is and where the records go.
type Options struct {
	// Path is the socket, <run dir>/log.sock for the plugin to find it; 107 bytes at most. Its directory is made if it is
	// not there.
	Path string
	// DirMode is the mode of a directory that is made, Mode that of the socket. 0 means 0700 and 0600.
	DirMode, Mode fs.FileMode
	// AllowedUIDs may send besides root. They need a Mode and a DirMode that let them connect.
	AllowedUIDs []uint32
	// Records gets the relayed records; nil means nobody does. Its Enabled is not asked, as its level is the agent's own.
	Records slog.Handler
	// Level is the lowest level that is relayed; nil means info.
	Level slog.Leveler
	// Log is the agent's own log, for what happens to the relay; nil means none.
	Log *slog.Logger
	// Metrics counts; nil means nobody does.
	Metrics *metrics.Metrics
	// Now is the clock, which never goes back; nil means the system's.
	Now func() time.Time
}

// limits is what clients may use of the agent. The plugin of this program ends an invocation within 80 ms, with 256 KiB
// of records at most, which is well within everything here.
type limits struct {
	connections int           // at a time
	grace       time.Duration // how long one may be open before it has to make place
	patience    time.Duration // for a whole request, and for its answer

	header    int // bytes
	body      int // bytes
	allowance int // bytes of a body that are always granted
	shared    int // bytes of all bodies beyond that

	batch  int // records of a request
	record int // bytes of a record

	recordRate, byteRate   rate.Limit // per second
	recordBurst, byteBurst int

	report time.Duration // between two records about what was given up
	end    time.Duration // for running requests when the agent ends
}

func defaultLimits() limits {
	return limits{
		connections: 64,
		grace:       250 * time.Millisecond,
		patience:    2 * time.Second,

		header:    16 << 10,
		body:      4 << 20,
		allowance: 512 << 10,
		shared:    8 << 20,

		batch:  5000,
		record: 256 << 10,

		recordRate: 1000, byteRate: 1 << 20,
		recordBurst: 10_000, byteBurst: 16 << 20,

		report: 30 * time.Second,
		end:    time.Second,
	}
}

// Server is the agent's end of the socket.
type Server struct {
	*unixsock.Server

	options Options
	limits  limits
	records slog.Handler
	losses  *losses

	requests chan struct{} // one for each that is being read or relayed
	shared   budget

	relaying sync.Mutex // keeps a batch together, and decoding to one at a time
	byCount  *rate.Limiter
	bySize   *rate.Limiter
}

// Open makes the socket. Clients can connect from then on; they are served by Serve, which has to follow. A socket that
// somebody else serves is an error that is unixsock.ErrServed.
func Open(ctx context.Context, o Options) (*Server, error) {
	return open(ctx, o, defaultLimits())
}

func open(ctx context.Context, o Options, l limits) (*Server, error) {
	if o.Level == nil {
		o.Level = slog.LevelInfo
	}
	if o.Records == nil {
		o.Records = slog.DiscardHandler
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Metrics == nil {
		o.Metrics = metrics.New("")
	}
	if o.Now == nil {
		o.Now = time.Now //nolint:forbidigo // the only clock of the package; callers that need another one pass it
	}
	s := &Server{
		options:  o,
		limits:   l,
		records:  o.Records.WithAttrs([]slog.Attr{slog.String(scopeKey, scope)}),
		losses:   &losses{metrics: o.Metrics},
		requests: make(chan struct{}, l.connections),
		byCount:  rate.NewLimiter(l.recordRate, l.recordBurst),
		bySize:   rate.NewLimiter(l.byteRate, l.byteBurst),
	}
	s.shared.left.Store(int64(l.shared))
	var err error
	s.Server, err = unixsock.Open(ctx, unixsock.Options{
		Path: o.Path, DirMode: o.DirMode, Mode: o.Mode, AllowedUIDs: o.AllowedUIDs,
		Connections: l.connections, Grace: l.grace, Patience: l.patience, Header: l.header, End: l.end,
		Trouble: s.losses, Log: o.Log, Now: o.Now,
	})
	if err != nil {
		return nil, err
	}
	return s, nil
}

// Serve relays records until ctx ends. Then it removes the socket, if it is still its own, and returns within about a
// second.
func (s *Server) Serve(ctx context.Context) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /log", s.post)
	var reports sync.WaitGroup
	reports.Go(func() { s.losses.reportEach(ctx, s.limits.report, s.options.Log) })
	s.Server.Serve(ctx, mux)
	reports.Wait()
}
