package cniconf_test

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func stanza() cniconf.Stanza {
	return cniconf.Stanza{
		LogLevel: "info", RunDir: "/var/run/istio-cni", AgentNamespace: "istio-system", ExcludeNamespaces: []string{"kube-system"},
	}
}

func want(mode cniconf.Mode) cniconf.Want {
	return cniconf.Want{Mode: mode, Stanza: stanza(), OwnedName: cniconf.OwnedName, FileMode: 0o600, DropIns: cniconf.Loaded}
}

// dir makes a directory from names and texts. A name with a slash is a drop-in.
func dir(files ...string) cniconf.Dir {
	var d cniconf.Dir
	for i := 0; i < len(files); i += 2 {
		d = d.Apply(cniconf.Step{Op: cniconf.OpWrite, Name: files[i], Data: []byte(files[i+1]), Mode: 0o644})
	}
	return d
}

// with returns the directory with another file.
func with(d cniconf.Dir, name string, f cniconf.File) cniconf.Dir {
	d = d.Apply(cniconf.Step{})
	d[name] = f
	return d
}

// run returns the directory at the start and after each step.
func run(d cniconf.Dir, steps []cniconf.Step) []cniconf.Dir {
	out := []cniconf.Dir{d}
	for _, s := range steps {
		d = d.Apply(s)
		out = append(out, d)
	}
	return out
}

// end returns the directory after all steps.
func end(d cniconf.Dir, steps []cniconf.Step) cniconf.Dir {
	all := run(d, steps)
	return all[len(all)-1]
}

// installed and removed return the directory after all steps of a plan.
func installed(w cniconf.Want, d cniconf.Dir) cniconf.Dir { return end(d, w.Plan(d).Steps) }
func removed(w cniconf.Want, d cniconf.Dir) cniconf.Dir   { return end(d, w.Uninstall(d).Steps) }

func texts(d cniconf.Dir) map[string]string {
	out := map[string]string{}
	for name, f := range d {
		out[name] = fmt.Sprintf("%04o %s", f.Mode, f.Data)
		if f.Link {
			out[name] = "link to " + out[name]
		}
	}
	return out
}

// types returns the plugins that a runtime with drop-ins runs.
func types(d cniconf.Dir) []string {
	_, n, _ := d.Loaded()
	out := slices.Clone(n.Types)
	if n.InlinedOnly || !n.List {
		return out
	}
	for _, name := range d.DropIns(n.Name) {
		if single, err := cniconf.Load(name, d[name].Data); err == nil {
			out = append(out, single.Types...)
		}
	}
	return out
}

const (
	bridgeConf = `{
	"cniVersion": "0.4.0",
	"name": "mynet",   "type": "bridge",
	"n": 12345678901234567890, "s": "<&>\u003c", "f": 1.0
}`
	list = `{"cniVersion":"1.0.0","name":"net","x":1e3,
    "plugins": [
      {"type": "calico", "mtu": 0},
      {"type": "portmap", "capabilities": {"portMappings": true}}
    ],"disableCheck":true}` + "\n"
	// odd has an order of keys, and spellings of numbers and characters, that JSON encoders change.
	odd       = `{"z": 12345678901234567890, "type": "x",  "a": 1.0, "e": 1E3, "s": "<&>\u003c\/", "z2": -0}`
	reference = `{
  "cniVersion": "0.3.1",
  "name": "k8s-pod-network",
  "plugins": [
    {
      "type": "istio-cni",
      "kubernetes": {
        "kubeconfig": "/etc/cni/net.d/ZZZ-istio-cni-kubeconfig"
      }
    },
    {
      "type": "bridge"
    },
    {
      "name": "istio-cni",
      "type": "istio-cni"
    }
  ]
}
`
)

