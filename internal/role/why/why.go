// Package why is the role "istio-cni why": it explains one pod or network namespace from injection to kernel, and the way of a
// packet through its live rules.
//
// It promises to read what it shows at that moment, and an exit code for scripts. It changes nothing.
//
// Start at Run; print.go has the page.
package why

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/inspect"
	"github.com/meshcni/istio-cni/internal/node/subject"
)

const head = `NAME:
   istio-cni why - why a pod is redirected or not, and where a packet goes (root)

USAGE:
   istio-cni why NAMESPACE/NAME [flags]   by the node agent
   istio-cni why --pid N [flags]          by the live rules of a process' network namespace alone
   istio-cni why --netns NAME [flags]     the same for a name as in ip netns, or a path

Without --to and --from it prints one page: injection, decision, state, exceptions, listeners and the live rules against the wanted
ones. With --to or --from it follows one packet through the live rules and prints each rule that it meets. The last line is the answer.

EXAMPLES:
   istio-cni why shop/web-0 --to postgres.shop.svc:5432
   istio-cni why shop/web-0 --to [fd00::7]:80 --uid 1337
   istio-cni why shop/web-0 --from 10.1.2.3 --port 8080
   istio-cni why --pid 4711 --to 10.0.0.10:53 --udp

EXIT CODES:
   %d  as the mesh wants it
   %d  the pod or namespace could not be read
   %d  a bad value or flag
   3  past the mesh, or another way than the mesh wants: a pod with a fault, a pod that is outside of the mesh (also by its own
      settings), a packet that no proxy gets because of a setting of the pod, a foreign rule, a route that ends its way, or because
      nothing listens at the proxy's port. Traffic that passes the proxy in every pod (the proxy's own traffic, its status ports,
      loopback, UDP other than redirected DNS) is as the mesh wants it.
   4  cannot tell

`

// Exit codes besides the codes of package applet.
const (
	exitPast    = 3
	exitUnknown = 4
)

// timeout bounds the whole command.
const timeout = 20 * time.Second

type config struct {
	subject.Subject

	to, from, uid, gid string
	port               int
	udp                bool
	output             output.Form
	// resolved has the address of --to's host name, as a sentence.
	resolved string
}

const maxPort = 1<<16 - 1

func (c *config) rows() []settings.Setting {
	return append([]settings.Setting{
		{Name: "to", Arg: "HOST:PORT", Use: "a packet that a process of the pod sends there; a name is resolved here, not in the pod", Value: settings.Text(&c.to, nil)},
		{Name: "uid", Arg: "N", Default: "0", Use: "user of that process", Value: settings.Checked(&c.uid, checkID)},
		{Name: "gid", Arg: "N", Use: "group of that process; by default the number of --uid", Value: settings.Checked(&c.gid, checkID)},
		{Name: "from", Arg: "ADDRESS", Use: "a packet that arrives from there", Value: settings.Text(&c.from, nil)},
		{Name: "port", Arg: "N", Default: "0", Use: "port of the pod at which that packet arrives", Value: settings.Number(&c.port, maxPort)},
		{Name: "udp", Default: "false", Use: "a UDP packet; otherwise the first packet of a TCP connection", Value: settings.Bool(&c.udp)},
		output.Flag(&c.output),
	}, c.Rows()...)
}

// checkID checks the number of a user or group.
func checkID(text string) error {
	if n, err := strconv.ParseUint(text, 10, 32); err != nil || n == 1<<32-1 {
		return errors.New("want a number from 0 to 4294967294")
	}
	return nil
}

