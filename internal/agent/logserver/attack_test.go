package logserver

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// endless is a body without end: a batch with one endless record, or with many small records.
type endless struct{ piece string }

func (e endless) Read(p []byte) (int, error) {
	n := 0
	for n < len(p) {
		n += copy(p[n:], e.piece)
	}
	return n, nil
}

const head = "POST /log HTTP/1.1\r\nHost: unix\r\nContent-Type: application/json\r\n"

// attacker has a log server to attack.
type attacker struct {
	*testing.T
	*fixture
}

// answered waits until the server closes the connection.
func (a attacker) answered(conn net.Conn) {
	a.Helper()
	if _, err := io.Copy(io.Discard, conn); err != nil && os.IsTimeout(err) {
		a.Errorf("the server does not close the connection: %v", err)
	}
}

// raw sends bytes and waits until the server closes the connection.
func (a attacker) raw(text io.Reader) {
	a.Helper()
	conn := a.Dial(a.T)
	_, _ = io.Copy(conn, text)
	a.answered(conn)
}

func TestAttack_OrdinaryBatchArrives(t *testing.T) {
	for name, attack := range map[string]func(a attacker){
		"endless_record": func(a attacker) {
			_, _ = a.post(a.T, io.MultiReader(strings.NewReader(`["`), endless{"xxxxxxxx"}))
		},
		"endless_records": func(a attacker) {
			_, _ = a.post(a.T, io.MultiReader(strings.NewReader(`[""`), endless{`,""`}))
		},
		"largest_body_of_smallest_elements": func(a attacker) {
			if code, err := a.post(a.T, strings.NewReader("[0"+strings.Repeat(",0", maxBody/2-4)+"]")); code != 200 || err != nil {
				a.Errorf("answer %d, %v", code, err)
			}
		},
		"claims_a_huge_body": func(a attacker) {
			a.raw(strings.NewReader(head + "Content-Length: 9223372036854775807\r\n\r\n["))
		},
		"endless_header": func(a attacker) { a.raw(io.MultiReader(strings.NewReader(head+"X: "), endless{"xxxxxxxx"})) },
		"no_http":        func(a attacker) { a.raw(strings.NewReader("\x16\x03\x01\x00\xff\x00\n\n\r\n\r\n")) },
		"half_open": func(a attacker) {
			conn := a.Dial(a.T)
			check.OK(a.T, conn.(*net.UnixConn).CloseWrite())
			a.answered(conn)
		},
		"body_cut_short": func(a attacker) {
			conn := a.Dial(a.T)
			_, _ = io.WriteString(conn, head+"Content-Length: 1000\r\n\r\n["+quoted)
			_ = conn.Close()
			agenttest.Eventually(a.T, "the batch is not counted", func() bool { return a.outcomes()["rejected"] == 1 })
		},
		"answer_never_read": func(a attacker) {
			conn := a.Dial(a.T)
			for range 1000 {
				if _, err := io.WriteString(conn, head+"Content-Length: 2\r\n\r\n[]"); err != nil {
					break
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := start(t, nil)
			b.ordinary(t)
			attack(attacker{t, b})
			b.ordinary(t)
			if got := b.log.String(); strings.Count(got, "\n") > 1 {
				t.Errorf("the log has %q", got)
			}
		})
	}
}

// TestAttack_HangingLog: no more goroutines wait than the limit of connections, and the agent ends.
func TestAttack_HangingLog(t *testing.T) {
	release, reached := make(chan struct{}), make(chan struct{})
	b := start(t, func(o *Options) {
		o.Records = slog.NewTextHandler(hanging{sync.OnceFunc(func() { close(reached) }), release}, nil)
	})
	before := runtime.NumGoroutine()
	body := "[" + quoted + "]"
	for range 100 {
		_, _ = io.WriteString(b.Dial(t), head+"Content-Length: "+strconv.Itoa(len(body))+"\r\n\r\n"+body)
	}
	<-reached
	if got := runtime.NumGoroutine() - before; got > 3*connections {
		t.Errorf("%d goroutines more", got)
	}
	b.Stop()
	close(release)
}

const quoted = `"{\"level\":\"info\",\"time\":\"2026-05-04T03:02:01Z\",\"msg\":\"x\"}"`

type hanging struct {
	reached func()
	release chan struct{}
}

func (h hanging) Write(p []byte) (int, error) {
	h.reached()
	<-h.release
	return len(p), nil
}

// TestAttack_Memory measures the heap while clients send the largest bodies.
func TestAttack_Memory(t *testing.T) {
	const most = 140 << 20
	b := start(t, func(o *Options) { o.Records = slog.DiscardHandler })
	used := func() int {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int(m.HeapAlloc)
	}
	runtime.GC()
	calm, peak := used(), 0
	stop := agenttest.Go(t, func(ctx context.Context) {
		for tick := time.NewTicker(time.Millisecond); ctx.Err() == nil; <-tick.C {
			peak = max(peak, used())
		}
	})
	bodies := []string{
		"[" + strings.Repeat(quoted+",", maxBody/(len(quoted)+1)-10) + quoted + "]", // many records
		`["` + strings.Repeat("x", maxBody-100) + `"]`,                              // one record
		"[" + strings.Repeat(`"",`, maxBody/3-100) + `""]`,                          // many empty records
		strings.Repeat("[", maxBody-100),
	}
	var all sync.WaitGroup
	for i := range 100 {
		all.Go(func() { _, _ = b.post(t, strings.NewReader(bodies[i%len(bodies)])) })
	}
	all.Wait()
	// A slow machine still reads requests whose clients have given up, one at a time.
	agenttest.Eventually(t, "an ordinary batch arrives afterwards", func() bool {
		code, _ := b.post(t, strings.NewReader("["+quoted+"]"))
		return code == http.StatusOK
	})
	stop()
	t.Logf("calm %d MiB, under attack %d MiB", calm>>20, peak>>20)
	if peak > calm+most {
		t.Errorf("%d MiB", (peak-calm)>>20)
	}
}
