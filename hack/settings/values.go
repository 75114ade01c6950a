package main

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strings"

	"sigs.k8s.io/yaml"
)

// value is a row of the chart's values: its path, with the comment above it.
type value struct{ path, comment string }

var keyLine = regexp.MustCompile(`^( +)([A-Za-z]\w*):(?: .+)?$`)

// values is the table of the chart's values: each with its default and the comment above it in values.yaml. A value without a
// comment belongs to the default of the one above it.
func values() (string, error) {
	text, err := os.ReadFile("manifests/istio-cni/values.yaml")
	if err != nil {
		return "", err
	}
	var defaults map[string]any
	if err = yaml.Unmarshal(text, &defaults); err != nil {
		return "", err
	}
	_, body, _ := strings.Cut(string(text), "_internal_defaults_do_not_set:\n")
	found, err := described(strings.Split(body, "\n"))
	if err != nil {
		return "", err
	}
	lines := []string{"| value | default | meaning |", "|---|---|---|"}
	for i, v := range found {
		shown := ""
		if i+1 == len(found) || !strings.HasPrefix(found[i+1].path, v.path+".") { // no heading
			at := defaults["_internal_defaults_do_not_set"]
			for key := range strings.SplitSeq(v.path, ".") {
				at = at.(map[string]any)[key]
			}
			def, err := json.Marshal(at)
			if err != nil {
				return "", err
			}
			shown = code(string(def))
		}
		lines = append(lines, "| `"+v.path+"` | "+shown+" | "+plain(v.comment)+" |")
	}
	return strings.Join(lines, "\n"), nil
}

func described(lines []string) ([]value, error) {
	var found []value
	var path, comment []string
	for _, line := range lines {
		if words, ok := strings.CutPrefix(strings.TrimSpace(line), "# "); ok {
			comment = append(comment, words)
			continue
		}
		m := keyLine.FindStringSubmatch(line)
		switch {
		case m == nil && comment != nil:
			return nil, fmt.Errorf("values.yaml: want a key behind %q, not %q", comment, line)
		case m == nil:
			continue
		}
		path = append(path[:min(len(path), len(m[1])/2-1)], m[2])
		if comment != nil {
			found = append(found, value{strings.Join(path, "."), strings.Join(comment, " ")})
		}
		comment = nil
	}
	return found, nil
}
