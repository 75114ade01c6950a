package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"github.com/invopop/jsonschema"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/document"
)

const (
	repository = "github.com/meshcni/istio-cni"
	schemaDir  = "docs/schema/"
)

// schemas are the files of the documents' schemas.
func schemas() (all []part) {
	for _, d := range document.All() {
		all = append(all, part{schemaDir + kind(d) + ".json", `^()((?s:.*))()$`, func() (string, error) {
			s, err := schemaOf(d)
			if err != nil {
				return "", err
			}
			var text bytes.Buffer
			out := json.NewEncoder(&text)
			out.SetEscapeHTML(false)
			out.SetIndent("", "  ")
			err = out.Encode(s)
			return text.String(), err
		}})
	}
	return all
}

// kind is the kind of a document.
func kind(d document.Printed) string { return reflect.TypeOf(d.Document).Name() }

// schemaOf returns the schema of a document. It allows further fields: the contract is that they are added.
func schemaOf(d document.Printed) (*jsonschema.Schema, error) {
	r := jsonschema.Reflector{AllowAdditionalProperties: true, ExpandedStruct: true, Anonymous: true, Mapper: mapped, Namer: named}
	for _, dir := range []string{"document", "audit", "redirect/walk"} {
		if err := r.AddGoComments(repository, "./internal/core/"+dir); err != nil {
			return nil, err
		}
	}
	s := r.Reflect(d.Document)
	s.ID = jsonschema.ID("https://" + repository + "/blob/main/" + schemaDir + kind(d) + ".json")
	s.Title = kind(d)
	for _, field := range []struct{ name, value string }{{"kind", kind(d)}, {"apiVersion", document.APIVersion}} {
		s.Properties.Set(field.name, &jsonschema.Schema{Const: field.value})
		if err := s.Properties.MoveToFront(field.name); err != nil {
			return nil, err
		}
		s.Required = slices.Insert(s.Required, 0, field.name)
	}
	return s, nil
}

// mapped returns the schema of the types that do not show their values.
func mapped(t reflect.Type) *jsonschema.Schema {
	s := &jsonschema.Schema{Type: "string"}
	switch t {
	case reflect.TypeFor[netip.AddrPort]():
	case reflect.TypeFor[audit.State]():
		for _, state := range append(audit.States(), audit.Outside) {
			s.Enum = append(s.Enum, state)
		}
	default:
		return nil
	}
	return s
}

// named returns the name of a type in a schema.
func named(t reflect.Type) string {
	if t.Kind() == reflect.Slice && t.Name() != "" {
		return t.Elem().Name() + "Array"
	}
	return t.Name()
}

// documents are the tables of the documents' fields, each type once.
func documents() (string, error) {
	lines := []string{"| field | type | meaning |", "|---|---|---|"}
	done := map[string]bool{}
	for _, d := range document.All() {
		s, err := schemaOf(d)
		if err != nil {
			return "", err
		}
		lines = append(lines, fmt.Sprintf("| **%s** | [schema](%s) | by %s |", s.Title, strings.TrimPrefix(schemaDir, "docs/")+s.Title+".json", code(strings.Split(d.By, ", ")...)))
		lines = append(lines, fields(s, s.Definitions)...)
		for _, name := range slices.Sorted(maps.Keys(s.Definitions)) {
			if of := s.Definitions[name]; of.Type == "object" && !done[name] {
				done[name] = true
				lines = append(append(lines, fmt.Sprintf("| **%s** | | %s |", name, plain(of.Description))), fields(of, s.Definitions)...)
			}
		}
	}
	return strings.Join(lines, "\n"), nil
}

// fields are the rows of an object's fields.
func fields(s *jsonschema.Schema, all jsonschema.Definitions) (rows []string) {
	for p := s.Properties.Oldest(); p != nil; p = p.Next() {
		rows = append(rows, fmt.Sprintf("| %s | %s | %s |", code(p.Key), typeOf(p.Value, all), meaningOf(p.Value)))
	}
	return rows
}

// typeOf names the type of a field.
func typeOf(s *jsonschema.Schema, all jsonschema.Definitions) string {
	name := strings.TrimPrefix(s.Ref, "#/$defs/")
	if list := all[name]; list != nil && list.Items != nil {
		s = list
	}
	switch {
	case s.Items != nil:
		return "array of " + typeOf(s.Items, all)
	case s.Format == "date-time":
		return "time"
	case s.Const != nil:
		return "string"
	case name == "":
		return s.Type
	default:
		return name
	}
}

// meaningOf is what a field means, with its values.
func meaningOf(s *jsonschema.Schema) string {
	text := plain(s.Description)
	var values []string
	for _, value := range s.Enum {
		values = append(values, code(cmp.Or(fmt.Sprint(value), `""`)))
	}
	if s.Const != nil {
		values = append(values, code(fmt.Sprint(s.Const)))
	}
	return strings.TrimSpace(text + " " + strings.Join(values, ", "))
}
