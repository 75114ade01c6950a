// Package documenttest validates what commands print against the schemas in docs/schema.
package documenttest

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"sigs.k8s.io/yaml"

	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// Valid reports a document of the text, JSON or YAML, that is not of the kind, does not begin with apiVersion and kind, or has a field
// that the schema lacks. A text without a document is an error, too.
func Valid(tb testing.TB, kind, text string) {
	tb.Helper()
	check.OK(tb, Err(tb, kind, text), kind, "of", text)
}

// begin is the beginning of a document in each form.
var begin = regexp.MustCompile(`^(---\n)?apiVersion: ` + document.APIVersion + `\nkind: (\w+)\n|^\{\s*"apiVersion": ?"` + document.APIVersion + `",\s*"kind": ?"(\w+)",`)

// Err returns the first fault that Valid would report.
func Err(tb testing.TB, kind, text string) error {
	tb.Helper()
	m := begin.FindStringSubmatch(text)
	if m == nil || m[2]+m[3] != kind {
		return errors.New("it does not begin with apiVersion and kind")
	}
	if m[2] != "" {
		var all strings.Builder
		for one := range strings.SplitSeq(strings.TrimPrefix(text, "---\n"), "\n---\n") {
			converted, err := yaml.YAMLToJSON([]byte(one))
			check.OK(tb, err)
			all.Write(converted)
		}
		text = all.String()
	}
	schema := compile(tb, kind)
	for in := json.NewDecoder(strings.NewReader(text)); ; {
		var one json.RawMessage
		if err := in.Decode(&one); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		value, err := jsonschema.UnmarshalJSON(strings.NewReader(string(one)))
		if err == nil {
			err = schema.Validate(value)
		}
		if err != nil {
			return err
		}
	}
}

// compile reads a committed schema. Unlike for a script, an unknown field is an error.
func compile(tb testing.TB, kind string) *jsonschema.Schema {
	tb.Helper()
	root, err := os.Getwd()
	for check.OK(tb, err); ; root = filepath.Dir(root) {
		if _, err := os.Stat(filepath.Join(root, "docs/schema")); err == nil || root == "/" {
			break
		}
	}
	text, err := os.ReadFile(filepath.Join(root, "docs/schema", kind+".json"))
	check.OK(tb, err)
	closed := strings.ReplaceAll(string(text), `"properties": {`, `"additionalProperties": false, "properties": {`)
	value, err := jsonschema.UnmarshalJSON(strings.NewReader(closed))
	check.OK(tb, err)
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	check.OK(tb, c.AddResource("schema.json", value))
	schema, err := c.Compile("schema.json")
	check.OK(tb, err)
	return schema
}
