package pluginlog

import (
	"bytes"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// valve is a writer that blocks until it is opened.
type valve struct {
	open chan struct{}

	mu      sync.Mutex
	written bytes.Buffer
}

func (v *valve) Write(p []byte) (int, error) {
	<-v.open
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.written.Write(p)
}

func TestHangingStderrCostsNoMoreThanThePatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now() // the bubble's clock, which moves only while all wait
		v := &valve{open: make(chan struct{})}
		l := New(Options{Stderr: v})
		log := l.Logger()
		for range 50 {
			log.Info("early")
		}
		l.Configure("", LevelDebug)
		for range 50 {
			log.Debug("late")
		}
		if got := time.Since(began); got != DefaultPatience/3 {
			t.Errorf("100 records took %v, want a third of the patience", got)
		}
		l.Close()
		if got := time.Since(began); got != DefaultPatience {
			t.Errorf("with Close it took %v, want the patience", got)
		}
		if DefaultPatience >= 100*time.Millisecond {
			t.Errorf("patience is %v", DefaultPatience)
		}
		close(v.open)
		synctest.Wait()
		want := append(strings.Fields(strings.Repeat("early ", 50)), strings.Fields(strings.Repeat("late ", 50))...)
		if diff := cmp.Diff(want, messages(t, v.written.String())); diff != "" {
			t.Errorf("written in the end (-want +got):\n%s", diff)
		}
	})
}

func TestSlowStderrLosesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := &valve{open: make(chan struct{})}
		l := New(Options{Stderr: v})
		go func() {
			for range 3 {
				time.Sleep(20 * time.Millisecond)
				v.open <- struct{}{}
			}
		}()
		l.Logger().Info("a")
		l.Logger().Info("b")
		l.Logger().Info("c")
		l.Close()
		if diff := cmp.Diff([]string{"a", "b", "c"}, messages(t, v.written.String())); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}

func TestHangingStderrHoldsNoMoreThanItsLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := &valve{open: make(chan struct{})}
		s := newStream(v, 10)
		s.push([]byte("in the writer's hands\n"))
		synctest.Wait()
		s.push([]byte("waiting\n"))
		idle := s.push([]byte("too many\n"))
		s.push([]byte("1\n"))
		close(v.open)
		<-idle
		if got := v.written.String(); got != "in the writer's hands\nwaiting\n1\n" {
			t.Errorf("written is %q", got)
		}
	})
}

func TestPluginSurvivesItsStderr(t *testing.T) {
	for _, c := range []struct {
		name    string
		prepare func(reader *os.File)
	}{
		{"closed_by_the_reader", func(r *os.File) { _ = r.Close() }},
		{"never_read", func(*os.File) {}},
	} {
		t.Run(c.name, func(t *testing.T) {
			reader, writer, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = reader.Close() }()
			c.prepare(reader)
			cmd := child(t, "talker")
			cmd.Stderr = writer
			out, err := cmd.Output()
			_ = writer.Close()
			if err != nil || string(out) != "went on to the end" {
				t.Errorf("plugin ended with %v and said %q", err, out)
			}
		})
	}
}

func TestStderrThatDoesNotBlockIsWaitedFor(t *testing.T) {
	reader, writer, err := os.Pipe() // the kernel answers EAGAIN when it is full
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = reader.Close() }()
	read := make(chan int)
	go func() {
		var all bytes.Buffer
		_, _ = all.ReadFrom(reader)
		read <- bytes.Count(all.Bytes(), []byte("\n"))
	}()
	l := New(Options{Stderr: writer, Patience: generous})
	const records = 100
	for range records {
		l.Logger().Info("record", "text", strings.Repeat("x", maxText))
	}
	closeLog(t, l)
	_ = writer.Close()
	if got := <-read; got != records {
		t.Errorf("read %d records of %d", got, records)
	}
}
