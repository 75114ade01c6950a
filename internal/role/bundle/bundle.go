// Package bundle is the role "istio-cni bundle": it writes the data for a bug report as a tar file, compressed with gzip.
//
// It promises that values which others wrote are in it for known keys only: in a CNI configuration the keys of the specification, the
// reference plugins and this program, in an object of Kubernetes those of package redact. Any other value is replaced by its type and length.
// It has no other program's log. In texts of this program credentials of known forms are replaced, and so is the agent's token; a text that
// quotes a secret of another form keeps it. It is bounded in size and time; what is missing is listed with the reason. It changes
// nothing on the node, and never writes to a terminal.
//
// Start at Run; core/archive writes the file.
package bundle

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/command"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/archive"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redact"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/selfcheck"
)

const head = `NAME:
   istio-cni bundle - collects the data for a bug report (root)

USAGE:
   istio-cni bundle [POD] [flags] > file.tar.gz   POD is NAMESPACE/NAME, or NAME with -n NAMESPACE

README.txt in it explains each file, missing.txt lists missing data and the reasons. It has the rules and differences
of the named pod or, by default, of all pods of this node that are not captured. In other programs' configurations it
has the values of known keys only, and type and length of other values. Read it before you pass it on: it has names of
pods, addresses and this program's settings and logs. kubectl istio-cni bundle adds Kubernetes objects, events and the
proxy's log, with the user's rights.

EXIT CODES:
   %d  done; parts may be missing
   %d  the node agent does not answer (the node's files are written), or the output cannot be written
   %d  a bad value or flag

`

// timeout bounds the whole command.
const timeout = time.Minute

type config struct {
	command.Bundle

	// pod is NAMESPACE/NAME, or "".
	pod string
}