// places returns the initial directories.
func places() map[string]cniconf.Dir {
	return map[string]cniconf.Dir{
		"list":                    dir("10-calico.conflist", list),
		"list and another":        dir("10-calico.conflist", list, "87-podman.conflist", strings.Replace(list, "net", "podman", 1)),
		"single":                  dir("10-bridge.conf", bridgeConf),
		"single without newline":  dir("10-bridge.conf", `{"type":"bridge"}`),
		"W-31 single .json":       dir("10-bridge.json", bridgeConf+"\n"),
		"single and foreign twin": dir("10-bridge.conf", bridgeConf, "10-bridge.conflist", list),
		"single and near names":   dir("10-bridge.conf", bridgeConf, "10-bridge.conf0.conflist", list),
		"prepared by reference":   dir("10-bridge.conflist", reference),
		"garbage first":           dir("00-garbage.conf", "{", "05-empty.conflist", "", "10-calico.conflist", list),
		"drop-ins of others":      dir("10-calico.conflist", list, "net/50-tuning.conf", `{"type":"tuning"}`),
		"newer version":           dir("10-bridge.conf", `{"cniVersion":"9.9.9","name":"n","type":"bridge"}`),
		"one line":                dir("a.conflist", `{"name":"n","plugins":[{"type":"ptp"}]}`),
		"link":                    with(nil, "10-b.conf", cniconf.File{Data: []byte(bridgeConf), Mode: 0o644, Link: true}),
		"crlf":                    dir("a.conflist", strings.ReplaceAll(list, "\n", "\r\n")),
		"W-18 an old version":     dir("10-bridge.conf", `{"cniVersion":"0.2.0","name":"net","type":"bridge"}`),
		"W-18 no version":         dir("10-bridge.conf", `{"name":"net","type":"bridge"}`),
		"W-19 an odd single":      dir("10-x.conf", odd),
		"W-19 an odd list":        dir("10-x.conflist", `{"name":"n","plugins":[`+odd+`,{"type":"y"}],"<k>":"&"}`),
	}
}

// released returns the expected directory after removal: without the stanzas that the initial directory had.
func released(d cniconf.Dir) cniconf.Dir { return removed(cniconf.Want{}, d) }

// neighbours returns the plugins of other programs that a runtime runs.
func neighbours(d cniconf.Dir) []string {
	return slices.DeleteFunc(types(d), func(s string) bool { return s == "istio-cni" })
}

// TestPlan_EveryInstantIsValid takes all initial directories and real platforms' configurations through every mode, stops after each
// step as a crash would, and checks the file that a runtime would load, a second run, and removal.
func TestPlan_EveryInstantIsValid(t *testing.T) {
	t.Parallel()
	platforms := shapes(t)
	all := places()
	maps.Copy(all, platforms)
	for name, start := range all {
		agree(t, start)
		for _, mode := range []cniconf.Mode{cniconf.Inline, cniconf.DropIn, cniconf.Owned, cniconf.Auto} {
			t.Run(name+"/"+string(mode), func(t *testing.T) {
				t.Parallel()
				w := want(mode)
				plan := w.Plan(start)
				first, _, _ := start.Loaded()
				switch {
				case name == "reference-1.22-interrupted": // no runtime loads it, and the stanza shows that it is ours
					if got := types(end(start, plan.Steps)); len(got) < 2 || got[len(got)-1] != "istio-cni" {
						t.Errorf("the runtime runs %q", got)
					}
				case first == "":
					if plan.Waiting == "" || len(plan.Steps) > 0 {
						t.Errorf("without a loadable file the plan is %+v", plan)
					}
				case plan.Problem != nil:
					text := plan.Problem.Error()
					single := mode == cniconf.DropIn && strings.Contains(text, "use inline")
					odd := strings.Contains(text, "use dropin") || strings.Contains(text, "does not serve") ||
						mode == cniconf.Owned && strings.Contains(text, "must sort first") && first < cniconf.OwnedName
					if len(plan.Steps) > 0 || !single && (!odd || platforms[name] == nil) {
						t.Error(plan.Problem)
					}
				default:
					checkPlan(t, w, start, plan)
				}
			})
		}
	}
}

