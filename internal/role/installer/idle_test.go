//go:build measure

// A measurement that takes a minute of quiet, and is no part of a plain run:
//
//	go test -tags measure,urfave_cli_no_docs -v -run TestIdleAgent ./internal/role/installer

package installer_test

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
)

// TestIdleAgent measures what an agent costs that has nothing to do, over a minute.
func TestIdleAgent(t *testing.T) {
	n := newNode(t)
	a := n.Start()
	a.AwaitReady()
	nodetest.Await(t, "the watch of the ConfigMap", func() error {
		if n.API.Watches() == 0 {
			return notYet("there is none")
		}
		return nil
	})
	requests, before := len(n.API.Requests()), usage(t, a.PID())
	timer := time.NewTimer(time.Minute)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-a.Exited():
		t.Fatalf("it has ended: %s", a.Log())
	}
	after := usage(t, a.PID())
	t.Logf("in a minute of quiet: %s of CPU, %d voluntary context switches, %d requests to the API server",
		after.cpu-before.cpu, after.switches-before.switches, len(n.API.Requests())-requests)
	t.Logf("memory: %s resident (anonymous %s, of files %s; peak %s), %d threads",
		after.status["VmRSS"], after.status["RssAnon"], after.status["RssFile"], after.status["VmHWM"], after.threads)
}

type used struct {
	cpu               time.Duration
	status            map[string]string
	switches, threads int
}

// usage reads a process's figures, see proc(5).
func usage(t *testing.T, pid int) used {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	u := used{status: map[string]string{}}
	for line := range strings.Lines(string(text)) {
		key, value, _ := strings.Cut(line, ":")
		u.status[key] = strings.Join(strings.Fields(value), " ")
	}
	u.threads, _ = strconv.Atoi(u.status["Threads"])
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		u.add(t, fmt.Sprintf("/proc/%d/task/%s", pid, task.Name()))
	}
	return u
}

// add adds one thread's share. Threads of Go do not end while nothing happens.
func (u *used) add(t *testing.T, dir string) {
	t.Helper()
	text, err := os.ReadFile(dir + "/schedstat") // nanoseconds on a processor come first
	if err != nil {
		t.Fatal(err)
	}
	nanoseconds, err := strconv.ParseInt(strings.Fields(string(text))[0], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	u.cpu += time.Duration(nanoseconds)
	status, err := os.ReadFile(dir + "/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if value, is := strings.CutPrefix(line, "voluntary_ctxt_switches:"); is {
			switches, _ := strconv.Atoi(strings.TrimSpace(value))
			u.switches += switches
		}
	}
}
