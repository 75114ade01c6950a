package arguments_test

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/applet/arguments"
)

func TestParse(t *testing.T) {
	t.Parallel()
	flags := []arguments.Flag{{Name: "name"}, {Name: "on", Switch: true}}
	for _, tc := range []struct {
		name          string
		args          []string
		set, mistakes []string
		help          bool
	}{
		{"nothing", nil, nil, nil, false},
		{"values, one or two dashes", []string{"--name=a", "-name", "b", "--on", "-on=false", "--name="}, []string{"name=a", "name=b", "on=true", "on=false", "name="}, nil, false},
		{
			"every mistake, and what is behind it",
			[]string{"--bad=1", "--name=a", "stray", "--worse", "--on", "--name"},
			[]string{"name=a", "on=true"},
			[]string{
				"reading arguments: flag provided but not defined: -bad", `stray argument "stray": all settings are flags`,
				"reading arguments: flag provided but not defined: -worse", "reading arguments: flag needs an argument: -name",
			},
			false,
		},
		{"help wins", []string{"--bad", "--help"}, nil, nil, true},
		{"help by a letter, behind a value", []string{"--name", "x", "-h"}, []string{"name=x"}, nil, true},
		// What a mistake's text ends with decides nothing about what is behind it.
		{
			"a mistake that names another argument",
			[]string{"--bad=--name", "--name=a", "-on=", "--bad", "name", "--name=b"},
			[]string{"name=a", "on=", "name=b"},
			[]string{
				"reading arguments: flag provided but not defined: -bad", "reading arguments: flag provided but not defined: -bad",
				`stray argument "name": all settings are flags`,
			},
			false,
		},
		{"a mistake of two words", []string{"-x y", "--name=1", "-x y", "--on"}, []string{"name=1", "on=true"}, []string{
			"reading arguments: flag provided but not defined: -x y", "reading arguments: flag provided but not defined: -x y",
		}, false},
		{"no flags", []string{"-", "---x", "-=y", "", "--=", "--on"}, []string{"on=true"}, []string{
			`stray argument "-": all settings are flags`, "reading arguments: bad flag syntax: ---x",
			"reading arguments: bad flag syntax: -=y", `stray argument "": all settings are flags`, "reading arguments: bad flag syntax: --=",
		}, false},
		{"a value that looks like a flag", []string{"--name", "--on", "--name", "--"}, []string{"name=--on", "name=--"}, nil, false},
		{"the end of the flags", []string{"--on", "--", "--name=a", "b"}, []string{"on=true"}, []string{
			`stray argument "--name=a": all settings are flags`, `stray argument "b": all settings are flags`,
		}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var set, got []string
			mistakes, err := arguments.Parse(flags, tc.args, func(name, text string) { set = append(set, name+"="+text) })
			if errors.Is(err, arguments.ErrHelp) != tc.help || !tc.help && err != nil {
				t.Fatalf("error %v", err)
			}
			for _, m := range mistakes {
				got = append(got, m.Error())
			}
			if diff := cmp.Diff(tc.mistakes, got); diff != "" {
				t.Errorf("mistakes -want +got:\n%s", diff)
			}
			if diff := cmp.Diff(tc.set, set); diff != "" {
				t.Errorf("set -want +got:\n%s", diff)
			}
		})
	}
}
