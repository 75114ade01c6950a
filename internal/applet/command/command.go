// Package command has the flags of the commands that a node agent and the kubectl plugin share.
//
// It promises that both read the same flags with the same meaning, because each command has one table of settings. It builds for every
// system that kubectl runs on, and sends no request.
//
// Start at Pods; target.go has the forms in which a pod is named.
package command

import (
	"errors"
	"fmt"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/settings"
)

// Place selects pods by namespace.
type Place struct {
	Namespace string
	// Everywhere is the flag -A, which is the default.
	Everywhere bool
}

func (p *Place) rows(use string) []settings.Setting {
	return []settings.Setting{
		{Name: "namespace", Aliases: []string{"n"}, Arg: "NAME", Use: use, Value: settings.Text(&p.Namespace, nil)},
		{Name: "all-namespaces", Aliases: []string{"A"}, Default: "false", Use: "pods of all namespaces: the default", Value: settings.Bool(&p.Everywhere)},
	}
}

// Check refuses contradictory flags.
func (p *Place) Check() error {
	if p.Everywhere && p.Namespace != "" {
		return errors.New("--all-namespaces and --namespace contradict each other")
	}
	return nil
}

// Pods are the flags of the command pods.
type Pods struct {
	Place

	Selector              string
	States                []string
	Bypassing, All, Check bool
	Watch                 bool
	Output                output.Form
	Socket                string
	// Names are the operands, see Named.
	Names []Target
}

// Rows are the flags.
func (p *Pods) Rows() []settings.Setting {
	return slices.Concat([]settings.Setting{
		{Name: "bypassing", Default: "false", Use: "only pods that are not captured", Value: settings.Bool(&p.Bypassing)},
		{Name: "state", Arg: "STATES", Use: "only pods in one of these states, between commas", Value: settings.Choices(&p.States, append(audit.States(), audit.Outside)...)},
	}, p.rows("only pods of this namespace"), []settings.Setting{
		{Name: "selector", Aliases: []string{"l"}, Arg: "LABELS", Use: "only pods with these labels, in the form of kubectl's -l", Value: settings.Text(&p.Selector, nil)},
		{Name: "all", Aliases: []string{"a"}, Default: "false", Use: "also pods that the plugin leaves alone", Value: settings.Bool(&p.All)},
		{Name: "check", Default: "false", Use: "inspect every pod now", Value: settings.Bool(&p.Check)},
		{Name: "watch", Aliases: []string{"w"}, Default: "false", Use: "then print each pod that changes, until Ctrl-C", Value: settings.Bool(&p.Watch)},
		output.Flag(&p.Output),
		socket(&p.Socket),
	})
}

// Named reads the operands, names of pods, and refuses contradictory flags.
func (p *Pods) Named(operands []string) (err error) {
	for _, text := range operands {
		t, bad := ParseTarget(text, p.Namespace)
		if bad == nil && t.Kind != Pod {
			bad = workloadError(text)
		}
		p.Names, err = append(p.Names, t), errors.Join(err, bad)
	}
	err = errors.Join(err, p.Place.Check())
	switch {
	case err == nil && p.Watch && p.Check:
		err = errors.New("--watch and --check contradict each other: a check of all pods uses up the time for inspections")
	case err == nil && p.Watch && p.Output != output.Table:
		err = errTableOnly
	}
	return err
}

// Selects reports whether the flags and operands select a pod.
func (p *Pods) Selects(s audit.Status) bool {
	named := len(p.Names) > 0
	switch {
	case p.Namespace != "" && s.Namespace != p.Namespace, p.Bypassing && !s.Faulty():
		return false
	case named && !slices.ContainsFunc(p.Names, func(t Target) bool { return t.Is(s) }):
		return false
	case len(p.States) > 0:
		return slices.Contains(p.States, string(s.State))
	}
	return p.All || named || s.State != audit.Outside
}

// ByState reports whether the flags select pods by their state.
func (p *Pods) ByState() bool { return p.Bypassing || len(p.States) > 0 }

