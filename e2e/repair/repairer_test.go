package repair

import (
	"os"
	"strings"
	"syscall"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/program"
)

// repairer is a process of the program under test.
type repairer struct {
	*program.Program
	fixture *fixture
	// kubeconfig is the flag --kubeconfig with its value.
	kubeconfig string
}

// line is a line of its log.
type line struct{ Msg, Level, Pod, Reason, Message, Error, Warning string }

// start starts the program, without ports.
func (l *fixture) start(kubeconfig string, args ...string) *repairer {
	l.Helper()
	all := append([]string{"repair", "--kubeconfig=" + kubeconfig, "--log_output_level=debug", "--host=elsewhere"}, args...)
	r := l.run(nil, shared.IstioCNI, all...)
	r.kubeconfig = all[1]
	return r
}

// daemon starts the program with --run-as-daemon.
func (l *fixture) daemon(kubeconfig string, args ...string) *repairer {
	l.Helper()
	return l.start(kubeconfig, append(args, "--run-as-daemon")...)
}

// once runs the program to its end and returns its exit status.
func (l *fixture) once(kubeconfig string, args ...string) int {
	l.Helper()
	return l.start(kubeconfig, args...).end()
}

func (l *fixture) run(env []string, path string, args ...string) *repairer {
	l.Helper()
	p, err := program.Start(append([]string{"REPAIR_HEALTH_PORT=0", "REPAIR_MONITORING_PORT=0"}, env...), path, args...)
	l.Must(err)
	l.Cleanup(func() {
		p.Signal(os.Kill)
		<-p.Ended()
		if l.Failed() {
			l.Logf("the log of %q:\n%s", strings.Join(args, " "), strings.Join(p.Lines(), "\n"))
		}
	})
	return &repairer{Program: p, fixture: l}
}

// end waits for the exit and returns the exit status.
func (r *repairer) end() int {
	r.fixture.Helper()
	r.fixture.Until("the program's end", func() bool {
		select {
		case <-r.Ended():
			return true
		default:
			return false
		}
	})
	return r.Status()
}

// stop sends SIGTERM, as the kubelet does, and checks that the exit status is 0.
func (r *repairer) stop() {
	r.fixture.Helper()
	r.Signal(syscall.SIGTERM)
	if status := r.end(); status != 0 {
		r.fixture.Errorf("exit status %d", status)
	}
}

// log returns the log lines so far.
func (r *repairer) log() []line {
	r.fixture.Helper()
	all, err := program.Records[line](r.Program)
	r.fixture.Must(err)
	return all
}

// logged reports whether a log line has this message, and its error, message and warning contain all words.
func (r *repairer) logged(message string, words ...string) bool {
	r.fixture.Helper()
	for _, l := range r.log() {
		if l.Msg != message {
			continue
		}
		all := true
		for _, word := range words {
			all = all && strings.Contains(l.Error+l.Message+l.Warning, word)
		}
		if all {
			return true
		}
	}
	return false
}

// requests returns the requests of the fixture's ServiceAccount so far.
func (l *fixture) requests() []cluster.Request {
	l.Helper()
	all, err := shared.Requests(l.mesh, account)
	l.Must(err)
	return all
}

// count counts requests by verb, resource, pod and response status; zero values match all.
func (l *fixture) count(verb, resource, pod string, status int) (count int) {
	l.Helper()
	for _, r := range l.requests() {
		what := r.Resource
		if r.Subresource != "" {
			what += "/" + r.Subresource
		}
		if (verb == "" || verb == r.Verb) && (resource == "" || resource == what) && (pod == "" || pod == r.Name) &&
			(status == 0 || status == r.Status) {
			count++
		}
	}
	return count
}

// noForbiddenRequests checks that no request was forbidden or invalid.
func (l *fixture) noForbiddenRequests() {
	l.Helper()
	for _, r := range l.requests() {
		if r.Status == 401 || r.Status == 403 || r.Status == 400 {
			l.Errorf("forbidden or invalid: %s %s: %d", r.Verb, r.URI, r.Status)
		}
	}
}