// Run runs the role.
func Run(c applet.Call) int {
	var cfg config
	cfg.Pod, c.Args = settings.Operand(cfg.rows(), c.Args)
	if code, done := service.Settings(c, "why", cfg.rows(), head); done {
		return code
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	query, err := cfg.query(ctx)
	if err != nil {
		return c.Refuse("why", err)
	}
	searchPath, _ := c.Getenv("PATH")
	e, err := cfg.explain(ctx, query, searchPath)
	if err == nil {
		head := output.NewHead(c.Getenv)
		e.Node, e.Time = head.Node, head.Time
		err = cfg.show(c, e)
	}
	if err != nil {
		return c.Fail(err)
	}
	return code(e)
}

// check refuses contradictory arguments.
func (c *config) check() error {
	err := c.Check()
	switch {
	case err != nil:
		return err
	case c.to != "" && c.from != "":
		return errors.New("--to and --from are different packets")
	case c.from != "" && c.port == 0:
		return errors.New("--from needs --port")
	case c.from == "" && c.port != 0:
		return errors.New("--port is the pod's, of a packet that arrives: it needs --from")
	}
	return nil
}

// explain reads the pod or the namespace.
func (c *config) explain(ctx context.Context, query url.Values, searchPath string) (inspect.Explanation, error) {
	if c.Pod != "" {
		return c.ask(ctx, query)
	}
	space, err := c.Open(searchPath)
	if err != nil {
		return inspect.Explanation{}, err
	}
	defer space.NetNS.Close()
	e, err := inspect.Alone(ctx, space)
	if err != nil || len(query) == 0 || e.State == audit.Sandboxed { // a sandbox's packets do not meet the rules
		return e, err
	}
	question, err := inspect.Parse(query.Get)
	if err != nil {
		return e, err
	}
	answer, err := inspect.Walk(ctx, space, nil, question)
	e.Answer = &answer
	return e, err
}

// query checks the arguments and returns the packet as parameters. A host name is resolved here because the pod's resolver may be the
// proxy's.
func (c *config) query(ctx context.Context) (url.Values, error) {
	query := url.Values{}
	if err := c.check(); err != nil || c.to == "" && c.from == "" {
		return query, err
	}
	query.Set("uid", c.uid)
	if c.gid != "" {
		query.Set("gid", c.gid)
	}
	query.Set("udp", fmt.Sprint(c.udp))
	if c.from != "" {
		query.Set("direction", "in")
		query.Set("from", c.from)
		query.Set("port", fmt.Sprint(c.port))
	} else {
		to, err := c.resolve(ctx)
		if err != nil {
			return nil, err
		}
		query.Set("to", to)
	}
	_, err := inspect.Parse(query.Get)
	return query, err
}

// resolve returns the address of --to.
func (c *config) resolve(ctx context.Context) (string, error) {
	host, port, err := net.SplitHostPort(c.to)
	if err != nil {
		return "", fmt.Errorf("flag --to: value %q: want HOST:PORT", c.to)
	}
	if _, err := netip.ParseAddr(host); err != nil {
		found, err := (&net.Resolver{}).LookupNetIP(ctx, "ip", host)
		if err != nil || len(found) == 0 {
			return "", fmt.Errorf("flag --to: resolving %q: %w", host, err)
		}
		host = found[0].Unmap().String()
		c.resolved = fmt.Sprintf("%s is %s", c.to, host)
		if len(found) > 1 {
			c.resolved += fmt.Sprintf(" here, and %d more addresses; the packet goes to the first", len(found)-1)
		}
	}
	return net.JoinHostPort(host, port), nil
}

// ask requests the pod from the node agent.
func (c *config) ask(ctx context.Context, query url.Values) (e inspect.Explanation, err error) {
	var text []byte
	err = c.Ask(ctx, func(agent *agentapi.Agent, namespace, name string) error {
		text, err = agent.AuditPod(ctx, namespace, name, query)
		return err
	})
	if refusal := (*agentapi.Refusal)(nil); errors.As(err, &refusal) && refusal.Status == http.StatusNotFound {
		err = fmt.Errorf("%w%s", err, hint(refusal.Message))
	}
	if err == nil {
		err = json.Unmarshal(text, &e)
	}
	return e, err
}

// hint returns advice for an agent's answer that the pod or the question is unknown.
func hint(message string) string {
	switch {
	case strings.Contains(message, "page not found"): // an error of net/http
		return " (the agent is of an older version than this program: upgrade it, or use --pid or --netns, which need no agent)"
	case strings.Contains(message, "audit"):
		return " (--pid and --netns need no agent)"
	case strings.Contains(message, "is on node"):
		return " (run the command there, or kubectl istio-cni why)"
	}
	return ""
}

// code returns the exit code of the packet or, without a packet, of the pod.
func code(e inspect.Explanation) int {
	switch {
	case e.Answer != nil:
		return map[inspect.Wanted]int{inspect.AsWanted: applet.ExitOK, inspect.Past: exitPast, inspect.Unknown: exitUnknown}[e.Answer.Wanted]
	case byInit(e):
		return applet.ExitOK
	case e.State == audit.Outside:
		return exitPast
	case e.State == audit.NotInspected || e.State == audit.Sandboxed || e.InspectionError != "":
		return exitUnknown
	case e.State == audit.Captured:
		return applet.ExitOK
	}
	return exitPast
}

// byInit reports whether the pod's own init container has set up the redirection, and the rules are there.
func byInit(e inspect.Explanation) bool {
	return e.State == audit.Outside && e.Decision.Reason == string(sidecar.IstioInit) && e.ByRules == audit.Captured
}

// show prints JSON, YAML or the page.
func (c *config) show(call applet.Call, e inspect.Explanation) error {
	return output.Print(call.Stdout, e, c.output, func() error {
		_, err := io.WriteString(call.Stdout, c.page(e, call.Columns()))
		return err
	})
}
