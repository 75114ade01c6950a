// Package output prints a result in the form that a command's flag -o names.
//
// It promises that no control character of a value reaches the output, that JSON and YAML have the same fields, and that a table cell
// cannot imitate another cell.
//
// Start at Print; tables.go has the tables.
package output

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"

	"sigs.k8s.io/yaml"

	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/settings"
)

// Form is a value of the flag -o.
type Form string

// The forms.
const (
	Table Form = "table"
	JSON  Form = "json"
	YAML  Form = "yaml"
)

// Flag is the flag -o of a command.
func Flag(into *Form, use string, forms ...Form) settings.Setting {
	return settings.Setting{
		Name: "output", Aliases: []string{"o"}, FlagOnly: true, Arg: "FORM", Default: string(Table), Use: use,
		Value: settings.Choice(into, forms...),
	}
}

// Print writes value as JSON or YAML. In the other forms it calls table.
func Print(w io.Writer, value any, form Form, table func() error) error {
	if form != JSON && form != YAML {
		return table()
	}
	text, err := format(value, form, "")
	if err == nil {
		_, err = w.Write(append(printable.Lines(text), '\n'))
	}
	return err
}

// format returns a value as JSON or YAML. Each JSON line but the first begins with indent.
func format(value any, form Form, indent string) ([]byte, error) {
	text, err := json.MarshalIndent(value, indent, "  ")
	if err == nil && form == YAML {
		text, err = yaml.JSONToYAML(text)
	}
	return text, err
}

// List writes rows as JSON or YAML. Without a name the result is a list, else an object with the fields of head and the list last.
// List formats one row at a time because escaping can make a row of untrusted text much larger.
func List[T any](w io.Writer, form Form, head any, name string, rows []T) error {
	out := bufio.NewWriter(w) // Flush returns its first error
	indent, blank, end := "", "", "\n"
	if name != "" {
		text, err := format(head, form, "")
		if err != nil {
			return err
		}
		blank = " "
		field := name + ":"
		if form == JSON {
			text, field = bytes.TrimSuffix(text, []byte("\n}")), ",\n  \""+name+"\":"
			indent, end = "  ", "\n}\n"
		}
		_, _ = out.Write(append(printable.Lines(text), field...))
	}
	for i, row := range rows {
		text, err := format([]T{row}, form, indent)
		if err != nil {
			return err
		}
		separator := "\n"
		switch {
		case form == JSON:
			text = text[1 : len(text)-len("\n]")-len(indent)]
			separator = ","
			if i == 0 {
				separator = blank + "["
			}
		case i > 0 || name == "":
			separator = ""
		}
		_, _ = out.Write(append([]byte(separator), printable.Lines(text)...))
	}
	switch {
	case len(rows) == 0:
		_, _ = out.WriteString(blank + "[]" + end)
	case form == JSON:
		_, _ = out.WriteString("\n" + indent + "]" + end)
	}
	return out.Flush()
}