func checkPlan(t *testing.T, w cniconf.Want, start cniconf.Dir, plan cniconf.Plan) {
	t.Helper()
	dirs, done := run(start, plan.Steps), end(start, plan.Steps)
	without := types(released(start))
	got := types(done)
	if strings.Contains(strings.Join(plan.Warnings, ""), "run behind the stanza") {
		got = append(neighbours(done), "istio-cni") // the warning reports that it is not the last plugin
	}
	if !slices.Equal(got, append(slices.Clone(without), "istio-cni")) {
		t.Errorf("the runtime runs %q, want %q and the stanza", got, without)
	}
	if again := w.Plan(done); len(again.Steps) > 0 || again.Problem != nil || again.Waiting != "" || again.File != plan.File {
		t.Errorf("a second run changes more: %+v", again)
	}
	original, before, skipped := released(start).Loaded()
	unserved := slices.Contains([]string{"9.9.9", "latest"}, before.Version)
	same := func(i int, work string, want, got cniconf.Dir) {
		t.Helper()
		check.Diff(t, fmt.Sprintf("stopped after %d steps, %s leads elsewhere", i, work), texts(want), texts(got))
	}
	for i, d := range dirs {
		agree(t, d)
		first, now, more := d.Loaded()
		if first == "" || len(more) > len(skipped) {
			t.Errorf("after %d steps the runtime loads %q, skipping %v", i, first, more)
		}
		if before.Name != "" && now.Name != before.Name || now.Version != before.Version && (!unserved || now.Version != "1.1.0") {
			t.Errorf("W-18: after %d steps network %q, version %q; want %q, %q", i, now.Name, now.Version, before.Name, before.Version)
		}
		if bytes.Contains(start[original].Data, []byte(odd)) && !bytes.Contains(d[first].Data, []byte(odd)) {
			t.Errorf("W-19: after %d steps a neighbour has other bytes:\n%s", i, d[first].Data)
		}
		if got := neighbours(d); !slices.Equal(got, without) {
			t.Errorf("after %d steps the runtime runs %q, want %q", i, got, without)
		}
		same(i, "a second run", done, installed(w, d))
		same(i, "removal", released(start), removed(w, d))
	}
	for i, d := range run(done, w.Uninstall(done).Steps) {
		if got := neighbours(d); !slices.Equal(got, without) {
			t.Errorf("after %d steps of removal the runtime runs %q, want %q", i, got, without)
		}
		same(i, "a second removal", released(start), released(d))
		same(i, "an installation during removal", done, installed(w, d))
	}
}

// TestPlan_ModeChanges: a directory whose mode changes ends as if it had that mode from the start.
func TestPlan_ModeChanges(t *testing.T) {
	t.Parallel()
	modes := []cniconf.Mode{cniconf.Inline, cniconf.DropIn, cniconf.Owned, cniconf.Standalone}
	for name, start := range places() {
		for _, from := range modes {
			for _, to := range modes {
				if want(from).Plan(start).Problem != nil || want(to).Plan(start).Problem != nil {
					continue
				}
				got := installed(want(to), installed(want(from), start))
				check.Diff(t, fmt.Sprintf("%s, %s by way of %s", name, to, from), texts(installed(want(to), start)), texts(got))
			}
		}
	}
}

// TestPlan_PrimaryChanges: another file now sorts first, or another program rewrites the original of a converted or
// copied file. The content of our own file survives a network plugin that rewrites its file at boot, before the agent
// starts.
func TestPlan_PrimaryChanges(t *testing.T) {
	t.Parallel()
	changed := strings.NewReplacer("calico", "cilium", "1.0.0", "0.4.0").Replace(list)
	macvlan := strings.Replace(bridgeConf, "bridge", "macvlan", 1)
	for name, tc := range map[string]struct {
		mode        cniconf.Mode
		start, then cniconf.Dir
		types       []string
	}{
		"another goes first": {cniconf.Inline, dir("10-a.conflist", list), dir("10-a.conflist", list, "05-b.conflist", changed), []string{"cilium", "portmap"}},
		"another went first": {cniconf.Inline, dir("10-a.conflist", list, "05-b.conflist", changed), dir("10-a.conflist", list), []string{"calico", "portmap"}},
		"written again":      {cniconf.Inline, dir("10-a.conf", bridgeConf), dir("10-a.conf", macvlan), []string{"macvlan"}},
		"copied again":       {cniconf.Owned, dir("10-a.conflist", list), dir("10-a.conflist", changed), []string{"cilium", "portmap"}},
		"W-26 owned":         {cniconf.Owned, dir("10-a.conflist", list), dir("10-a.conflist", list), []string{"calico", "portmap"}},
		"W-26 drop-in":       {cniconf.DropIn, dir("10-a.conflist", list), dir("10-a.conflist", list), []string{"calico", "portmap"}},
	} {
		w := want(tc.mode)
		d := installed(w, tc.start)
		for file := range tc.start {
			delete(d, file)
		}
		maps.Copy(d, tc.then)
		if !strings.HasPrefix(name, "W-26") {
			d = installed(w, d)
		}
		if got := types(d); !slices.Equal(got, append(slices.Clone(tc.types), "istio-cni")) {
			t.Errorf("%s: the runtime runs %q", name, got)
		}
		check.Diff(t, name+": after removal", texts(tc.then), texts(removed(w, d)))
	}
}

