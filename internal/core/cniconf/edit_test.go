package cniconf_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// FuzzInsertRemove: Remove undoes Insert to the byte, a second Insert changes nothing, and the bytes of
// other plugins stay.
func FuzzInsertRemove(f *testing.F) {
	for _, pattern := range []string{"testdata/shapes/*/*.conflist", "testdata/shapes/*/*.conf", "testdata/broken/*.conflist"} {
		files, err := filepath.Glob(pattern)
		check.OK(f, err)
		for _, file := range files {
			text, err := os.ReadFile(file)
			check.OK(f, err)
			f.Add(text)
		}
	}
	f.Add([]byte(list))
	f.Add([]byte(reference))
	own := stanza().Element()
	f.Fuzz(func(t *testing.T, text []byte) {
		with, err := cniconf.Insert(text, own)
		if err != nil {
			return
		}
		again, err := cniconf.Insert(with, own)
		if err != nil || !bytes.Equal(again, with) {
			t.Fatalf("a second Insert changes the list (%v):\n%s\n%s", err, with, again)
		}
		clean, err := cniconf.Remove(text)
		check.OK(t, err)
		back, err := cniconf.Remove(with)
		check.OK(t, err)
		if had := !bytes.Equal(clean, text); !had && !bytes.Equal(back, text) {
			t.Fatalf("Remove does not undo Insert:\n%q\n%q", text, back)
		}
		before, after := elements(t, clean), elements(t, with)
		if !slices.Equal(before, after[:len(after)-1]) {
			t.Fatalf("neighbours changed:\n%q\n%q", before, after)
		}
		if !cniconf.Same([]byte(after[len(after)-1]), own) {
			t.Fatalf("the last plugin is %s", after[len(after)-1])
		}
	})
}

// elements returns the exact texts of a list's plugins.
func elements(t *testing.T, text []byte) []string {
	t.Helper()
	keys := map[string]json.RawMessage{}
	var plugins []json.RawMessage
	check.OK(t, json.Unmarshal(text, &keys))
	check.OK(t, json.Unmarshal(keys["plugins"], &plugins))
	var out []string
	for _, p := range plugins {
		out = append(out, string(p))
	}
	return out
}

// FuzzPlan plans for a directory of two files with any content: no plan panics or takes a loadable configuration from the
// runtime, and after each plan no further plan has steps.
func FuzzPlan(f *testing.F) {
	f.Add("10-a.conf", []byte(bridgeConf), []byte(list), uint8(0))
	f.Add("10-a.conflist", []byte(list), []byte(reference), uint8(1))
	f.Add("x.json", []byte(bridgeConf), []byte("{"), uint8(2))
	f.Fuzz(func(t *testing.T, name string, first, second []byte, mode uint8) {
		if strings.ContainsAny(name, "/\x00") || name == "" || name == "50-b.conflist" || !cniconf.Candidate(name) {
			return
		}
		start := dir(name, string(first), "50-b.conflist", string(second))
		w := want([]cniconf.Mode{cniconf.Inline, cniconf.DropIn, cniconf.Owned}[mode%3])
		plan := w.Plan(start)
		if plan.Problem != nil || plan.Waiting != "" {
			return
		}
		before, _, _ := released(start).Loaded()
		for i, d := range run(start, plan.Steps) {
			if now, _, _ := d.Loaded(); now == "" && before != "" {
				t.Fatalf("after %d steps nothing is left to load: %v", i, texts(d))
			}
		}
		if again := w.Plan(end(start, plan.Steps)); len(again.Steps) > 0 {
			t.Fatalf("a second plan has steps: %v", again.Steps)
		}
	})
}

func TestInsert_Format(t *testing.T) {
	t.Parallel()
	own := []byte(`{"type":"istio-cni","a":[1]}`)
	for _, tc := range []struct{ name, list, want string }{
		{"one line", `{"plugins":[{"type":"x"}]}`, `{"plugins":[{"type":"x"},{"type":"istio-cni","a":[1]}]}`},
		{
			"two spaces", "{\"plugins\": [\n  {\"type\":\"x\"}\n]}",
			"{\"plugins\": [\n  {\"type\":\"x\"},\n  {\n    \"type\": \"istio-cni\",\n    \"a\": [\n      1\n    ]\n  }\n]}",
		},
		{
			"tabs", "{\"plugins\": [\n\t{\"type\":\"x\"}\n]}",
			"{\"plugins\": [\n\t{\"type\":\"x\"},\n\t{\n\t\t\"type\": \"istio-cni\",\n\t\t\"a\": [\n\t\t\t1\n\t\t]\n\t}\n]}",
		},
		{"W-16 not last", `{"plugins":[{"type":"istio-cni"},{"type":"x"}]}`, `{"plugins":[{"type":"x"},{"type":"istio-cni","a":[1]}]}`},
		{
			"W-17 twice", `{"plugins":[{"type":"istio-cni"},{"type":"x"}, {"type":"istio-cni","b":2} ]}`,
			`{"plugins":[{"type":"x"}, {"type":"istio-cni","a":[1]} ]}`,
		},
		{"W-16 another value", `{"plugins":[{"type":"x"},{"type":"istio-cni","a":[2]}]}`, `{"plugins":[{"type":"x"},{"type":"istio-cni","a":[1]}]}`},
		{"W-16 a key too many", `{"plugins":[{"type":"x"},{"type":"istio-cni","a":[1],"b":2}]}`, `{"plugins":[{"type":"x"},{"type":"istio-cni","a":[1]}]}`},
		{"W-16 the type alone", `{"plugins":[{"type":"x"},{"type":"istio-cni"}]}`, `{"plugins":[{"type":"x"},{"type":"istio-cni","a":[1]}]}`},
		{"the same in another order stays", `{"plugins":[{"type":"x"},{"a":[1], "type":"istio-cni"}]}`, `{"plugins":[{"type":"x"},{"a":[1], "type":"istio-cni"}]}`},
		{"the last of two plugins keys counts", `{"plugins":[],"plugins":[{"type":"x"}]}`, `{"plugins":[],"plugins":[{"type":"x"},{"type":"istio-cni","a":[1]}]}`},
	} {
		got, err := cniconf.Insert([]byte(tc.list), own)
		if err != nil || string(got) != tc.want {
			t.Errorf("%s: %v\n got %s\nwant %s", tc.name, err, got, tc.want)
		}
	}
}
