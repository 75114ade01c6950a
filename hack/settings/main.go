// Command settings writes what follows from the node agent's table of settings: the schema of the chart's value "agent", the
// chart's list of live variables, and the table in the manual.
//
//	go run ./hack/settings            write
//	go run ./hack/settings --check    fail if a file is out of step
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/role/installer"
)

// part is a text of a file that is written: the second group of the expression.
type part struct {
	file, around string
	text         func([]settings.Setting) (string, error)
}

func parts() []part {
	return []part{
		{"manifests/istio-cni/values.schema.json", `("agent": \{\n +"type": "object",\n +"additionalProperties": false,\n +"properties": \{\n)((?s:.*?))(\n          \}\n        \},\n)`, schema},
		{"manifests/istio-cni/templates/_helpers.tpl", `(\{\{- define "cni.liveKeys" -\}\}\n)((?s:.*?))(\n\{\{- end -\}\})`, liveKeys},
		{"docs/operations.md", `(<!-- written by hack/settings -->\n)((?s:.*?))(\n<!-- end -->)`, manual},
	}
}

func main() {
	if err := run(slices.Contains(os.Args[1:], "--check")); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1) //nolint:forbidigo // this is a main.go, too
	}
}

func run(check bool) error {
	for _, p := range parts() {
		before, err := os.ReadFile(p.file)
		if err != nil {
			return err
		}
		text, err := p.text(installer.Settings())
		if err != nil {
			return err
		}
		at := regexp.MustCompile(p.around).FindSubmatchIndex(before)
		if at == nil {
			return fmt.Errorf("%s has no place for the settings", p.file)
		}
		after := string(before[:at[4]]) + text + string(before[at[5]:])
		switch {
		case after == string(before):
		case check:
			return fmt.Errorf("%s is out of step with the settings: run hack/manifests.sh", p.file)
		default:
			if err := os.WriteFile(p.file, []byte(after), 0o600); err != nil { //nolint:forbidigo,gosec // the files of the table, which nothing reads at the same time
				return err
			}
		}
	}
	return nil
}

func schema(all []settings.Setting) (string, error) {
	var lines []string
	for _, s := range all {
		if !s.Chart {
			continue
		}
		property := map[string]any{"description": use(s)}
		switch s.Arg {
		case "":
			property["$ref"] = "#/definitions/boolean"
		case "CODE", "PORT":
			property["$ref"] = "#/definitions/count"
		default:
			property["type"] = "string" // in YAML 0640 is the number 416
		}
		line, err := json.Marshal(property)
		if err != nil {
			return "", err
		}
		lines = append(lines, fmt.Sprintf("            %q: %s", s.ChartName(), line))
	}
	return strings.Join(lines, ",\n"), nil
}

func liveKeys(all []settings.Setting) (string, error) {
	var names []string
	for _, s := range all {
		if s.Live {
			names = append(names, s.Env[0])
		}
	}
	return strings.Join(names, " "), nil
}

func manual(all []settings.Setting) (string, error) {
	lines := []string{"| chart | flag | environment | meaning |", "|---|---|---|---|"}
	for _, s := range all {
		if s.Chart {
			lines = append(lines, fmt.Sprintf("| `agent.%s` | `%s` | `%s` | %s |", s.ChartName(), s, s.Env[0], use(s)))
		}
	}
	return strings.Join(lines, "\n"), nil
}

func use(s settings.Setting) string {
	if s.Default == "" {
		return s.Use
	}
	return s.Use + " (default: " + s.Default + ")"
}
