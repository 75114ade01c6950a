// Package why is the role "istio-cni why": it explains one pod or network namespace from injection to kernel, and the way of a
// packet through its live rules.
//
// It promises that what it shows is read at that moment, and an exit code for scripts. It changes nothing.
//
// Start at Run; print.go has the page.
package why

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"path"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/inspect"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/redirection"
)

const head = `NAME:
   istio-cni why - why a pod is redirected or not, and where a packet goes (root)

USAGE:
   istio-cni why NAMESPACE/NAME [flags]   by the node agent
   istio-cni why --pid N [flags]          by the live rules of a process' network namespace alone
   istio-cni why --netns PATH [flags]     the same for a path

With --to or --from it follows a packet through the live rules.

EXIT CODES:
   %d  as the mesh wants it
   %d  the pod or namespace could not be read
   %d  a bad value or flag
   3  past the mesh
   4  unknown

`

// Exit codes besides those of applet.
const (
	exitPast    = 3
	exitUnknown = 4
)

// timeout bounds the whole command.
const timeout = 20 * time.Second

type config struct {
	socket, pod, netns, to, from string
	pid, port, uid               int
	udp, asJSON                  bool
}

const (
	maxPID  = 1 << 22 // PID_MAX_LIMIT
	maxPort = 1<<16 - 1
	maxUID  = 1<<32 - 2
)

func (c *config) rows() []settings.Setting {
	return []settings.Setting{
		{Name: "to", Arg: "HOST:PORT", Use: "a packet that a process of the pod sends there", Value: settings.Text(&c.to, nil)},
		{Name: "uid", Arg: "N", Default: "0", Use: "user and group of that process", Value: settings.Number(&c.uid, maxUID)},
		{Name: "from", Arg: "ADDRESS", Use: "a packet that arrives from there", Value: settings.Text(&c.from, nil)},
		{Name: "port", Arg: "N", Default: "0", Use: "port of the pod at which that packet arrives", Value: settings.Number(&c.port, maxPort)},
		{Name: "udp", Default: "false", Use: "a packet of UDP; otherwise the first one of a TCP connection", Value: settings.Bool(&c.udp)},
		{Name: "pid", Arg: "N", Default: "0", Use: "a process in the network namespace", Value: settings.Number(&c.pid, maxPID)},
		{Name: "netns", Arg: "PATH", Use: "the network namespace", Value: settings.Text(&c.netns, nil)},
		{Name: "json", Default: "false", Use: "print JSON", Value: settings.Bool(&c.asJSON)},
		{
			Name: "socket", Arg: "FILE", Env: []string{"ISTIO_CNI_POD_SOCKET"}, Default: path.Join(cniconf.DefaultRunDir, agentapi.SocketName),
			Use: "the node agent's socket", Value: settings.Text(&c.socket, nil),
		},
	}
}