func agree(t *testing.T, d cniconf.Dir) {
	t.Helper()
	root := t.TempDir()
	for name, f := range d {
		put(t, filepath.Join(root, name), f.Data)
	}
	for _, name := range d.Names() {
		n, ours := cniconf.Load(name, d[name].Data)
		list, theirs := load(filepath.Join(root, name))
		if n.List && ours == nil && (len(n.Types) == 0 || len(d.DropIns(n.Name)) > 0 || n.Name == "") {
			continue // validity depends on the drop-ins
		}
		if (ours == nil) != (theirs == nil) {
			t.Errorf("%s: error %v, of libcni %v", name, ours, theirs)
			continue
		}
		if theirs == nil && (list.Name != n.Name || list.CNIVersion != n.Version && !bytes.Contains(d[name].Data, []byte("cniVersions"))) {
			t.Errorf("%s: name and version %q %q, libcni has %q %q", name, n.Name, n.Version, list.Name, list.CNIVersion)
		}
	}
	first, n, _ := d.Loaded()
	if n.Name == "" {
		return // no runtime can use it: its drop-in directory is the directory itself
	}
	for _, name := range d.DropIns(n.Name) {
		if _, err := cniconf.Load(name, d[name].Data); err != nil {
			return // some runtimes refuse the network, others ignore the file; the plan warns
		}
	}
	loaded, err := load(filepath.Join(root, first))
	check.OK(t, err, "libcni does not load", first)
	var got []string
	for _, p := range loaded.Plugins {
		got = append(got, p.Network.Type)
	}
	if !slices.Equal(got, types(d)) {
		t.Errorf("libcni runs %q, this package expects %q", got, types(d))
	}
}

func put(t *testing.T, file string, data []byte) {
	t.Helper()
	check.OK(t, os.MkdirAll(filepath.Dir(file), 0o755))
	check.OK(t, os.WriteFile(file, data, 0o600))
}

// load reads a file as containerd and CRI-O do.
func load(file string) (*libcni.NetworkConfigList, error) {
	if filepath.Ext(file) == ".conflist" {
		return libcni.ConfListFromFile(file)
	}
	single, err := libcni.ConfFromFile(file) //nolint:staticcheck // as runtimes do
	if err != nil {
		return nil, err
	}
	return libcni.ConfListFromConf(single) //nolint:staticcheck // as runtimes do
}

// shapes returns the directories of testdata, which have real platforms' files.
func shapes(t *testing.T) map[string]cniconf.Dir {
	t.Helper()
	roots, err := filepath.Glob("testdata/shapes/*")
	if err != nil || len(roots) == 0 {
		t.Fatalf("no directories in testdata: %v", err)
	}
	out := map[string]cniconf.Dir{}
	for _, root := range roots {
		var files []string
		err := filepath.WalkDir(root, func(file string, e os.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return err
			}
			text, err := os.ReadFile(file)
			name := strings.TrimPrefix(file, root+"/")
			if cniconf.Candidate(name) {
				files = append(files, name, string(text))
			}
			return err
		})
		check.OK(t, err)
		out[filepath.Base(root)] = dir(files...)
	}
	return out
}

