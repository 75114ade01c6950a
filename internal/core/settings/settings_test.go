package settings_test

import (
	"errors"
	"io/fs"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// config has a text, a switch, a live setting and a frozen setting.
type config struct {
	name, frozen string
	on           bool
	live         time.Duration
}

func (c *config) rows() []settings.Setting {
	return []settings.Setting{
		{Name: "name", Aliases: []string{"title"}, Arg: "TEXT", Env: []string{"NAME", "OLD-NAME"}, Repeated: true, Value: settings.Text(&c.name, nil)},
		{Name: "on", Env: []string{}, Use: "a switch", Value: settings.Bool(&c.on)},
		{
			Name: "live", Arg: "DURATION", Env: []string{"LIVE"}, Keys: []string{"live"}, Default: "1m", Live: true,
			Value: settings.Duration(&c.live, time.Second, time.Hour),
		},
		{Name: "frozen", Arg: "TEXT", Env: []string{"FROZEN"}, Default: "ice", Value: settings.Choice(&c.frozen, "ice", "snow")},
	}
}

func environment(pairs ...string) func(string) (string, bool) {
	env := map[string]string{}
	for _, pair := range pairs {
		name, value, _ := strings.Cut(pair, "=")
		env[name] = value
	}
	return func(name string) (string, bool) { v, ok := env[name]; return v, ok }
}

// read returns the configuration, and the problems as lines.
func read(t *testing.T, args []string, env func(string) (string, bool), layers ...settings.Layer) (config, settings.Origins, []string) {
	t.Helper()
	var c config
	in, err := settings.Parse(c.rows(), args, env)
	check.OK(t, err)
	origins, err := in.Read(c.rows(), layers...)
	if err != nil {
		return c, origins, strings.Split(err.Error(), "\n")
	}
	return c, origins, nil
}

func TestParse_Arguments(t *testing.T) {
	t.Parallel()
	const undefined = "unknown flag --"
	for _, tc := range []struct {
		name     string
		args     []string
		text     string
		on       bool
		mistakes []string
	}{
		{"nothing", nil, "", false, nil},
		{"one or two dashes, repeated", []string{"--name=a", "-name", "b", "--on", "-on=false", "--name="}, "a,b,", false, nil},
		{"the last switch applies", []string{"-on=false", "-on"}, "", true, nil},
		{"the first spelling applies", []string{"--title=x", "--name=y"}, "y", false, nil},
		{
			"every mistake, and the arguments behind it",
			[]string{"--bad=1", "--name=a", "stray", "--worse", "--on", "--name"},
			"a", true,
			[]string{undefined + "bad", `stray argument "stray"`, undefined + "worse", "flag --name needs a value"},
		},
		{"a near flag", []string{"--namee=x", "-frozne"}, "", false, []string{undefined + `namee: did you mean "--name"?`, undefined + `frozne: did you mean "--frozen"?`}},
		{ // the text of a mistake has no effect on later arguments
			"a mistake that names another argument",
			[]string{"--bad=--name", "--name=a", "--bad", "name", "--name=b"},
			"a,b", false,
			[]string{undefined + "bad", undefined + "bad", `stray argument "name"`},
		},
		{"a mistake of two words", []string{"-x y", "--name=1", "-x y", "--on"}, "1", true, []string{undefined + "x y", undefined + "x y"}},
		{"no flags", []string{"-", "---x", "-=y", "", "--=", "--on"}, "", true, []string{
			`stray argument "-"`, "bad flag syntax: ---x", "bad flag syntax: -=y",
			`stray argument ""`, "bad flag syntax: --=",
		}},
		{"a value that looks like a flag", []string{"--name", "--on", "--name", "--"}, "--on,--", false, nil},
		{
			"the end of the flags",
			[]string{"--on", "--", "--name=a", "b"},
			"", true,
			[]string{`stray argument "--name=a"`, `stray argument "b"`},
		},
	} {
		c, _, mistakes := read(t, tc.args, environment())
		if diff := cmp.Diff(tc.mistakes, mistakes); diff != "" || c.name != tc.text || c.on != tc.on {
			t.Errorf("%s: name %q, on %t; mistakes -want +got:\n%s", tc.name, c.name, c.on, diff)
		}
	}
	for _, args := range [][]string{{"--bad", "--help"}, {"--name", "x", "-h"}} {
		if _, err := settings.Parse(new(config).rows(), args, environment()); !errors.Is(err, settings.ErrHelp) {
			t.Errorf("%q: error %v", args, err)
		}
	}
}

func TestParse_OperandPosition(t *testing.T) {
	t.Parallel()
	var text string
	var on bool
	rows := []settings.Setting{
		{Name: "to", Aliases: []string{"t"}, Arg: "ADDRESS", Value: settings.Text(&text, nil)},
		{Name: "udp", Aliases: []string{"u"}, Value: settings.Bool(&on)},
	}
	for args, want := range map[string]string{
		"pod --to x --udp": "pod;--to,x,--udp", "--udp pod -t x": "pod;--udp,-t,x", "--to x --udp pod": "pod;--to,x,--udp",
		"--to=x pod": "pod;--to=x", "--to x": ";--to,x", "--to": ";--to", "pod other": "pod,other;", "": ";",
		"-tx pod": "pod;-t,x", "-utx pod": "pod;-u,-t,x", "-ut x pod": "pod;-u,-t,x", "--to -tx pod": "pod;--to,-tx", "-udpp pod": "pod;-udpp",
		"-u -- -t x": "-t,x;-u", "pod -t": "pod;-t", "-ux": ";-u,-x", "-u=false pod": "pod;-u=false",
	} {
		operands, rest := settings.Operands(rows, strings.Fields(args))
		check.Equal(t, strings.Join(operands, ",")+";"+strings.Join(rest, ","), want, args)
	}
}

func TestParse_Precedence(t *testing.T) {
	t.Parallel()
	env := environment("NAME=", "OLD-NAME=old", "LIVE=2m", "FROZEN=snow")
	first := settings.Layer{Name: `ConfigMap "c"`, Data: map[string]string{"LIVE": "3m\n", "FROZEN": "ice", "NAME": "x"}}
	for _, tc := range []struct {
		name   string
		args   []string
		layers []settings.Layer
		want   config
		live   string
	}{
		{"environment", nil, nil, config{name: "old", frozen: "snow", live: 2 * time.Minute}, "environment variable LIVE"},
		{"layer", nil, []settings.Layer{first}, config{name: "old", frozen: "snow", live: 3 * time.Minute}, `ConfigMap "c" key LIVE`},
		{
			"the first layer", nil,
			[]settings.Layer{{Name: "directory", Data: map[string]string{"live": "4m"}}, first},
			config{name: "old", frozen: "snow", live: 4 * time.Minute},
			"directory key live",
		},
		{ // an empty key selects the default, whatever the environment is
			"empty key", nil,
			[]settings.Layer{{Name: "d", Data: map[string]string{"LIVE": " "}}, first},
			config{name: "old", frozen: "snow", live: time.Minute},
			"d key LIVE",
		},
		{"flag", []string{"--live=5m", "--name="}, []settings.Layer{first}, config{frozen: "snow", live: 5 * time.Minute}, "flag --live"},
	} {
		got, origins, problems := read(t, tc.args, env, tc.layers...)
		if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(config{})); diff != "" || origins.Flag("live").String() != tc.live || problems != nil {
			t.Errorf("%s: live is %s, problems %q, -want +got:\n%s", tc.name, origins.Flag("live"), problems, diff)
		}
	}
}