// Missing returns an error that names what the flags and operands name but no pod of all has, nil if there is nothing such. where ends the
// sentence.
func (p *Pods) Missing(all []audit.Status, where string) error {
	for _, t := range p.Names {
		if !slices.ContainsFunc(all, t.Is) {
			return fmt.Errorf("no pod %q with a network of its own %s", t, where)
		}
	}
	labels := ""
	if p.Selector != "" {
		labels = fmt.Sprintf(" labelled %q", p.Selector)
	}
	there := slices.ContainsFunc(all, func(s audit.Status) bool { return p.Namespace == "" || s.Namespace == p.Namespace })
	switch {
	case there, p.Namespace+p.Selector == "":
		return nil
	case p.Namespace != "":
		return fmt.Errorf("namespace %q has no pod%s with a network of its own %s", p.Namespace, labels, where)
	}
	return fmt.Errorf("no pod%s has a network of its own %s", labels, where)
}

// Decisions are the flags of the command decisions.
type Decisions struct {
	Place

	Socket, Pod string
	AsJSON      bool
	Watch       bool
	Output      output.Form
	Limit       int
	Since       time.Duration
}

// Rows are the flags.
func (d *Decisions) Rows() []settings.Setting {
	return slices.Concat([]settings.Setting{
		socket(&d.Socket),
		{Name: "pod", Arg: "TEXT", Use: "only pods whose NAMESPACE/NAME contains this text", Value: settings.Text(&d.Pod, nil)},
	}, d.rows("only decisions about pods of this namespace"), []settings.Setting{
		{Name: "limit", Arg: "N", Use: "only the N latest decisions; 0 for all", Value: settings.Number(&d.Limit, math.MaxInt32)},
		{
			Name: "since", Arg: "DURATION", Use: "only decisions of the last DURATION, such as 10m",
			Value: settings.Duration(&d.Since, time.Nanosecond, 0),
		},
		{Name: "watch", Aliases: []string{"w"}, Default: "false", Use: "then print each new decision, until Ctrl-C", Value: settings.Bool(&d.Watch)},
		output.Flag(&d.Output),
		{Name: "json", Default: "false", Use: "the same as -o json", Value: settings.Bool(&d.AsJSON)},
	})
}

// Check refuses contradictory flags, and applies --json.
func (d *Decisions) Check() error {
	if d.AsJSON {
		d.Output = output.JSON
	}
	err := d.Place.Check()
	if err == nil && d.Watch && d.Output != output.Table {
		err = errTableOnly
	}
	return err
}

// errTableOnly is the error for a watch as JSON or YAML.
var errTableOnly = errors.New("--watch prints a table only")

// Why are the flags of the command why.
type Why struct {
	Subject

	To, From, UID, GID string
	Port               int
	UDP, Rules         bool
	Output             output.Form
}

const maxPort = 1<<16 - 1

// Rows are the flags.
func (w *Why) Rows() []settings.Setting {
	return append([]settings.Setting{
		{Name: "to", Arg: "HOST:PORT", Use: "a packet that a process of the pod sends there; a name is resolved here, not in the pod", Value: settings.Text(&w.To, nil)},
		{Name: "uid", Arg: "N", Shown: "0", Use: "user of that process", Value: settings.Checked(&w.UID, checkID)},
		{Name: "gid", Arg: "N", Use: "group of that process; by default the number of --uid", Value: settings.Checked(&w.GID, checkID)},
		{Name: "from", Arg: "ADDRESS", Use: "a packet that arrives from there", Value: settings.Text(&w.From, nil)},
		{Name: "port", Arg: "N", Default: "0", Use: "port of the pod at which that packet arrives", Value: settings.Number(&w.Port, maxPort)},
		{Name: "udp", Default: "false", Use: "a UDP packet; otherwise the first packet of a TCP connection", Value: settings.Bool(&w.UDP)},
		{Name: "rules", Default: "false", Use: "print everything, with all rules, and do not cut anything", Value: settings.Bool(&w.Rules)},
		output.Flag(&w.Output),
	}, w.Subject.Rows()...)
}

