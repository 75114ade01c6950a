// Package documenttest validates what commands print against the schemas in docs/schema.
package documenttest

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"iter"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"sigs.k8s.io/yaml"

	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// Valid fails the test with Err.
func Valid(tb testing.TB, kind, text string) {
	tb.Helper()
	check.OK(tb, Err(kind, text), kind, "of", text)
}

// begin is the beginning of a document in each form.
var begin = regexp.MustCompile(`^(?:---\n)?apiVersion: ` + document.APIVersion + `\nkind: (\w+)\n|^\{\s*"apiVersion": ?"` + document.APIVersion + `",\s*"kind": ?"(\w+)",`)

// Err returns why the text, JSON or YAML, has a document that is not of the kind, does not begin with apiVersion and kind, or has a
// field that the schema lacks. A text without a document is an error, too.
func Err(kind, text string) error {
	m := begin.FindStringSubmatch(text)
	if m == nil || m[1]+m[2] != kind {
		return errors.New("it does not begin with apiVersion and kind")
	}
	schema, err := compile(kind)
	if err != nil {
		return err
	}
	if m[1] != "" {
		return eachOf(strings.SplitSeq(strings.TrimPrefix(text, "---\n"), "\n---\n"), schema)
	}
	for in := json.NewDecoder(strings.NewReader(text)); ; {
		var one json.RawMessage
		if err := in.Decode(&one); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := eachOf(slices.Values([]string{string(one)}), schema); err != nil {
			return err
		}
	}
}

func eachOf(all iter.Seq[string], schema *jsonschema.Schema) error {
	for one := range all {
		text, err := yaml.YAMLToJSON([]byte(one))
		if err != nil {
			return err
		}
		value, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
		if err == nil {
			err = schema.Validate(value)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// compile reads a committed schema. Unlike for a script, an unknown field is an error.
func compile(kind string) (*jsonschema.Schema, error) {
	name := filepath.Join("docs/schema", kind+".json")
	text, err := os.ReadFile(name)         //nolint:gosec // the kind is a test's
	for n := 0; err != nil && n < 9; n++ { // the working directory of a test is its package
		name = filepath.Join("..", name)
		text, err = os.ReadFile(name) //nolint:gosec // the kind is a test's
	}
	if err != nil {
		return nil, err
	}
	value, err := jsonschema.UnmarshalJSON(strings.NewReader(strings.ReplaceAll(string(text), `"properties": {`, `"additionalProperties": false, "properties": {`)))
	if err != nil {
		return nil, err
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	if err := c.AddResource(name, value); err != nil {
		return nil, err
	}
	return c.Compile(name)
}
