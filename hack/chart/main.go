package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"

	"helm.sh/helm/v3/pkg/chart/loader"
	"sigs.k8s.io/yaml"
)

func main() {
	if err := run(os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "chart:", err)
		os.Exit(1) //nolint:forbidigo // this is a main.go, too
	}
}

// files is a flag that may be repeated.
type files []string

func (f *files) String() string     { return strings.Join(*f, ",") }
func (f *files) Set(s string) error { *f = append(*f, s); return nil }

// errDiffers is returned by --check if the file differs.
var errDiffers = errors.New("is out of step with the chart: run hack/manifests.sh and review the difference")

func run(args []string, out, problems io.Writer) error {
	flags := flag.NewFlagSet("chart", flag.ContinueOnError)
	flags.SetOutput(problems)
	dir := flags.String("chart", "manifests/istio-cni", "`directory` of the chart")
	r := defaultRelease()
	flags.StringVar(&r.Name, "name", r.Name, "`name` of the release")
	flags.StringVar(&r.Namespace, "namespace", r.Namespace, "`namespace` of the release")
	flags.StringVar(&r.Tool, "managed-by", r.Tool, "`tool` that the label managed-by names")
	flags.StringVar(&r.Kubernetes, "kube-version", r.Kubernetes, "`version` of the API server")
	header := flags.String("header", "", "comment `text` above the objects")
	check := flags.String("check", "", "print nothing: fail if this `file` is not the rendering")
	all := flags.String("all", "", "print nothing: write each rendering that there is a test of into this new `directory`")
	helm := flags.String("helm", "", "print nothing: fail if this `program`, a Helm, renders other objects of what there is a test of")
	var values files
	flags.Var(&values, "f", "`file` with values, may be given several times")
	if err := flags.Parse(args); err != nil {
		return fmt.Errorf("reading flags: %w", err)
	}
	given, err := readValues(values)
	if err != nil {
		return err
	}
	chart, err := loader.LoadDir(*dir)
	if err != nil {
		return fmt.Errorf("loading chart %q: %w", *dir, err)
	}
	if *all != "" {
		return writeAll(chart, r, *dir, *all)
	}
	if *helm != "" {
		return compareHelm(context.Background(), chart, r, *dir, *helm)
	}
	rendered, err := render(chart, r, given)
	if err != nil {
		return err
	}
	text := append(comment(*header), rendered.text()...)
	if *check == "" {
		_, err = out.Write(text)
		return err
	}
	have, err := os.ReadFile(*check)
	if err != nil {
		return fmt.Errorf("reading the file to check: %w", err)
	}
	if !bytes.Equal(have, text) {
		return fmt.Errorf("%q %w", *check, errDiffers)
	}
	return nil
}

// readValues merges values files; later files override earlier ones, as with helm -f.
func readValues(names []string) (map[string]any, error) {
	var texts []string
	for _, name := range names {
		text, err := os.ReadFile(name) //nolint:gosec // the file that the user names
		if err != nil {
			return nil, fmt.Errorf("reading values: %w", err)
		}
		texts = append(texts, string(text))
	}
	return parseValues(texts...)
}

// parseValues merges texts with values.
func parseValues(texts ...string) (map[string]any, error) {
	all := map[string]any{}
	for _, text := range texts {
		var one map[string]any
		if err := yaml.UnmarshalStrict([]byte(text), &one); err != nil {
			return nil, fmt.Errorf("reading values: %w:\n%s", err, text)
		}
		overlay(all, one)
	}
	return all, nil
}

// overlay merges maps recursively and replaces all other values.
func overlay(onto, from map[string]any) {
	for key, value := range from {
		below, isMap := value.(map[string]any)
		under, wasMap := onto[key].(map[string]any)
		if isMap && wasMap {
			overlay(under, below)
			continue
		}
		onto[key] = value
	}
}

// comment prefixes each line of a text with "#".
func comment(text string) []byte {
	var out []byte
	for line := range strings.Lines(text) {
		out = fmt.Appendf(out, "%s\n", strings.TrimRight("# "+line, " \n"))
	}
	return out
}
