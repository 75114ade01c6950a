package fleet

import (
	"archive/tar"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/command"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/archive"
)

const bundleReadme = `A report of a cluster, which kubectl istio-cni bundle wrote with the user's rights. A type with a length, such as "string of
40 bytes", replaces each value without a known key, among them the values of environment variables and all arguments.

  missing.txt               the missing data and nodes, and the reasons
  cluster/daemonsets.json   the DaemonSet of the node agents
  cluster/configmaps.json   its settings
  cluster/webhooks.json     the mutating webhooks, which inject the sidecar: names, selectors and their order
  cluster/events.txt        the last events in the namespace of the agents; messages of known reasons only
  cluster/pod.json          the named pod, cluster/namespace.json its namespace, cluster/pod-events.txt its events
  cluster/proxy.log         the last records of the pod's proxy from level info on, without the access log
  nodes/                    the files of each node, which the README.txt there explains
`

// bundle writes a tar.gz file with objects of the cluster and the files of all nodes, or of a pod's node.
func (f *fleet) bundle(ctx context.Context, flags *command.Bundle, c call) (int, error) {
	if f.Columns() > 0 {
		return 0, &usageError{errors.New("the bundle is a tar.gz file: redirect the standard output to a file")}
	}
	pod, unplaced, err := f.named(ctx, c.operands, flags.Namespace)
	if err == nil {
		_, _, err = f.where(ctx)
	}
	if err != nil {
		return 0, err
	}
	args := given(c.in, flags.Rows(), "namespace")
	if pod != "" {
		args = append([]string{command.PodKey(pod)}, args...)
	}
	f.steps = true
	out := archive.New(f.Stdout, time.Now(), nil) //nolint:forbidigo // the only clock of the plugin
	out.Add("README.txt", []byte(bundleReadme), nil)
	f.cluster(ctx, out, pod)
	var nodes []node
	if err = unplaced; err == nil {
		nodes, err = f.each(ctx, atOnce, func(ctx context.Context, a agent) error { return f.files(ctx, out, a, args) })
	}
	for _, n := range nodes {
		if n.Error != "" {
			out.Miss("nodes/"+n.Name, errors.New(n.Error))
		}
	}
	if err != nil {
		out.Miss("nodes/", err)
	}
	code := applet.ExitOK
	if failed(nodes) {
		code = applet.ExitError
	}
	if closed := out.Close(); closed != nil {
		err = cmp.Or(err, fmt.Errorf("writing the bundle: %w", closed))
	}
	return code, err
}

// named returns the pod that the operands name, "" without one. unplaced is the error of a pod that is on no node.
func (f *fleet) named(ctx context.Context, operands []string, namespace string) (pod string, unplaced, err error) {
	switch {
	case len(operands) == 0 && namespace != "":
		return "", nil, errNamespaceAlone
	case len(operands) == 0:
		return "", nil, nil
	}
	f.nodes = nil
	_, pod, err = f.target(ctx, operands[0], namespace)
	switch {
	case pod == "":
		return "", nil, err
	case len(f.nodes) == 0:
		unplaced = err
	}
	return pod, unplaced, nil
}

// files adds the files of a node's bundle as they arrive.
func (f *fleet) files(ctx context.Context, out *archive.Archive, a agent, args []string) error {
	if a.problem != "" {
		return errors.New(a.problem)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	from, to := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		_, err := f.stream(ctx, to, f.exec(a, append([]string{"bundle"}, args...)...)...)
		_ = to.CloseWithError(err)
		ended <- err
	}()
	err := unpack(out, "nodes/"+archive.FileName(a.node)+"/", from)
	_ = from.CloseWithError(err)
	if err != nil {
		cancel()
	}
	if cause := <-ended; err == nil || errors.Is(err, cause) {
		err = cmp.Or(explained(cause, "bundle"), cause)
	}
	return err
}

// unpack adds the files of a node's tar.gz file below a directory. Each is in memory until it is complete, so that a node which stops
// sending holds back no other node. Names are the node's: only plain ones get into the archive.
func unpack(out *archive.Archive, dir string, from io.Reader) error {
	zipped, err := gzip.NewReader(from)
	if err != nil {
		return fmt.Errorf("reading its bundle: %w", err)
	}
	plain := &io.LimitedReader{R: zipped, N: maxBundle}
	in := tar.NewReader(plain)
	for files := 0; ; files++ {
		header, err := in.Next()
		switch {
		case errors.Is(err, io.EOF):
			_, err = io.Copy(io.Discard, plain) // the checksum, and the exit of kubectl
			return err
		case err == nil && files < maxFiles:
			err = add(out, dir, header, in)
		}
		if plain.N == 0 || files == maxFiles {
			err = fmt.Errorf("it has more than %d MiB or %d files", maxBundle>>20, maxFiles)
		}
		if err != nil {
			return fmt.Errorf("reading its bundle: %w", err)
		}
	}
}

