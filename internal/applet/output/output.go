// Package output prints a result in the form that a command's flag -o names.
//
// It promises that no control character of a value reaches the output, that JSON and YAML have the same fields, apiVersion and kind
// first, and that a table cell cannot imitate another cell.
//
// Start at Print; tables.go has the tables, and package core/document the documents.
package output

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"reflect"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/meshcni/istio-cni/internal/core/document"
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

// Forms are all forms.
func Forms() []Form { return []Form{Table, JSON, YAML} }

// Flag is the flag -o of a command.
func Flag(into *Form) settings.Setting {
	return settings.Setting{
		Name: "output", Aliases: []string{"o"}, FlagOnly: true, Arg: "FORM", Default: string(Table), Use: "table, json or yaml",
		Value: settings.Choice(into, Forms()...),
	}
}

// NewHead is the head of a list that this node answers now.
func NewHead(getenv func(string) (string, bool)) document.Head {
	return document.Head{Node: nodeName(getenv), Time: time.Now().UTC()} //nolint:forbidigo // the only clock of the documents
}

// nodeName is the name of this node: the agent's variable, or the host's name.
func nodeName(getenv func(string) (string, bool)) string {
	for _, variable := range []string{"NODE_NAME", "KUBERNETES_NODE_NAME"} {
		if name, _ := getenv(variable); name != "" {
			return name
		}
	}
	host, _ := os.Hostname() // "" is an unknown node
	return host
}

// Print writes a document as JSON or YAML. In the other forms it calls table.
func Print(w io.Writer, doc any, form Form, table func() error) error {
	if form != JSON && form != YAML {
		return table()
	}
	text, err := format(kindOf(doc), doc, form)
	if err == nil {
		_, err = w.Write(append(printable.Lines(text), '\n'))
	}
	return err
}

// Event writes a document of a stream: as JSON in one line, as YAML behind a line "---".
func Event(w io.Writer, doc any, form Form) error {
	text, err := format(kindOf(doc), doc, form)
	switch {
	case err != nil:
		return err
	case form == YAML:
		text = append([]byte("---\n"), text...)
	default:
		var line bytes.Buffer
		if err = json.Compact(&line, text); err != nil {
			return err
		}
		text = line.Bytes()
	}
	_, err = w.Write(append(printable.Lines(text), '\n'))
	return err
}

// kindOf is the kind of a document: the name of its type.
func kindOf(doc any) string { return reflect.TypeOf(doc).Name() }

// format returns a document as JSON or YAML, with apiVersion and kind first.
func format(kind string, doc any, form Form) ([]byte, error) {
	text, err := json.MarshalIndent(doc, "", "  ")
	switch {
	case err != nil:
		return nil, err
	case form == YAML:
		text, err = yaml.JSONToYAML(text)
		return fmt.Appendf(nil, "apiVersion: %s\nkind: %s\n%s", document.APIVersion, kind, bytes.TrimSuffix(text, []byte("\n"))), err
	}
	return fmt.Appendf(nil, "{\n  \"apiVersion\": %q,\n  \"kind\": %q,%s", document.APIVersion, kind, text[1:]), nil
}

// List writes a document of the list's kind with a head, and rows as its items. It formats one row at a time because escaping can make a row of untrusted
// text much larger.
func List[T any](w io.Writer, form Form, list any, head document.Head, rows []T) error {
	text, err := format(kindOf(list), head, form)
	if err != nil {
		return err
	}
	begin, between, end := "\nitems:\n", "", ""
	switch {
	case form == JSON && len(rows) == 0:
		begin, end = ",\n  \"items\": []", "\n}\n"
	case form == JSON:
		begin, between, end = ",\n  \"items\": [\n    ", ",\n    ", "\n  ]\n}\n"
	case len(rows) == 0:
		begin = "\nitems: []\n"
	}
	out := bufio.NewWriter(w)                    // Flush returns its first error
	text = bytes.TrimSuffix(text, []byte("\n}")) // the end of JSON
	_, _ = out.Write(append(printable.Lines(text), begin...))
	for i, row := range rows {
		text, err := json.MarshalIndent(row, "    ", "  ")
		if err == nil && form == YAML {
			text, err = yaml.JSONToYAML(fmt.Appendf(nil, "[%s]", text))
		}
		if err != nil {
			return err
		}
		if i > 0 {
			_, _ = out.WriteString(between)
		}
		_, _ = out.Write(printable.Lines(text))
	}
	_, _ = out.WriteString(end)
	return out.Flush()
}