func TestParse_AllProblems(t *testing.T) {
	t.Parallel()
	c, origins, problems := read(t, []string{"--on=perhaps", "--frozen=rain"}, environment("LIVE=soon"))
	want := []string{
		`flag --on: value "perhaps": want true or false`, `environment variable LIVE: value "soon": want a duration such as 90s or 2m, of 1s or more`,
		`flag --frozen: value "rain": want one of ice, snow`,
	}
	check.Diff(t, "result", want, problems)
	if c.live != time.Minute || c.frozen != "ice" || origins.Flag("name").Given() {
		t.Errorf("bad values do not become defaults: %+v", c)
	}
	_, _, problems = read(t, []string{"--frozen=" + strings.Repeat("x", 200) + "\n"}, environment())
	if len(problems) != 1 || !strings.Contains(problems[0], `"`+strings.Repeat("x", 98)+`… (103 bytes more)"`) {
		t.Errorf("a long value: %q", problems)
	}
}

func TestParse_Secrets(t *testing.T) {
	t.Parallel()
	var port uint16
	rows := []settings.Setting{{Name: "s", Arg: "S", Env: []string{}, Secret: true, Value: settings.Port(&port, 1)}}
	in, _ := settings.Parse(rows, []string{"--s=hunter2"}, nil)
	check.Fails(t, check.Err(in.Read(rows)), "flag -s: value of 7 bytes: want a decimal port")
	in, _ = settings.Parse(rows, []string{"-s=4711"}, nil)
	origins, err := in.Read(rows)
	check.OK(t, err)
	check.Equal(t, settings.Lines(rows, origins)[0].String(), `-s = "(4 bytes, not shown)" (flag -s)`)
}

