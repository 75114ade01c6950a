package main

import (
	"fmt"
	"os"
	"regexp"
	"strings"
)

// value is a row of the chart's values: its path, and its default where that fits into the row.
type value struct{ path, def, comment string }

var (
	keyLine  = regexp.MustCompile(`^( +)([A-Za-z]\w*):(?: (.+))?$`)
	itemLine = regexp.MustCompile(`^ +- ([\w-]+)$`)
)

// values is the table of the chart's values that have an effect: each with the comment above it in values.yaml. A value without
// a comment belongs to the default of the one above it.
func values() (string, error) {
	text, err := os.ReadFile("manifests/istio-cni/values.yaml")
	if err != nil {
		return "", err
	}
	_, body, _ := strings.Cut(string(text), "_internal_defaults_do_not_set:\n")
	lines := []string{"| value | default | meaning |", "|---|---|---|"}
	found, err := described(strings.Split(body, "\n"))
	if err != nil {
		return "", err
	}
	for _, v := range found {
		if strings.HasPrefix(v.comment, "Accepted") {
			continue
		}
		lines = append(lines, "| `"+v.path+"` | "+code(v.def)+" | "+plain(v.comment)+" |")
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
		if item := itemLine.FindStringSubmatch(line); item != nil && len(found) > 0 {
			last := &found[len(found)-1]
			last.def = strings.ReplaceAll(last.def+"["+item[1]+"]", "][", ", ")
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
			found = append(found, value{strings.Join(path, "."), strings.Trim(m[3], `"`), strings.Join(comment, " ")})
		}
		comment = nil
	}
	return found, nil
}
