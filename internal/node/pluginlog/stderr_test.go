package pluginlog

import (
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// valve is a writer that blocks until it is opened, or for each write.
type valve struct {
	agenttest.Buffer

	open chan struct{}
}

func (v *valve) Write(p []byte) (int, error) {
	<-v.open
	return v.Buffer.Write(p)
}

func TestStderr_Hangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now() // the bubble's clock, which moves only while all wait
		v := &valve{open: make(chan struct{})}
		l := open(options{Stderr: v})
		log := l.Logger()
		for range 50 {
			log.Info("early")
		}
		l.Configure("", LevelDebug)
		for range 50 {
			log.Debug("late")
		}
		check.Equal(t, time.Since(began), 0, "100 records took")
		l.Close()
		if got := time.Since(began); got != DefaultTimeout || got >= 100*time.Millisecond {
			t.Errorf("with Close it took %v, want the timeout of %v", got, DefaultTimeout)
		}
		close(v.open)
		synctest.Wait()
		want := append(strings.Fields(strings.Repeat("early ", 50)), strings.Fields(strings.Repeat("late ", 50))...)
		check.Diff(t, "written in the end", want, messages(t, v.String()))
	})
}

func TestStderr_Slow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := &valve{open: make(chan struct{})}
		l := open(options{Stderr: v})
		go func() {
			time.Sleep(20 * time.Millisecond)
			v.open <- struct{}{}
			time.Sleep(20 * time.Millisecond)
			close(v.open)
		}()
		l.Logger().Info("a")
		synctest.Wait() // a is being written
		l.Logger().Info("b")
		l.Logger().Info("c")
		l.Close()
		check.Diff(t, "result", []string{"a", "b", "c"}, messages(t, v.String()))
	})
}

func TestStderr_Closed(t *testing.T) {
	for name, prepare := range map[string]func(reader *os.File){
		"closed_by_the_reader": func(r *os.File) { _ = r.Close() },
		"never_read":           func(*os.File) {},
	} {
		t.Run(name, func(t *testing.T) {
			reader, writer, err := os.Pipe()
			check.OK(t, err)
			defer func() { _ = reader.Close() }()
			prepare(reader)
			cmd := agenttest.Child(t, roleVariable+"=talker")
			cmd.Stderr = writer
			out, err := cmd.Output()
			_ = writer.Close()
			if err != nil || string(out) != "went on to the end" {
				t.Errorf("plugin ended with %v and wrote %q", err, out)
			}
		})
	}
}