// Run runs the role.
func Run(c applet.Call) int {
	c.Stderr = printable.NewWriter(c.Stderr) // the standard output is passed on unchanged
	var cfg config
	operands, args := settings.Operands(cfg.Rows(), c.Args)
	c.Args = args
	if code, done := service.Settings(c, "bundle", cfg.Rows(), head); done {
		return code
	}
	var err error
	switch {
	case len(operands) == 1:
		cfg.pod, err = command.PodOf(operands[0], cfg.Namespace)
	case len(operands) > 1 || cfg.Namespace != "":
		err = errors.New("name one pod: NAMESPACE/NAME, or NAME and -n NAMESPACE")
	}
	switch {
	case err != nil:
		return c.Refuse("bundle", err)
	case c.Columns() > 0:
		return c.Refuse("bundle", errors.New("the bundle is a compressed tar file: redirect the standard output to a file"))
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	answered, err := write(ctx, c.Stdout, cfg)
	switch {
	case err != nil:
		return c.Fail(fmt.Errorf("writing the bundle: %w", err))
	case answered != nil:
		return c.Fail(fmt.Errorf("%w: the bundle has the files of the node only", answered))
	}
	return applet.ExitOK
}

const readme = `A report of one node that shows why its pods are in the mesh or not. Texts of other programs have the values of known
keys only; a type with a length, such as "string of 40 bytes", replaces any other value.

  missing.txt      the missing data, and the reasons
  version.txt      the program that wrote this
  agent.json       the node agent: version, settings with their sources, and the plugin's configuration in force
  readiness.json   the parts of the agent's readiness
  selftest.json    the self-test's verdict: the backends that work on this node
  cni-dir.txt      the directory of CNI configurations
  cni/             its configurations
  kubeconfig.yaml  the plugin's access to the API server
  audit.json       the state of each pod of the node
  pods/            a pod in detail: decision, live rules with differences, listeners
  decisions.json   the plugin's decisions, and the pods that it left alone without a report
  agent.log        the agent's log, with the plugin's records
  plugin.log       the plugin's records in its own file
  metrics.txt      the agent's metrics
  cluster/         the named pod, the agent's DaemonSet and ConfigMap, as far as the agent may read them
`

const (
	askTimeout  = 15 * time.Second
	serviceDir  = "/var/run/secrets/kubernetes.io/serviceaccount"
	pluginsFile = "istio-cni.log"
)

// reporter collects the parts of the bundle.
type reporter struct {
	config
	*archive.Archive

	// from is the time of the bundle's first records.
	from time.Time
	info agentapi.AgentInfo
}

// write writes a bundle. answered is the agent's error, nil if the agent answers. Parts that a tenant can make long come last.
func write(ctx context.Context, w io.Writer, c config) (answered, err error) {
	began := time.Now() //nolint:forbidigo // the only clock of the role
	r := reporter{config: c, from: began.Add(-c.Since)}
	text, answered := archive.Within(ctx, r.part(agentapi.BundleAgent))
	if answered == nil {
		if answered = json.Unmarshal(text, &r.info); answered != nil {
			answered = fmt.Errorf("asking the node agent for its %s: %w", agentapi.BundleAgent, answered)
		}
	}
	host, _ := os.Hostname()
	kubeconfig, secrets, kubeconfigErr := r.kubeconfig(ctx)
	r.Archive = archive.New(w, began, secrets, cmp.Or(c.Node, r.info.Node, host))
	r.Add("README.txt", []byte(readme), nil)
	r.Add("version.txt", []byte(applet.Build()+"\n"), nil)
	r.Add("agent.json", text, answered)
	r.Collect(ctx, "selftest.json", r.file(selfcheck.FileName))
	r.directory(ctx)
	r.Add("kubeconfig.yaml", kubeconfig, kubeconfigErr)
	if gone := (*agentapi.Refusal)(nil); answered == nil || errors.As(answered, &gone) {
		r.Collect(ctx, "readiness.json", r.part(agentapi.BundleReadiness))
		r.Collect(ctx, "metrics.txt", r.part(agentapi.BundleMetrics))
		r.Collect(ctx, "agent.log", r.part(agentapi.BundleLog))
		r.Collect(ctx, "decisions.json", r.decisions)
		r.Collect(ctx, "plugin.log", r.pluginLog)
		r.cluster(ctx)
		r.pods(ctx)
		return nil, r.Close()
	}
	r.Collect(ctx, "plugin.log", r.pluginLog)
	r.cluster(ctx)
	return answered, r.Close()
}

// ask returns a function that sends one request on its own connection, so that no request depends on an earlier connection.
func ask[T any](r *reporter, request func(context.Context, *agentapi.Agent) (T, error)) func(context.Context) (T, error) {
	return func(ctx context.Context) (T, error) {
		ctx, cancel := context.WithTimeout(ctx, askTimeout)
		defer cancel()
		return agentapi.Ask(ctx, r.Socket, "", func(agent *agentapi.Agent) (T, error) { return request(ctx, agent) })
	}
}

// part returns a part of the agent.
func (r *reporter) part(part agentapi.BundlePart) func(context.Context) ([]byte, error) {
	return ask(r, func(ctx context.Context, a *agentapi.Agent) ([]byte, error) { return a.Bundle(ctx, part, r.from) })
}

// file returns a file of the run directory.
func (r *reporter) file(name string) func(context.Context) ([]byte, error) {
	return func(context.Context) ([]byte, error) {
		text, _, err := hostfs.ReadFile(filepath.Join(filepath.Dir(r.Socket), name), archive.MaxAll)
		return text, err
	}
}

// pluginLog returns the lines of the plugin's file that are its records, and counts the other lines, which may be another program's.
func (r *reporter) pluginLog(ctx context.Context) ([]byte, error) {
	all, err := r.file(pluginsFile)(ctx)
	records, others := make([]byte, 0, len(all)), 0
	for line := range bytes.Lines(all) {
		var record struct {
			Time       time.Time
			Level, Msg string
		}
		if json.Unmarshal(line, &record) == nil && !record.Time.IsZero() && record.Level != "" && record.Msg != "" {
			records = append(records, line...)
		} else {
			others++
		}
	}
	if others > 0 {
		records = fmt.Appendf(records, "left out: %d lines that are no records of the plugin\n", others)
	}
	return records, err
}

// kubeconfig returns the plugin's kubeconfig without credentials, and the credentials that are visible here.
func (r *reporter) kubeconfig(ctx context.Context) (clean []byte, secrets []string, err error) {
	token, _ := archive.Within(ctx, func(context.Context) (token []byte, err error) {
		token, _, err = hostfs.ReadFile(filepath.Join(serviceDir, "token"), archive.MaxAll)
		return token, err
	})
	text, err := archive.Within(ctx, r.file(cniconf.KubeconfigName))
	if err == nil {
		clean, secrets, err = kube.WithoutCredentials(text, redact.Mark)
	}
	return clean, append(secrets, string(token)), err
}

// netDirs are the directories of CNI configurations. The bundle shows the first one that exists: the agent's container and the node
// have different paths.
func (r *reporter) netDirs() (dirs []string) {
	if r.NetDir != "" {
		return []string{r.NetDir}
	}
	dirs = []string{r.setting("--mounted-cni-net-dir"), r.setting("--cni-net-dir"), "/host/etc/cni/net.d", "/etc/cni/net.d"}
	return slices.DeleteFunc(dirs, func(dir string) bool { return dir == "" })
}

// directory adds the list of the CNI directory and its configurations.
func (r *reporter) directory(ctx context.Context) {
	dirs := r.netDirs()
	found, err := archive.Within(ctx, func(context.Context) (listing, error) {
		var errs []error
		for _, dir := range dirs {
			l, err := list(dir)
			if err == nil {
				return l, nil
			}
			errs = append(errs, err)
		}
		return listing{}, errors.Join(errs...)
	})
	r.Add("cni-dir.txt", found.text, err)
	for _, name := range found.confs {
		r.Collect(ctx, archive.Confs+archive.FileName(strings.ReplaceAll(string(r.Text([]byte(name))), "/", "_")), func(context.Context) ([]byte, error) {
			text, _, err := hostfs.ReadFile(filepath.Join(found.dir, name), archive.MaxAll)
			return text, err
		})
	}
}

// listing is a directory's content: a line for each entry and each of its entries, and the names of the configurations.
type listing struct {
	dir   string
	text  []byte
	confs []string
}

func list(dir string) (listing, error) {
	l := listing{dir: dir, text: []byte(printable.Quote(dir, archive.MaxAll) + "\n")}
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		l.entry(e.Name())
		if e.IsDir() {
			below, _ := os.ReadDir(filepath.Join(dir, e.Name())) // an unreadable directory is another program's
			for _, b := range below {
				l.entry(e.Name() + "/" + b.Name())
			}
		}
	}
	return l, err
}

