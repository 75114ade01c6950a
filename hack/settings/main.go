// Command settings writes what follows from the node agent's settings, the help of commands, the chart's values and the program's
// codes: the schema of the chart's value "agent", the chart's list of live variables, the tables in docs/reference.md and
// docs/errors.md, and the schemas in docs/schema.
//
//	go run ./hack/settings            write
//	go run ./hack/settings --check    fail if a file is out of step
package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/role/installer"
	"github.com/meshcni/istio-cni/internal/role/redirector"
	"github.com/meshcni/istio-cni/internal/role/tainter"
)

// part is a text of a file that is written: the second group of the expression.
type part struct {
	file, around string
	text         func() (string, error)
}

func parts() []part {
	all := settings.All(installer.Settings())
	return append([]part{
		{"manifests/istio-cni/values.schema.json", `("agent": \{\n +"properties": \{\n)((?s:.*?))(\n          \}\n        \},\n)`, func() (string, error) { return schema(all) }},
		{"manifests/istio-cni/templates/_helpers.tpl", `(\{\{- define "cni.liveKeys" -\}\}\n)((?s:.*?))(\n\{\{- end -\}\})`, func() (string, error) { return liveKeys(all), nil }},
		{"manifests/istio-cni/templates/_others.tpl", `(\nagent: \{)(.*?)(\}\n)`, func() (string, error) { return shape(all), nil }},
		reference("istio-cni install", func() (string, error) { return table(installer.Settings()), nil }),
		reference("istio-cni iptables --help", flags(redirector.Run)),
		reference("istio-cni taint --help", flags(tainter.Run)),
		reference("the --help of other commands", others),
		reference("internal/core/document", documents),
		written("manifests/istio-cni/README.md", "values.yaml", values),
		reference("the agent's metrics", agentMetrics),
		reference("the taint controller's metrics", taintMetrics),
	}, slices.Concat(codes(), schemas())...)
}

// reference is the table of docs/reference.md that follows from a source.
func reference(source string, text func() (string, error)) part {
	return written("docs/reference.md", source, text)
}

// written is the text of a page between two comments, of which the first one names the source.
func written(page, source string, text func() (string, error)) part {
	return part{page, `(<!-- written by hack/settings from ` + regexp.QuoteMeta(source) + ` -->\n)((?s:.*?))(\n<!-- end -->)`, text}
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
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		text, err := p.text()
		if err != nil {
			return err
		}
		at := regexp.MustCompile(p.around).FindSubmatchIndex(before)
		if at == nil {
			return fmt.Errorf("%s has no place for %s", p.file, p.around)
		}
		after := string(before[:at[4]]) + text + string(before[at[5]:])
		switch {
		case after == string(before):
		case check:
			return fmt.Errorf("%s is out of step with the source: run hack/manifests.sh", p.file)
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

// shape has the names of the chart's value "agent", each with a value of its type.
func shape(all []settings.Setting) string {
	var names []string
	for _, s := range all {
		if s.Chart {
			like, other := map[string]string{"": "true", "CODE": "0", "PORT": "0"}[s.Arg]
			if !other {
				like = `""`
			}
			names = append(names, s.ChartName()+": "+like)
		}
	}
	return strings.Join(names, ", ")
}

func liveKeys(all []settings.Setting) string {
	var names []string
	for _, s := range all {
		if s.Live {
			names = append(names, s.Env[0])
		}
	}
	return strings.Join(names, " ")
}

// table is the table of the node agent's settings. Settings that are accepted without effect are in its help alone.
func table(groups []settings.Group) string {
	var lines []string
	for _, g := range groups {
		if !g.Rows[0].Ignored {
			lines = append(lines, "| **"+g.Title+"** | | | |")
		}
		for _, s := range g.Rows {
			if !s.Ignored {
				flag := ""
				if s.Name != "" {
					flag = s.String()
				}
				lines = append(lines, "| "+strings.Join([]string{code(flag), code(s.Env...), standardText(cmp.Or(s.Shown, s.Default)), meaning(s)}, " | ")+" |")
			}
		}
	}
	return head + strings.Join(lines, "\n")
}

func meaning(s settings.Setting) string {
	text := plain(s.Use)
	if s.Live {
		text += "; live"
	}
	if s.Chart {
		text += "; chart: `agent." + s.ChartName() + "`"
	}
	return text
}

// plain is a text without markup, for a cell.
func plain(text string) string {
	return strings.NewReplacer("\n", " ", "|", `\|`, "*", `\*`, "__", `\_\_`).Replace(text)
}

// code has each text in a code span.
func code(texts ...string) string {
	var spans []string
	for _, text := range texts {
		if text != "" {
			spans = append(spans, "`"+text+"`")
		}
	}
	return strings.Join(spans, ", ")
}

func use(s settings.Setting) string {
	if s.Default == "" {
		return s.Use
	}
	return s.Use + " (default: " + s.Default + ")"
}