// Run runs the role.
func Run(c applet.Call) int {
	var cfg config
	if len(c.Args) > 0 && !strings.HasPrefix(c.Args[0], "-") {
		cfg.pod, c.Args = c.Args[0], c.Args[1:]
	}
	if code, done := service.Settings(c, "why", cfg.rows(), head, applet.ExitOK, applet.ExitError, applet.ExitUsage); done {
		return code
	}
	if err := cfg.check(); err != nil {
		_, _ = fmt.Fprintf(c.Stderr, "error: %v; see istio-cni why --help\n", err)
		return applet.ExitUsage
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	searchPath, _ := c.Getenv("PATH")
	e, err := cfg.explain(ctx, searchPath)
	if err == nil {
		err = cfg.show(c.Stdout, e)
	}
	if err != nil {
		_, _ = fmt.Fprintf(c.Stderr, "error: %v\n", err)
		return applet.ExitError
	}
	return code(e)
}

// check refuses contradictory arguments.
func (c *config) check() error {
	var subjects int
	for _, given := range []bool{c.pod != "", c.pid != 0, c.netns != ""} {
		if given {
			subjects++
		}
	}
	switch {
	case subjects != 1:
		return errors.New("name one of NAMESPACE/NAME, --pid and --netns")
	case c.pod != "" && strings.Count(c.pod, "/") != 1:
		return fmt.Errorf("pod %q: want NAMESPACE/NAME", c.pod)
	case c.to != "" && c.from != "":
		return errors.New("--to and --from are different packets")
	case c.from != "" && c.port == 0:
		return errors.New("--from needs --port")
	}
	return nil
}

// explain reads the pod or the namespace.
func (c *config) explain(ctx context.Context, searchPath string) (inspect.Explanation, error) {
	query, err := c.query(ctx)
	if err != nil {
		return inspect.Explanation{}, err
	}
	if c.pod != "" {
		return c.ask(ctx, query)
	}
	file := c.netns
	if c.pid != 0 {
		file = fmt.Sprintf("/proc/%d/ns/net", c.pid)
	}
	n, err := netns.Open(file)
	if err != nil {
		return inspect.Explanation{}, err
	}
	defer n.Close()
	space := redirection.Namespace{NetNS: n, Tools: iptables.Host{Path: searchPath}, Log: slog.New(slog.DiscardHandler)}
	// Nothing is known of the pod: the rules of one without settings explain those that it has in common.
	spec := redirect.Default()
	var e inspect.Explanation
	if e.Detail, err = inspect.Read(ctx, space, &spec); err != nil {
		return e, err
	}
	if len(query) > 0 {
		question, err := inspect.Parse(query.Get)
		if err != nil {
			return e, err
		}
		answer, err := inspect.Walk(ctx, space, &spec, question)
		if err != nil {
			return e, err
		}
		e.Answer = &answer
	}
	return e, nil
}

// query has the packet as parameters. A host name is resolved here, as the pod's resolver may be the proxy's.
func (c *config) query(ctx context.Context) (url.Values, error) {
	query := url.Values{}
	if c.to == "" && c.from == "" {
		return query, nil
	}
	query.Set("uid", fmt.Sprint(c.uid))
	query.Set("udp", fmt.Sprint(c.udp))
	if c.from != "" {
		query.Set("direction", "in")
		query.Set("from", c.from)
		query.Set("port", fmt.Sprint(c.port))
		return query, nil
	}
	host, port, err := net.SplitHostPort(c.to)
	if err != nil {
		return nil, fmt.Errorf("flag --to: value %q: want HOST:PORT", c.to)
	}
	if _, err := netip.ParseAddr(host); err != nil {
		found, err := (&net.Resolver{}).LookupNetIP(ctx, "ip", host)
		if err != nil || len(found) == 0 {
			return nil, fmt.Errorf("flag --to: resolving %q: %w", host, err)
		}
		host = found[0].Unmap().String()
	}
	query.Set("to", net.JoinHostPort(host, port))
	return query, nil
}

// ask requests the pod from the node agent.
func (c *config) ask(ctx context.Context, query url.Values) (e inspect.Explanation, err error) {
	agent, err := agentapi.Dial(ctx, c.socket)
	if errors.Is(err, fs.ErrNotExist) {
		return e, fmt.Errorf("%w (is the node agent running? --pid and --netns need none)", err)
	}
	if err != nil {
		return e, err
	}
	defer agent.Close() //nolint:errcheck // no more writes follow
	namespace, name, _ := strings.Cut(c.pod, "/")
	text, err := agent.AuditPod(ctx, namespace, name, query)
	if refusal := (*agentapi.Refusal)(nil); errors.As(err, &refusal) && refusal.Status == http.StatusNotFound {
		err = fmt.Errorf("%w (see kubectl get pod -o wide for its node; the audit may be switched off)", err)
	}
	if err == nil {
		err = json.Unmarshal(text, &e)
	}
	return e, err
}

// code is the exit code: that of the packet if there is one, else of the pod.
func code(e inspect.Explanation) int {
	switch {
	case e.Answer != nil:
		return map[inspect.Wanted]int{inspect.AsWanted: applet.ExitOK, inspect.Past: exitPast, inspect.Unknown: exitUnknown}[e.Answer.Wanted]
	case e.InspectionError != "":
		return exitUnknown
	case e.Status.State != "" && e.Status.Faulty():
		return exitPast
	}
	return applet.ExitOK
}

// show prints JSON or the page.
func (c *config) show(w io.Writer, e inspect.Explanation) error {
	if c.asJSON {
		text, err := json.MarshalIndent(e, "", "  ")
		if err == nil {
			_, err = w.Write(append(printable.Lines(text), '\n'))
		}
		return err
	}
	_, err := io.WriteString(w, page(e))
	return err
}