// add adds a file of a node's bundle.
func add(out *archive.Archive, dir string, header *tar.Header, in io.Reader) error {
	_, name, _ := strings.Cut(header.Name, "/")
	parts := strings.Split(name, "/")
	for i, part := range parts {
		parts[i] = archive.FileName(part)
	}
	name = dir + strings.Join(parts[:min(len(parts), maxDirs)], "/")
	if header.Typeflag != tar.TypeReg || header.Size > maxFile {
		out.Miss(name, fmt.Errorf("left out: it is no file of at most %d MiB", maxFile>>20))
		return nil
	}
	text := make([]byte, header.Size)
	if _, err := io.ReadFull(in, text); err != nil {
		return err
	}
	return out.Write(name, text)
}

// cluster adds what the user's rights allow to read of the cluster.
func (f *fleet) cluster(ctx context.Context, out *archive.Archive, pod string) {
	before := out.Missing()
	get := func(name string, args ...string) []byte {
		text, err := f.kubectl(ctx, maxObjects, append([]string{"get", "-o", "json"}, args...)...)
		if err != nil {
			err = fmt.Errorf("kubectl get %s: %w", args[0], err)
		}
		if strings.HasSuffix(name, ".txt") && err == nil {
			text, err = events(out, text)
		}
		out.Add(archive.Cluster+name, text, err)
		return text
	}
	sets := get("daemonsets.json", "daemonsets.apps", "-n", f.home, "-l", f.selector)
	if names := configMaps(sets); len(names) > 0 {
		get("configmaps.json", slices.Concat([]string{"configmaps", "-n", f.home, "--"}, names)...)
	}
	get("webhooks.json", "mutatingwebhookconfigurations")
	get("events.txt", "events", "-n", f.home)
	if namespace, name, _ := strings.Cut(pod, "/"); name != "" {
		get("pod.json", "pods", "-n", namespace, "--", name)
		get("namespace.json", "namespaces", "--", namespace)
		get("pod-events.txt", "events", "-n", namespace, "--field-selector", "involvedObject.kind=Pod,involvedObject.name="+name)
		log := out.Records()
		_, err := f.stream(ctx, log, "logs", "-n", namespace, "-c", "istio-proxy", "--tail=2000", "--limit-bytes="+strconv.Itoa(maxLog), "--", name)
		if err != nil {
			out.Miss(archive.Cluster+"proxy.log", fmt.Errorf("kubectl logs: %w", err))
		}
		if text := log.Text(); err == nil || len(text) > 0 {
			out.Add(archive.Cluster+"proxy.log", text, nil)
		}
	}
	result := "done"
	if left := out.Missing() - before; left > 0 {
		result = fmt.Sprintf("done, but for %d parts, which missing.txt names", left)
	}
	_, _ = fmt.Fprintf(f.Stderr, "cluster: %s\n", result)
}

// configMaps returns the names of the ConfigMaps that are the environment of DaemonSets.
func configMaps(sets []byte) (names []string) {
	var list appsv1.DaemonSetList
	_ = json.Unmarshal(sets, &list) // an answer that is none is missing already
	for _, set := range list.Items {
		for _, c := range set.Spec.Template.Spec.Containers {
			for _, from := range c.EnvFrom {
				if ref := from.ConfigMapRef; ref != nil && !slices.Contains(names, ref.Name) {
					names = append(names, ref.Name)
				}
			}
		}
	}
	return names
}

// seen returns the last time and the number of an event. Which fields are set depends on its writer's API.
func seen(e *corev1.Event) (last time.Time, count int32) {
	series := ptr.Deref(e.Series, corev1.EventSeries{})
	all := []time.Time{e.CreationTimestamp.Time, e.EventTime.Time, e.LastTimestamp.Time, series.LastObservedTime.Time}
	return slices.MaxFunc(all, time.Time.Compare), max(e.Count, series.Count, 1)
}

// events returns a table of the last events in a list.
func events(out *archive.Archive, list []byte) ([]byte, error) {
	var all corev1.EventList
	if err := json.Unmarshal(list, &all); err != nil {
		return nil, errors.New("the output of kubectl is no list of events")
	}
	slices.SortStableFunc(all.Items, func(a, b corev1.Event) int {
		last, _ := seen(&a)
		other, _ := seen(&b)
		return other.Compare(last)
	})
	rows := [][]string{{"LAST", "TYPE", "REASON", "OBJECT", "COUNT", "MESSAGE"}}
	for _, e := range all.Items[:min(len(all.Items), maxEvents)] {
		on := e.InvolvedObject
		last, count := seen(&e)
		rows = append(rows, []string{
			last.UTC().Format(time.RFC3339), output.Cell(out.Message(e.Type)), output.Cell(out.Message(e.Reason)),
			output.Cell(strings.Join([]string{on.Kind, on.Namespace, on.Name, on.FieldPath}, "/")), fmt.Sprint(count),
			out.Event(e.Reason, e.Message),
		})
	}
	text := output.Columns(rows, 0)
	if more := len(all.Items) - maxEvents; more > 0 {
		text += fmt.Sprintf("left out: %d older events\n", more)
	}
	return []byte(text), nil
}
