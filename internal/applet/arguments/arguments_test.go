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
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			var set, got []string
			mistakes, err := arguments.Parse("p", flags, tc.args, func(name, text string) { set = append(set, name+"="+text) })
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