// TestPlan_BrokenFiles compares our reading of damaged files with libcni's.
func TestPlan_BrokenFiles(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/broken/*.*")
	if err != nil || len(files) < 10 {
		t.Fatalf("broken files: %d, %v", len(files), err)
	}
	for _, file := range files {
		name := filepath.Base(file)
		if !cniconf.Candidate(name) {
			continue
		}
		text, err := os.ReadFile(file)
		check.OK(t, err)
		d := dir(name, string(text))
		agree(t, d)
		for _, mode := range []cniconf.Mode{cniconf.Inline, cniconf.Owned, cniconf.DropIn} {
			if _, err := load(file); err == nil {
				continue
			}
			if plan := want(mode).Plan(d); plan.Waiting == "" || len(plan.Steps) > 0 {
				t.Errorf("%s, %s: %+v, want to wait", name, mode, plan)
			}
			w := want(mode)
			if strings.HasPrefix(name, "list-in-") {
				continue // it becomes a list if the user names it
			}
			w.ConfName = name // then no other file gets the stanza
			if plan := w.Plan(with(d, "99-other.conflist", cniconf.File{Data: []byte(list)})); plan.Waiting == "" || len(plan.Steps) > 0 {
				t.Errorf("W-22: %s named by the user, %s: %+v, want to wait", name, mode, plan)
			}
		}
	}
}

// TestPlan_NamedConf: the user named a list with a single plugin's extension. No runtime reads such a file.
func TestPlan_NamedConf(t *testing.T) {
	t.Parallel()
	const list = `{"cniVersion":"0.4.0","name":"net","plugins":[{"type":"calico"},{"type":"portmap"}]}`
	other := strings.Replace(list, "calico", "ptp", 1)
	single := dir("10-x.conf", list)
	ours := installed(want(cniconf.Inline), dir("10-x.conflist", other))["10-x.conflist"]
	const dropIn = "net/" + cniconf.DropInName
	type files map[string]string
	for name, tc := range map[string]struct {
		mode   cniconf.Mode
		start  cniconf.Dir
		target string
		back   files
	}{
		"inline":              {cniconf.Inline, single, "10-x.conflist", files{"10-x.conf": "0644 " + list}},
		"json":                {cniconf.Inline, dir("10-x.json", list), "10-x.conflist", files{"10-x.json": "0644 " + list}},
		"auto":                {cniconf.Auto, single, dropIn, files{"10-x.conflist": "0644 " + list}},
		"drop-in":             {cniconf.DropIn, single, dropIn, files{"10-x.conflist": "0644 " + list}},
		"owned":               {cniconf.Owned, single, cniconf.OwnedName, files{"10-x.conflist": "0644 " + list}},
		"beside our own list": {cniconf.Inline, with(single, "10-x.conflist", ours), "10-x.conflist", files{"10-x.conf": "0644 " + list}},
		"beside another's list": {
			cniconf.Inline, dir("10-x.conf", list, "10-x.conflist", other), "10-x.conf.conflist",
			files{"10-x.conf": "0644 " + list, "10-x.conflist": "0644 " + other},
		},
		"a link": {
			cniconf.Inline, with(nil, "10-x.conf", cniconf.File{Data: []byte(list), Mode: 0o644, Link: true}), "10-x.conflist",
			files{"10-x.conf": "link to 0644 " + list},
		},
	} {
		w := want(tc.mode)
		w.ConfName = tc.start.Names()[0]
		plan := w.Plan(tc.start)
		if plan.Problem != nil || plan.Waiting != "" || len(plan.Steps) != 2 || plan.File != tc.target {
			t.Fatalf("%s: plan %+v", name, plan)
		}
		done := end(tc.start, plan.Steps)
		for i, d := range run(tc.start, plan.Steps)[1:] {
			if got := types(d); slices.Contains(got, "calico") && got[len(got)-1] != "istio-cni" && tc.target != dropIn {
				t.Errorf("%s, step %d: the runtime runs %q without the stanza", name, i, got)
			}
			if diff := cmp.Diff(texts(done), texts(installed(w, d))); diff != "" || w.Plan(d).Problem != nil {
				t.Errorf("%s, from step %d on: %v (-want +got):\n%s", name, i, w.Plan(d).Problem, diff)
			}
		}
		if again := w.Plan(done); len(again.Steps) > 0 || again.Problem != nil {
			t.Errorf("%s: a second run changes more: %+v", name, again)
		}
		check.Diff(t, fmt.Sprintf("%s: after removal", name), tc.back, files(texts(removed(w, done))))
	}
}

// TestPlan_Deterministic: a new plan for the same directory, for example after a failed step, continues where the last
// plan stopped.
func TestPlan_Deterministic(t *testing.T) {
	t.Parallel()
	saved := cniconf.File{Data: []byte(bridgeConf), Mode: 0o644}
	two := with(installed(want(cniconf.Inline), dir("10-a.conf", bridgeConf)), "10-a.json.istio-cni-saved", saved)
	for name, d := range map[string]cniconf.Dir{
		"two saved originals": two, "one of two has returned": with(two, "10-a.json", saved),
	} {
		plans := func() [][]cniconf.Step {
			return [][]cniconf.Step{want(cniconf.Inline).Uninstall(d).Steps, want(cniconf.Owned).Plan(d).Steps, want(cniconf.Standalone).Plan(d).Steps}
		}
		first := plans()
		if slices.ContainsFunc(first, func(steps []cniconf.Step) bool { return len(steps) == 0 }) {
			t.Errorf("%s: a plan without steps: %v", name, first)
		}
		for range 200 {
			if diff := cmp.Diff(first, plans()); diff != "" {
				t.Errorf("%s: two plans differ (-first +other):\n%s", name, diff)
				break
			}
		}
	}
}

// TestPlan_DamagedStanza: no other program would repair our stanza if it keeps the runtime from loading the file.
func TestPlan_DamagedStanza(t *testing.T) {
	t.Parallel()
	for _, damaged := range []string{`{"type":"istio-cni","ipam":"x"}`, `{"type":"istio-cni","x":1e999}`, `{"type":"istio-cni","capabilities":{"a":1}}`} {
		start := dir("10-a.conflist", `{"name":"n","plugins":[{"type":"calico"},`+damaged+`]}`)
		for _, name := range []string{"", "10-a.conflist"} {
			w := want(cniconf.Inline)
			w.ConfName = name
			plan := w.Plan(start)
			check.Diff(t, fmt.Sprintf("%s: types after %+v", damaged, plan), []string{"calico", "istio-cni"}, types(end(start, plan.Steps)))
		}
		check.Diff(t, damaged+": types after removal", []string{"calico"}, types(removed(want(cniconf.Inline), start)))
	}
}

// TestPlan_BadTemplate: a stanza never keeps the runtime from loading its file.
func TestPlan_BadTemplate(t *testing.T) {
	t.Parallel()
	for _, template := range []string{
		`{"type":"istio-cni","ipam":"x"}`, `{"type":"istio-cni","ipam":{"type":5}}`, `{"type":"istio-cni","dns":{"nameservers":"x"}}`,
		`{"type":"istio-cni","capabilities":{"a":1}}`, `{"type":"istio-cni","prevResult":5}`, `{"type":"istio-cni","x":1e999}`,
	} {
		for _, start := range []cniconf.Dir{dir("10-a.conflist", list), dir("10-a.conf", bridgeConf)} {
			for _, mode := range []cniconf.Mode{cniconf.Inline, cniconf.Owned, cniconf.DropIn, cniconf.Auto} {
				w := want(mode)
				w.Stanza.Template = []byte(template)
				plan := w.Plan(start)
				before := types(start)
				for _, d := range run(start, plan.Steps) {
					if !slices.Equal(types(d), before) {
						t.Errorf("%s, %s: the runtime runs %q", template, mode, types(d))
					}
				}
				if plan.Problem == nil {
					t.Errorf("%s, %s: no problem", template, mode)
				}
			}
		}
	}
}

func TestPlan_OwnedCopy(t *testing.T) {
	t.Parallel()
	start := dir("10-calico.conflist", list)
	w := want(cniconf.Owned)
	w.OwnedName = "00-mine.conflist"
	owned := installed(w, start)
	check.Diff(t, "result", texts(start), texts(removed(want(cniconf.Inline), owned)))
	w.OwnedName = "01-new.conflist"
	check.Diff(t, "types", []string{"calico", "portmap", "istio-cni"}, types(installed(w, owned)))
}

// TestPlan_Refusals: a plan without steps says why, and the removal changes nothing either.
func TestPlan_Refusals(t *testing.T) {
	t.Parallel()
	const conf, flat = "10-x.conf", `{"cniVersion":"0.4.0","name":"net","plugins":[{"type":"calico"},{"type":"portmap"}]}`
	theirs := strings.Replace(list, "net", "theirs", 1)
	loopback := dir("99-lo.conflist", `{"name":"lo","plugins":[{"type":"loopback"}]}`)
	unseen := with(loopback, "10-a.conflist", cniconf.File{Unseen: "a link to somewhere else"})
	for name, tc := range map[string]struct {
		mode    cniconf.Mode
		named   string
		start   cniconf.Dir
		problem string // "" for a wait
	}{
		"a file that is not seen":       {cniconf.Inline, "", unseen, "a link to somewhere else"},
		"another's owned file":          {cniconf.Owned, "", dir("10-x.conflist", list, cniconf.OwnedName, theirs), "was not made by this program"},
		"another's standalone file":     {cniconf.Standalone, "YYY.conflist", dir("YYY.conflist", theirs), "was not made by this program"},
		"a list as .conf, not named":    {cniconf.Inline, "", dir(conf, flat), ""},
		"an empty list as .conf, named": {cniconf.Inline, conf, dir(conf, `{"name":"net","plugins":[]}`), ""},
		"no twin of another extension":  {cniconf.Inline, "10-x.v2", dir("99-other.conflist", list, "10-x.conflist", list), ""},
		"no twin without an extension":  {cniconf.Inline, "10-x", dir("99-other.conflist", list, "10-x.conflist", list), ""},
	} {
		w := want(tc.mode)
		w.ConfName = tc.named
		plan := w.Plan(tc.start)
		refused := tc.problem != "" && strings.Contains(fmt.Sprint(plan.Problem), tc.problem)
		if !refused && (tc.problem != "" || plan.Waiting == "") || len(plan.Steps) > 0 || len(w.Uninstall(tc.start).Steps) > 0 {
			t.Errorf("%s: plan %+v", name, plan)
		}
	}
}

// TestPlan_TwinOfNamedFile: a single plugin may have become a list, and a list a single plugin.
func TestPlan_TwinOfNamedFile(t *testing.T) {
	for name, twin := range map[string]string{"10-x.conf": "10-x.conflist", "10-x.json": "10-x.conflist", "10-x.conflist": "10-x.conf"} {
		text := map[string]string{"10-x.conflist": list, "10-x.conf": bridgeConf}[twin]
		w := want(cniconf.Inline)
		w.ConfName = name
		if plan := w.Plan(dir("99-other.conflist", list, twin, text)); plan.Primary != "10-x.conflist" || len(plan.Steps) == 0 {
			t.Errorf("%s: %+v", name, plan)
		}
	}
}

// TestPlan_StandaloneVersion: installation rewrites a file with another version; uninstallation with any version removes it.
func TestPlan_StandaloneVersion(t *testing.T) {
	for name, file := range map[string]string{"": cniconf.StandaloneName, "istio-cni.conf": "istio-cni.conf", "own.conflist": "own.conflist"} {
		want := func(version string) cniconf.Want {
			return cniconf.Want{Mode: cniconf.Standalone, ConfName: name, Stanza: cniconf.Stanza{CNIVersion: version}, FileMode: 0o600}
		}
		for _, version := range cniconf.Versions() {
			d := installed(want(""), dir("10-calico.conflist", list))
			if got, err := cniconf.Load(file, d[file].Data); err != nil || got.Version != "0.3.1" {
				t.Errorf("%s: version %q without a setting, error %v", file, got.Version, err)
			}
			d = installed(want(version), d)
			if got, err := cniconf.Load(file, d[file].Data); err != nil || got.Version != version {
				t.Errorf("%s: version %q, error %v, want %s", file, got.Version, err, version)
			}
			if again := want(version).Plan(d); len(again.Steps) != 0 || again.Problem != nil {
				t.Errorf("%s %s: a second plan has steps: %+v", file, version, again)
			}
			if left := removed(want("1.0.0"), d); len(left) != 1 || left["10-calico.conflist"].Data == nil {
				t.Errorf("%s %s: after the uninstallation: %v", file, version, texts(left))
			}
		}
	}
	template := cniconf.Stanza{CNIVersion: "1.0.0", Template: []byte(`{"type": "istio-cni"}`)}
	if text := string(template.Single()); !strings.Contains(text, `"cniVersion": "1.0.0"`) {
		t.Errorf("a template without a version: %s", text)
	}
	if text := string(template.Element()); strings.Contains(text, "cniVersion") {
		t.Errorf("in a list: %s", text)
	}
}
