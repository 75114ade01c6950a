// Package why is the role "istio-cni why": it explains one pod or network namespace from injection to kernel, and the way of a
// packet through its live rules.
//
// It promises to read what it shows at that moment, and an exit code for scripts. It changes nothing.
//
// Start at Run; page.go has the page, print.go its texts.
package why

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/command"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/inspect"
	"github.com/meshcni/istio-cni/internal/node/subject"
)

const head = `NAME:
   istio-cni why - why a pod is redirected or not, and where a packet goes (root)

USAGE:
   istio-cni why POD [flags]              by the node agent; POD is NAMESPACE/NAME, or NAME with -n NAMESPACE
   istio-cni why --pid N [flags]          by the live rules of a process' network namespace alone
   istio-cni why --netns NAME [flags]     the same for a name as in ip netns, or a path

It prints at most 24 lines: the verdict, what is known about the pod, the rules that differ from the wanted ones, the
answer and the remedy. With --to or --from it follows one packet through the live rules and prints the rules that
decide about it.

EXAMPLES:
   istio-cni why shop/web-0 --to postgres.shop.svc:5432
   istio-cni why shop/web-0 --to [fd00::7]:80 --uid 1337
   istio-cni why shop/web-0 --from 10.1.2.3 --port 8080
   istio-cni why --pid 4711 --to 10.0.0.10:53 --udp

EXIT CODES:
   %d  as the mesh wants it
   %d  the pod or namespace could not be read
   %d  a bad value or flag
   3  past the mesh, or another way than the mesh wants: a pod with a fault, a pod that is outside of the mesh (also
      by its own settings), a packet that no proxy gets because of a setting of the pod, a foreign rule, a route that
      ends its way, or because nothing listens at the proxy's port. Traffic that passes the proxy in every pod (the
      proxy's own traffic, its status ports, loopback, UDP other than redirected DNS) is as the mesh wants it.
   4  cannot tell

`

// timeout bounds the whole command.
const timeout = 20 * time.Second

type config struct {
	command.Why

	// resolved has the address of --to's host name, as a sentence.
	resolved string
}

// Run runs the role.
func Run(c applet.Call) int {
	var cfg config
	operands, args := settings.Operands(cfg.Rows(), c.Args)
	c.Args = args
	if code, done := service.Settings(c, "why", cfg.Rows(), head); done {
		return code
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	query, err := cfg.query(ctx, operands)
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
func (c *config) check(operands []string) error {
	err := c.Check(operands)
	switch {
	case err != nil:
		return err
	case c.To != "" && c.From != "":
		return errors.New("--to and --from are different packets")
	case c.From != "" && c.Port == 0:
		return errors.New("--from needs --port")
	case c.From == "" && c.Port != 0:
		return errors.New("--port is the pod's, of a packet that arrives: it needs --from")
	case c.To == "" && (c.UID != "" || c.GID != ""):
		return errors.New("--uid and --gid are those of a process that sends: they need --to")
	case c.To == "" && c.From == "" && c.UDP:
		return errors.New("--udp describes a packet: it needs --to or --from")
	}
	return nil
}

// explain reads the pod or the namespace.
func (c *config) explain(ctx context.Context, query url.Values, searchPath string) (document.Explanation, error) {
	if c.Pod != "" {
		return c.ask(ctx, query)
	}
	space, err := subject.Open(c.Path(), searchPath)
	if err != nil {
		return document.Explanation{}, err
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
func (c *config) query(ctx context.Context, operands []string) (url.Values, error) {
	query := url.Values{}
	if err := c.check(operands); err != nil || c.To == "" && c.From == "" {
		return query, err
	}
	query.Set("uid", c.UID)
	if c.GID != "" {
		query.Set("gid", c.GID)
	}
	query.Set("udp", fmt.Sprint(c.UDP))
	if c.From != "" {
		query.Set("direction", "in")
		query.Set("from", c.From)
		query.Set("port", fmt.Sprint(c.Port))
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
	host, port, err := net.SplitHostPort(c.To)
	if err != nil {
		return "", fmt.Errorf("flag --to: value %q: want HOST:PORT", c.To)
	}
	if _, err := netip.ParseAddr(host); err != nil {
		found, err := (&net.Resolver{}).LookupNetIP(ctx, "ip", host)
		if err != nil || len(found) == 0 {
			return "", fmt.Errorf("flag --to: resolving %q: %w", host, err)
		}
		host = found[0].Unmap().String()
		c.resolved = fmt.Sprintf("%s is %s", c.To, host)
		if len(found) > 1 {
			c.resolved += fmt.Sprintf(" here, and %d more addresses; the packet goes to the first", len(found)-1)
		}
	}
	return net.JoinHostPort(host, port), nil
}

// ask requests the pod from the node agent.
func (c *config) ask(ctx context.Context, query url.Values) (e document.Explanation, err error) {
	namespace, name := c.Split()
	text, err := subject.Ask(ctx, c.Socket, func(agent *agentapi.Agent) ([]byte, error) { return agent.AuditPod(ctx, namespace, name, query) })
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
func code(e document.Explanation) int {
	switch {
	case e.Answer != nil:
		return map[document.Wanted]int{document.AsWanted: applet.ExitOK, document.Past: applet.ExitPast, document.Unknown: applet.ExitUnknown}[e.Answer.Wanted]
	case byInit(e):
		return applet.ExitOK
	case e.State == audit.Outside:
		return applet.ExitPast
	case e.State == audit.NotInspected || e.State == audit.Sandboxed || e.InspectionError != "":
		return applet.ExitUnknown
	case e.State == audit.Captured:
		return applet.ExitOK
	}
	return applet.ExitPast
}

// byInit reports whether the pod's own init container has set up the redirection, and the rules are there.
func byInit(e document.Explanation) bool {
	return e.State == audit.Outside && e.Decision.Reason == string(sidecar.IstioInit) && e.ByRules == audit.Captured
}

// show prints JSON, YAML or the page.
func (c *config) show(call applet.Call, e document.Explanation) error {
	return output.Print(call.Stdout, e, c.Output, func() error {
		return output.Show(call, c.page(e, call.Columns()))
	})
}