func TestLayer_FrozenKeys(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		args []string
		data map[string]string
		want []string
		err  string
	}{
		{nil, map[string]string{"FROZEN": "snow", "LIVE": "9m", "unknown": "x", "NAME": ""}, []string{"FROZEN"}, ""},
		{nil, map[string]string{"FROZEN": "ice", "OLD-NAME": "x"}, []string{"OLD-NAME"}, ""},
		{[]string{"--frozen=ice"}, map[string]string{"FROZEN": "snow"}, nil, ""},
		{nil, map[string]string{"FROZEN": "rain"}, nil, `l key FROZEN: value "rain": want one of`},
	} {
		var c, scratch config
		in, _ := settings.Parse(c.rows(), tc.args, environment())
		check.OK(t, check.Err(in.Read(c.rows())))
		keys, err := in.Frozen(c.rows(), scratch.rows(), []settings.Layer{{Name: "l", Data: tc.data}})
		if diff := cmp.Diff(tc.want, keys); diff != "" || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
			t.Errorf("%v: error %v, -want +got:\n%s", tc.data, err, diff)
		}
	}
}

func TestVariables_Differ(t *testing.T) {
	t.Parallel()
	var c config
	in, _ := settings.Parse(c.rows(), nil, environment("NAME=a", "OLD-NAME=b"))
	origins, _ := in.Read(c.rows())
	const want = "environment variables NAME and OLD-NAME differ: the first one applies"
	check.Equal(t, in.Disagreement(c.rows()[0], origins.Flag("name")), want)
	if in, _ = settings.Parse(c.rows(), nil, environment("NAME=a", "OLD-NAME=a")); in.Disagreement(c.rows()[0], in.Find(c.rows()[0])) != "" {
		t.Error("equal texts are reported as a disagreement")
	}
}

func TestSetting_Names(t *testing.T) {
	t.Parallel()
	rows := settings.Named("P_", settings.Setting{Name: "a-b"}, settings.Setting{Name: "c", FlagOnly: true}, settings.Setting{Name: "d", Env: []string{"X"}})
	check.Diff(t, "named", [][]string{{"P_A_B"}, nil, {"X"}}, [][]string{rows[0].Env, rows[1].Env, rows[2].Env})
	check.Diff(t, "dashed", []string{"P_A-B", "P_A_B"}, settings.Dashed("P_", "a-b"))
}

func TestHelp_Text(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	settings.Help(&b, settings.Group{Title: "First", Rows: []settings.Setting{
		{Name: "a", Aliases: []string{"bb", "c"}, Arg: "X", Env: []string{"A"}, Default: "1", Use: strings.Repeat("word ", 25)},
	}}, settings.Group{Title: "Second", Rows: []settings.Setting{{Name: "cc", Default: "1", Shown: "one", Use: "switch"}}})
	want := "FIRST:\n   -a X, --bb X, -c X, $A\n      " + strings.TrimSpace(strings.Repeat("word ", 20)) + "\n      word word word word word (default: 1)\n" +
		"\nSECOND:\n   --cc\n      switch (default: one)\n"
	check.Diff(t, "result", want, b.String())
}

