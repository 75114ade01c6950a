package repair

import (
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/program"
)

// repairer is a process of the program under test.
type repairer struct {
	*program.Program
	fixture *fixture
}

// line is a line of its log.
type line struct{ Msg string }

// start starts the program, without ports.
func (l *fixture) start(kubeconfig string, args ...string) *repairer {
	l.Helper()
	return l.run(nil, shared.IstioCNI,
		append([]string{"repair", "--kubeconfig=" + kubeconfig, "--log_output_level=debug", "--host=elsewhere"}, args...)...)
}

// daemon starts the program with --run-as-daemon.
func (l *fixture) daemon(kubeconfig string, args ...string) *repairer {
	l.Helper()
	return l.start(kubeconfig, append(args, "--run-as-daemon")...)
}

// once runs the program to its end and checks that its exit status is 0.
func (l *fixture) once(kubeconfig string, args ...string) {
	l.Helper()
	if status := l.End(l.start(kubeconfig, args...).Program); status != 0 {
		l.Errorf("exit status %d", status)
	}
}

func (l *fixture) run(env []string, path string, args ...string) *repairer {
	l.Helper()
	return &repairer{l.Start(append([]string{"REPAIR_HEALTH_PORT=0", "REPAIR_MONITORING_PORT=0"}, env...), path, args...), l}
}

// stop is Stop.
func (r *repairer) stop() { r.fixture.Helper(); r.fixture.Stop(r.Program) }

// logged reports whether a log line has this message.
func (r *repairer) logged(message string) bool {
	r.fixture.Helper()
	all, err := program.Records[line](r.Program)
	r.fixture.Must(err)
	return slices.Contains(all, line{message})
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
		what := resourceOf(r)
		if (verb == "" || verb == r.Verb) && (resource == "" || resource == what) && (pod == "" || pod == r.Name) &&
			(status == 0 || status == r.Status) {
			count++
		}
	}
	return count
}

// resourceOf returns RESOURCE or RESOURCE/SUBRESOURCE.
func resourceOf(r cluster.Request) string {
	return strings.TrimSuffix(r.Resource+"/"+r.Subresource, "/")
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
