package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"helm.sh/helm/v3/pkg/chart"
	"sigs.k8s.io/yaml"
)

// compareHelm renders each sample with a Helm program. It fails at the first whose objects differ from those of render.
func compareHelm(ctx context.Context, c *chart.Chart, r release, dir, program string) error {
	all, err := samples(c, dir)
	if err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "helm")
	if err != nil {
		return fmt.Errorf("making a directory for values: %w", err)
	}
	defer os.RemoveAll(work) //nolint:errcheck // a temporary directory
	file := filepath.Join(work, "values.yaml")
	for _, s := range all {
		given, err := parseValues(s.Values...)
		if err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
		want, err := render(c, r, given)
		if err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
		text, err := yaml.Marshal(given)
		if err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
		if err = os.WriteFile(file, text, 0o600); err != nil { //nolint:forbidigo // not read concurrently
			return fmt.Errorf("writing values: %w", err)
		}
		have, err := renderBy(ctx, r, dir, program, file)
		if err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
		if !bytes.Equal(have.text(), want.text()) {
			return fmt.Errorf("%s: %s renders other objects:\n%s", s.Name, program, have.text())
		}
	}
	return nil
}

// renderBy runs "helm template".
func renderBy(ctx context.Context, r release, dir, program, values string) (rendering, error) {
	command := exec.CommandContext(ctx, program, "template", r.Name, dir, "--namespace", r.Namespace, "--kube-version", r.Kubernetes, "-f", values) //nolint:gosec // the program that the user names
	var problems bytes.Buffer
	command.Stderr = &problems
	out, err := command.Output()
	if err != nil {
		return rendering{}, fmt.Errorf("running %s template: %w\n%s", program, err, problems.String())
	}
	var text strings.Builder
	for line := range strings.Lines(string(out)) {
		if !strings.HasPrefix(line, "# Source: ") {
			text.WriteString(line)
		}
	}
	return collect(map[string]string{program: text.String()})
}