// TestSetting_Values has, for each type, valid texts with their spelling, and invalid texts.
func TestSetting_Values(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name  string
		value settings.Value
		good  map[string]string
		bad   []string
		want  string // of each error
	}{
		{"switch", settings.Bool(new(bool)), map[string]string{"1": "true", "T": "true", "false": "false"}, []string{"yes", "2", " true", ""}, "want true or false"},
		{
			"permissions", settings.Permissions(new(fs.FileMode)),
			map[string]string{"600": "0600", "0600": "0600", "0o600": "0600", "0O640": "0640"},
			[]string{"384", "0x180", "01000", "rw", "-1", "0o8", ""},
			"want permissions in octal digits, like 0600",
		},
		{"port", settings.Port(new(uint16), 0), map[string]string{"0": "0", "-3": "0", "8080": "8080"}, []string{"65536", "-x", "http", "0x50", "1e3"}, "want a decimal port from 0 to 65535"},
		{"listener", settings.Port(new(uint16), 1), map[string]string{"1": "1"}, []string{"0", "-1"}, "want a decimal port from 1 to 65535"},
		{"number", settings.Number(new(int), 255), map[string]string{"0": "0", "255": "255"}, []string{"256", "-1", "x", ""}, "want a number from 0 to 255"},
		{
			"list", settings.List(new([]string), ", \n", 1, settings.FileName),
			map[string]string{"a, b,,a\nc": "a,b,c"},
			[]string{", ", ""},
			"want at least one item",
		},
		{"list of paths", settings.List(new([]string), ",", 0, settings.AbsolutePath), map[string]string{"/a/,/b": "/a,/b", "": ""}, []string{"a,/b"}, `item "a": want an absolute path`},
		{"file name", settings.Checked(new(string), func(s string) error { return check.Err(settings.FileName(s)) }), map[string]string{"x.conf": "x.conf"}, []string{"a/b", "..", ".", " a", "", "a\x00"}, "want the name of a file"},
		{"path", settings.Text(new(string), settings.Optional(settings.AbsolutePath)), map[string]string{"/a/../b/": "/b", "": ""}, []string{"etc/cni", "./x", "/a\x00"}, "want an absolute path"},
		{"choice", settings.Choice(new(string), "", "ambient"), map[string]string{"ambient": "ambient", "": ""}, []string{"x"}, "want one of ambient"},
		{"duration", settings.Duration(new(time.Duration), time.Second, time.Hour), map[string]string{"1s": "1s", "1h": "1h0m0s"}, []string{"999ms", "3", "1h1s", "-2m"}, "want a duration "},
	} {
		for text, want := range tc.good {
			if err := tc.value.Set(text); err != nil || tc.value.String() != want {
				t.Errorf("%s: %q is %q, error %v; want %q", tc.name, text, tc.value, err, want)
			}
		}
		for _, text := range tc.bad {
			before := tc.value.String()
			if err := tc.value.Set(text); err == nil || !strings.HasPrefix(err.Error(), tc.want) || tc.value.String() != before {
				t.Errorf("%s: %q: error %v, value %q", tc.name, text, err, tc.value)
			}
		}
	}
}

func TestSuggestion_Near(t *testing.T) {
	t.Parallel()
	known := []string{"pods", "why", "trace", "decisions", "doctor", "--namespace", "--node", "-n"}
	for name, want := range map[string]string{
		"pod": "pods", "pdos": "pods", "wyh": "why", "decision": "decisions", "dec": "decisions", "docter": "doctor", "--namespce": "--namespace",
		"--name": "--namespace", "--no": "--node", "dance": "", "": "", "x": "", "--x": "", strings.Repeat("pods", 1000): "",
	} {
		if want != "" {
			want = ": did you mean " + strconv.Quote(want) + "?"
		}
		check.Equal(t, settings.Suggestion(name, known), want, name)
	}
}

func TestComplete_Words(t *testing.T) {
	t.Parallel()
	var states []string
	rows := append(new(config).rows(), settings.Setting{Name: "state", Aliases: []string{"s"}, Arg: "STATES", Value: settings.Choices(&states, "a", "ab")})
	for args, want := range map[string]string{
		"--fr": "--frozen", "--o": "--on", "-s": "-s", "--frozen,": "ice snow", "--frozen=": "--frozen=ice --frozen=snow", "--frozen,s": "snow",
		"-s,ab": "ab", "--on,": "? ", "": "? ", "x,y": "? y", "--name,y": "?name y", "--name=y": "?name y", "--name=,--frozen,i": "ice",
	} {
		c := settings.Complete(rows, strings.Split(args, ","))
		var got []string
		for _, one := range c.Found {
			got = append(got, one.Text)
		}
		if c.Open && got == nil {
			got = []string{"?" + c.Flag, c.Word}
		}
		check.Equal(t, strings.Join(got, " "), want, args)
	}
}