// entry adds an entry, unless the entry was removed meanwhile.
func (l *listing) entry(name string) {
	file := filepath.Join(l.dir, name)
	info, err := os.Lstat(file)
	if err != nil {
		return
	}
	l.text = fmt.Appendf(l.text, "%s %8d %s %s", info.Mode(), info.Size(), info.ModTime().UTC().Format(time.RFC3339), printable.Quote(name, archive.MaxAll))
	if target, err := os.Readlink(file); err == nil {
		l.text = fmt.Appendf(l.text, " -> %s", printable.Quote(target, archive.MaxAll))
	}
	l.text = append(l.text, '\n')
	if !info.IsDir() && (cniconf.Candidate(name) || cniconf.Saved(name)) {
		l.confs = append(l.confs, name)
	}
}

// pods adds the state of all pods and the details of the named pod or of all pods that are not captured.
func (r *reporter) pods(ctx context.Context) {
	all, err := archive.Within(ctx, ask(r, func(ctx context.Context, a *agentapi.Agent) ([]audit.Status, error) { return a.Audit(ctx, false, "") }))
	text, _ := json.Marshal(all) // strings and times only
	r.Add("audit.json", text, err)
	var wanted []string
	if r.pod != "" {
		wanted = []string{r.pod}
	} else {
		for _, s := range all {
			if s.Faulty() {
				wanted = append(wanted, s.Namespace+"/"+s.Pod)
			}
		}
	}
	for _, pod := range wanted {
		namespace, name, _ := strings.Cut(pod, "/")
		r.Collect(ctx, "pods/"+archive.FileName(namespace+"_"+name)+".json", ask(r, func(ctx context.Context, a *agentapi.Agent) ([]byte, error) {
			return a.AuditPod(ctx, namespace, name, nil)
		}))
	}
}

// cluster adds the Kubernetes objects that the agent's own rights, which the plugin's kubeconfig has, allow.
func (r *reporter) cluster(ctx context.Context) {
	r.Miss(archive.Cluster, errElsewhere)
	client, err := kube.NewClient(kube.Config{Kubeconfig: filepath.Join(filepath.Dir(r.Socket), cniconf.KubeconfigName), Timeout: askTimeout / 3})
	if err != nil {
		r.Miss(archive.Cluster, err)
		return
	}
	defer client.Close()
	objects := [][3]string{{"daemonsets", r.info.Namespace, r.setting("--daemonset-name")}, {"configmaps", r.info.Namespace, r.setting("--config-map")}}
	if namespace, name, _ := strings.Cut(r.pod, "/"); name != "" {
		objects = append(objects, [3]string{"pods", namespace, name})
	}
	for _, o := range objects {
		if o[2] == "" {
			continue
		}
		r.Collect(ctx, archive.Cluster+o[0]+".json", func(ctx context.Context) ([]byte, error) { return client.Object(ctx, o[0], o[1], o[2]) })
	}
}

// errElsewhere says which objects are never here.
var errElsewhere = errors.New("the agent has no right to read events, webhook configurations, namespaces and the proxy's log: " +
	"kubectl istio-cni bundle reads them with the user's rights")

// setting returns the value of a setting of the agent, "" without an answer of the agent.
func (r *reporter) setting(name string) string {
	for _, s := range r.info.Settings {
		if s.Name == name {
			return s.Value
		}
	}
	return ""
}

func (r *reporter) decisions(ctx context.Context) (text []byte, err error) {
	all, err := ask(r, func(ctx context.Context, a *agentapi.Agent) ([]agentapi.Report, error) { return a.Decisions(ctx) })(ctx)
	all = slices.DeleteFunc(all, func(one agentapi.Report) bool {
		// An entry of the watch has the time of the pod's start, and is relevant as long as the pod exists.
		return one.Time.Before(r.from) && one.Source != agentapi.SourceWatch && r.pod != one.Namespace+"/"+one.Pod
	})
	if err == nil {
		text, err = json.Marshal(all)
	}
	return text, err
}