// checkID checks the number of a user or group.
func checkID(text string) error {
	if n, err := strconv.ParseUint(text, 10, 32); err != nil || n == 1<<32-1 {
		return errors.New("want a number from 0 to 4294967294")
	}
	return nil
}

// Trace are the flags of the command trace.
type Trace struct {
	Subject

	To, From, Port, For string
	Output              output.Form
}

// Rows are the flags.
func (t *Trace) Rows() []settings.Setting {
	return append([]settings.Setting{
		{Name: "to", Arg: "ADDRESS[:PORT]", Use: "only packets to this address or network", Value: settings.Text(&t.To, nil)},
		{Name: "from", Arg: "ADDRESS", Use: "only packets from this address or network", Value: settings.Text(&t.From, nil)},
		{Name: "port", Arg: "N", Use: "only packets to this port", Value: settings.Text(&t.Port, nil)},
		{Name: "for", Arg: "DURATION", Default: "30s", Use: "how long", Value: settings.Text(&t.For, nil)},
		output.Flag(&t.Output),
	}, t.Subject.Rows()...)
}

// ForAmbient is a value of the doctor's flag --for.
const ForAmbient = "ambient"

// The agent's default directories.
const (
	DefaultNetDir = "/host/etc/cni/net.d"
	DefaultBinDir = "/host/opt/cni/bin"
)

// Doctor are the flags of the command doctor.
type Doctor struct {
	HostRoot, RunDir, NetDir, ServiceAccount, Node, Namespace string
	BinDirs                                                   []string
	For                                                       string
	Output                                                    output.Form
}

// Rows are the flags. The node agent's settings have its names, variables and defaults.
func (d *Doctor) Rows() []settings.Setting {
	return settings.Named("", []settings.Setting{
		output.Flag(&d.Output),
		{
			Name: "for", FlagOnly: true, Arg: "MODE", Use: "ambient: check as well what ambient mode needs; the default if the agent serves it",
			Value: settings.Choice(&d.For, "", ForAmbient),
		},
		{
			Name: "host-root", FlagOnly: true, Arg: "DIR", Use: "where the node's file system is seen; without it /host or the root of the node's first process",
			Value: settings.Text(&d.HostRoot, settings.Optional(settings.AbsolutePath)),
		},
		{Name: "cni-agent-run-dir", Arg: "DIR", Default: cniconf.DefaultRunDir, Use: "the agent's run directory", Value: settings.Text(&d.RunDir, settings.AbsolutePath)},
		{
			Name: "mounted-cni-net-dir", Arg: "DIR", Default: DefaultNetDir, Use: "where the agent installs configuration, as mounted in its container",
			Value: settings.Text(&d.NetDir, settings.AbsolutePath),
		},
		{
			Name: "mounted-cni-bin-dirs", Arg: "DIRS", Default: DefaultBinDir, Use: "where the agent installs the plugin, as mounted in its container",
			Value: settings.List(&d.BinDirs, ",", 1, settings.AbsolutePath),
		},
		{
			Name: "service-account-dir", Arg: "DIR", Default: "/var/run/secrets/kubernetes.io/serviceaccount", Use: "directory of token and ca.crt",
			Value: settings.Text(&d.ServiceAccount, settings.AbsolutePath),
		},
		{
			Name: "node-name", Arg: "NAME", Env: []string{"NODE_NAME", "KUBERNETES_NODE_NAME"}, Use: "this node; without it the host's name",
			Value: settings.Text(&d.Node, nil),
		},
		{Name: "pod-namespace", Arg: "NAME", Use: "the agent's namespace; by default the namespace in its token", Value: settings.Text(&d.Namespace, nil)},
	}...)
}

// Bundle are the flags of the command bundle.
type Bundle struct {
	Socket, Namespace, NetDir, Node string
	Since                           time.Duration
}

