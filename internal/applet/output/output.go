// Package output prints a result in the form that a command's flag -o names.
//
// It promises that no control character of a value reaches the output, and that JSON and YAML have the same fields. It never decides
// what a table looks like.
//
// Start at Print.
package output

import (
	"encoding/json"
	"io"

	"sigs.k8s.io/yaml"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// Form is a value of the flag -o.
type Form string

// The forms. Wide is a table with nothing truncated.
const (
	Table Form = "table"
	Wide  Form = "wide"
	JSON  Form = "json"
	YAML  Form = "yaml"
)

// Print writes value as JSON or YAML, or by table in the other forms.
func Print(w io.Writer, value any, form Form, table func() error) error {
	if form != JSON && form != YAML {
		return table()
	}
	text, err := json.MarshalIndent(value, "", "  ")
	if err == nil && form == YAML {
		text, err = yaml.JSONToYAML(text)
	}
	if err == nil {
		_, err = w.Write(append(printable.Lines(text), '\n'))
	}
	return err
}