// Rows are the flags.
func (b *Bundle) Rows() []settings.Setting {
	const since = 2 * time.Hour
	return []settings.Setting{
		{Name: "namespace", Aliases: []string{"n"}, Arg: "NAME", Use: "the pod's namespace", Value: settings.Text(&b.Namespace, nil)},
		{
			Name: "since", Arg: "DURATION", Default: since.String(), Use: "only log and decisions of the last DURATION",
			Value: settings.Duration(&b.Since, time.Nanosecond, 0),
		},
		{
			Name: "net-dir", Arg: "DIR", Use: "the directory of CNI configurations; by default the agent's or, without an agent, /etc/cni/net.d",
			Value: settings.Text(&b.NetDir, nil),
		},
		{
			Name: "node-name", Arg: "NAME", Env: []string{"KUBERNETES_NODE_NAME", "NODE_NAME"},
			Use: "the node in the names of the files; by default the agent's", Value: settings.Text(&b.Node, nil),
		},
		socket(&b.Socket),
	}
}

// socket is the flag --socket.
func socket(into *string) settings.Setting {
	return settings.Setting{
		Name: "socket", Arg: "FILE", Env: []string{"ISTIO_CNI_POD_SOCKET"}, Default: path.Join(cniconf.DefaultRunDir, cniconf.PodSocketName),
		Use: "the node agent's socket, in its run directory", Value: settings.Text(into, nil),
	}
}

// Subject has exactly one of Pod (NAMESPACE/NAME), PID and NetNS (a name of ip netns, or a path).
type Subject struct {
	Pod, Namespace string
	PID            int
	NetNS          string
	// Socket is the node agent's socket, used for a pod.
	Socket string
}

const maxPID = 1 << 22 // PID_MAX_LIMIT

// Rows returns the flags. The pod is the command's operand.
func (s *Subject) Rows() []settings.Setting {
	return []settings.Setting{
		{Name: "namespace", Aliases: []string{"n"}, Arg: "NAME", Use: "the pod's namespace", Value: settings.Text(&s.Namespace, nil)},
		{Name: "pid", Arg: "N", Default: "0", Use: "a process in the network namespace", Local: true, Value: settings.Number(&s.PID, maxPID)},
		{Name: "netns", Arg: "NAME|PATH", Use: "the network namespace: a name as in ip netns, or a path", Local: true, Value: settings.Text(&s.NetNS, nil)},
		socket(&s.Socket),
	}
}

// Check reads the operands and returns an error unless exactly one subject is named, and for an invalid pod name.
func (s *Subject) Check(operands []string) (err error) {
	given := len(operands)
	for _, one := range []bool{s.PID != 0, s.NetNS != ""} {
		if one {
			given++
		}
	}
	switch {
	case given != 1:
		return errors.New("name one of a pod (NAMESPACE/NAME, or NAME and -n NAMESPACE), --pid and --netns")
	case len(operands) == 0 && s.Namespace != "":
		return errors.New("--namespace without the name of a pod")
	case len(operands) == 1:
		s.Pod, err = PodOf(operands[0], s.Namespace)
	}
	return err
}

// Path returns the path of the network namespace, or its name.
func (s *Subject) Path() string {
	if s.PID != 0 {
		return "/proc/" + strconv.Itoa(s.PID) + "/ns/net"
	}
	return s.NetNS
}

// Split returns the namespace and the name of the pod, which Check has accepted.
func (s *Subject) Split() (namespace, name string) {
	namespace, name, _ = strings.Cut(s.Pod, "/")
	return namespace, name
}

// LeftOut returns an error that names the pods that a check of all pods left out, nil if there are none.
func LeftOut(all []audit.Status) error {
	const most = 10
	var names []string
	mesh := 0
	for _, s := range all {
		if s.LeftOut {
			names = append(names, printable.Text(s.Namespace+"/"+s.Pod, maxName))
		}
		if s.State != audit.Outside {
			mesh++
		}
	}
	if names == nil {
		return nil
	}
	return fmt.Errorf("--check left out %d of %d pods, which are listed with older results: %s; an agent inspects all pods for 45s at most, "+
		"and for half a percent of the time: try again later", len(names), mesh, printable.Some(names, most))
}

// maxName bounds NAMESPACE/NAME in bytes.
const maxName = 512
