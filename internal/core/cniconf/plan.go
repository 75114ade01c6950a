package cniconf

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
)

// Mode selects the file for the stanza, spelled as in settings; "" is Inline.
type Mode string

// Inline edits the primary configuration; DropIn puts a file into the directory of its network; Owned makes a copy of the
// primary configuration with the stanza, which the runtime finds first; Standalone makes a file with the stanza alone, for
// a meta plugin. Auto is DropIn where the runtime loads such files and the primary configuration allows them, else Inline.
const (
	Inline     Mode = "inline"
	DropIn     Mode = "dropin"
	Owned      Mode = "owned"
	Standalone Mode = "standalone"
	Auto       Mode = "auto"
)

// Names of files that this program makes.
const (
	// DropInName sorts behind drop-in files of other programs because the plugin must run last.
	DropInName = "zzz-istio-cni.conf"
	// StandaloneName and OwnedName are the reference's.
	StandaloneName = "YYY-istio-cni.conf"
	OwnedName      = "02-istio-cni.conflist"
	// savedSuffix marks the original of a converted file. Runtimes do not read it.
	savedSuffix = ".istio-cni-saved"
)

// Saved reports whether the name belongs to a saved original.
func Saved(name string) bool { return strings.HasSuffix(name, savedSuffix) }

// Original returns the former name of a saved original.
func Original(saved string) string { return strings.TrimSuffix(saved, savedSuffix) }

// Op is the operation of a step.
type Op string

// OpWrite replaces or creates a file atomically, OpRename replaces the target, OpRemove removes a file, OpRemoveDir an
// empty directory. OpReload makes runtimes read the directory again: they do not watch its subdirectories.
const (
	OpWrite     Op = "write"
	OpRename    Op = "rename"
	OpRemove    Op = "remove"
	OpRemoveDir Op = "remove directory"
	OpReload    Op = "trigger a reload"
)

// Step is one atomic change of a directory.
type Step struct {
	Op Op
	// Name and To are relative to the directory.
	Name, To string
	Data     []byte
	Mode     uint32
	// Why is the reason, for logs.
	Why string
}

// String describes the step for logs.
func (s Step) String() string {
	text := string(s.Op)
	if s.Name != "" {
		text += fmt.Sprintf(" %q", s.Name)
	}
	if s.To != "" {
		text += fmt.Sprintf(" to %q", s.To)
	}
	return text + ": " + s.Why
}

// Want is the desired state of a configuration directory.
type Want struct {
	Mode   Mode
	Stanza Stanza
	// ConfName is the file that the user named: the primary configuration, or the file to write in standalone mode. If empty,
	// the primary configuration is the file that the runtime loads.
	ConfName string
	// OwnedName is the file to write in owned mode.
	OwnedName string
	// FileMode is for files that hold only this program's stanza.
	FileMode uint32
	// DropIns says whether the runtime loads drop-in files.
	DropIns Support
}

// Support says whether the runtime loads drop-in files. The runtime's configuration does not show this.
type Support uint8

// Unknown keeps the present state: an existing drop-in file stays, and no new one is created.
const (
	Unknown Support = iota
	Loaded
	NotLoaded
)

// Plan holds the steps from a directory to its desired state. If the runtime can load a configuration before the plan, it
// can after each step. An empty plan without Waiting and Problem means that the directory is in the desired state.
type Plan struct {
	Steps []Step
	// Waiting names the configuration file that the plan waits for; another program writes it.
	Waiting string
	// Problem says why the desired state needs a change by the user.
	Problem error
	// Warnings are for the user too, but do not prevent the desired state.
	Warnings []string
	// File is the file with the stanza, relative to the directory; Primary is the configuration that contains the stanza or
	// lies beside File; Mode is the chosen mode.
	File, Primary string
	Mode          Mode
}

// Plan compares the directory with the desired state.
func (w Want) Plan(d Dir) Plan {
	p := newPlanner(w, d)
	if err := Usable(w.Stanza.Element()); err != nil {
		p.plan.Problem = fmt.Errorf("the stanza: %w", err)
		return p.plan
	}
	p.interrupted()
	switch w.Mode {
	case Standalone:
		p.standalone()
	case Owned:
		p.owned()
	case DropIn, Auto:
		p.dropIn()
	case Inline, "":
		p.inline()
	}
	return p.plan
}

// Uninstall returns the plan that restores the directory: it removes all stanzas of this program, in any mode, and
// restores converted files unless another program changed them since.
func (w Want) Uninstall(d Dir) Plan {
	p := newPlanner(w, d)
	p.interrupted()
	p.release("")
	return p.plan
}

// planner collects steps and applies them to its view of the directory.
type planner struct {
	want Want
	dir  Dir
	plan Plan
	// repaired are files whose damaged stanza the planner does not see.
	repaired map[string]bool
}

func newPlanner(w Want, d Dir) *planner {
	return &planner{want: w, dir: maps.Clone(d), plan: Plan{Mode: w.Mode}, repaired: map[string]bool{}}
}

func (p *planner) do(s Step) {
	p.dir = p.dir.Apply(s)
	p.plan.Steps = append(p.plan.Steps, s)
}

// write adds a step unless the file already has this content and mode.
func (p *planner) write(name string, data []byte, mode uint32, why string) {
	if f, there := p.dir[name]; there && bytes.Equal(f.Data, data) && f.Mode == mode && !p.repaired[name] {
		return
	}
	if _, err := Load(name, data); err != nil && Candidate(name) {
		// A stanza of this program must never make a file invalid for the runtime.
		p.plan.Problem = fmt.Errorf("no runtime could load file %q with the stanza: %w", name, err)
		return
	}
	p.do(Step{Op: OpWrite, Name: name, Data: data, Mode: mode, Why: why})
}

func (p *planner) warn(format string, args ...any) {
	p.plan.Warnings = append(p.plan.Warnings, fmt.Sprintf(format, args...))
}

// inline puts the stanza into the primary configuration and removes it from all other files.
func (p *planner) inline() {
	p.plan.Mode = Inline
	name, ok := p.primary()
	if !ok {
		return
	}
	p.plan.Primary, p.plan.File = name, name
	err := p.served(name)
	if err != nil {
		p.release("")
	} else if p.isList(name) && !p.misplaced(name) {
		err = p.insert(name)
	} else {
		err = p.convert(name)
	}
	if err != nil {
		p.plan.Problem = fmt.Errorf("primary configuration %q: %w", name, err)
	}
	if p.plan.Problem != nil {
		return
	}
	p.release(p.plan.File)
	p.check()
}

// served refuses a list in a version that the plugin does not support: every pod of the node would fail.
func (p *planner) served(name string) error {
	text := p.dir[name].Data
	n, err := loadList(text)
	if err != nil || n.Version == "" || slices.Contains(Versions(), n.Version) || bytes.Contains(text, []byte(`"cniVersions"`)) || !p.isList(name) {
		return nil //nolint:nilerr // an unreadable list has no version
	}
	return fmt.Errorf("it has CNI version %q, which this plugin does not serve (%s)", n.Version, strings.Join(Versions(), ", "))
}

// insert puts the stanza into a list.
func (p *planner) insert(name string) error {
	f := p.dir[name]
	list, err := Insert(f.Data, p.want.Stanza.Element())
	if err == nil {
		p.write(name, list, f.Mode, "the stanza goes behind the other plugins")
	}
	return err
}

// convert turns a file that runtimes do not read as a list into a list, under a list's name. It writes the list first:
// of the two files the runtime loads the one whose name sorts first, and both are valid. Then it moves the original
// aside; it moves a symbolic link too, so that the link's target stays unchanged.
func (p *planner) convert(name string) error {
	list, err := p.asList(name)
	if err == nil {
		list, err = Insert(list, p.want.Stanza.Element())
	}
	if err != nil {
		return err
	}
	if _, err = loadList(list); err != nil {
		return fmt.Errorf("no runtime could load it with the stanza: %w", err)
	}
	f, target, saved := p.dir[name], p.target(name), name+savedSuffix
	p.plan.File, p.plan.Primary = target, target
	if target == name {
		p.write(saved, f.Data, f.Mode, savedWhy)
		p.write(target, list, f.Mode, "the list with the stanza")
		return nil
	}
	p.write(target, list, f.Mode, "the list with the stanza")
	if _, taken := p.dir[saved]; taken {
		p.do(Step{Op: OpRemove, Name: saved, Why: "the original is another one by now"})
	}
	p.do(Step{Op: OpRename, Name: name, To: saved, Why: savedWhy})
	return nil
}

// savedWhy is the reason for moving an original aside.
const savedWhy = "keeps the original for the day of removal"

// correctName renames a list that has the name of a single plugin if the stanza is already elsewhere.
func (p *planner) correctName(primary string) {
	if !p.misplaced(primary) {
		return
	}
	p.plan.Primary = p.target(primary)
	p.do(Step{Op: OpRename, Name: primary, To: p.plan.Primary, Why: "it holds a list, which runtimes read under this name only"})
}

// target returns the name of the list that replaces a single plugin's file: the stem with .conflist, or the whole name with
// .conflist if the former belongs to another program or would not be the first file that the runtime finds.
func (p *planner) target(name string) string {
	ext := path.Ext(name)
	if ext != extSingle && ext != extSingleJSON {
		return name
	}
	plain := strings.TrimSuffix(name, ext) + extList
	_, taken := p.dir[plain]
	_, mine := p.dir[name+savedSuffix]
	mine = (mine || p.misplaced(name)) && p.hasOwn(plain) || p.converts(name, plain)
	others := p.dir.Apply(Step{Op: OpRename, Name: name, To: plain})
	maps.DeleteFunc(others, func(other string, _ File) bool { return p.ownFile(other) })
	first, _, _ := others.Loaded()
	if taken && !mine || p.want.ConfName == "" && first < plain && first != "" {
		return name + extList
	}
	return plain
}

// check adds problems and warnings about conditions under which the runtime does not run the stanza last.
func (p *planner) check() {
	first, _, skipped := p.dir.Loaded()
	for _, err := range skipped {
		p.warn("%v: containerd loads nothing at all until it is fixed or removed, CRI-O skips it", err)
	}
	if first != p.plan.File {
		problem := fmt.Errorf("the runtime loads %q and not %q: its name sorts first", first, p.plan.File)
		if p.want.ConfName == "" {
			p.plan.Problem = problem
		} else {
			p.warn("%v; the name was set by a person and is kept", problem)
		}
	}
	p.serves()
}

// serves warns about other programs' drop-in files: the network's file does not show that they run behind the stanza.
func (p *planner) serves() {
	n, err := p.dir.load(p.plan.File)
	if err != nil || n.InlinedOnly {
		return
	}
	others := p.dir.others(n.Name)
	if len(others) > 0 {
		p.warn("directory %q has plugins of its own (%s), which run behind the stanza where the runtime loads them",
			n.Name, strings.Join(others, ", "))
	}
	for _, name := range others {
		if _, err := plugin(p.dir[name].Data); err != nil {
			p.warn("file %q is not valid (%v): a runtime that loads drop-in files refuses the whole network", name, err)
		}
	}
}

// owned writes the copy first and then restores the primary configuration, so that the stanza is never missing.
func (p *planner) owned() {
	name := p.want.OwnedName
	if p.foreign(name, p.hasOwn(name), "owned configuration") {
		return
	}
	after, primary := p.released(name)
	if primary == "" {
		if _, there := p.dir[name]; there {
			p.plan.File = name
		}
		return
	}
	list, err := after.asList(primary)
	if err == nil {
		list, err = Insert(list, p.want.Stanza.Element())
	}
	if err != nil {
		p.plan.Problem = fmt.Errorf("primary configuration %q: %w", primary, err)
		return
	}
	after.dir[name] = File{Data: list}
	if first, _, _ := after.dir.Loaded(); first != name {
		p.plan.Problem = fmt.Errorf("the runtime loads %q and not %q: the name of the owned configuration must sort first", first, name)
		return
	}
	if p.place(name, primary, list, "a copy of "+primary+" with the stanza") {
		p.serves()
	}
}

// place writes a file of this program's, and removes the stanza from all other files. It reports whether it did.
func (p *planner) place(file, primary string, data []byte, why string) bool {
	p.plan.File, p.plan.Primary = file, primary
	if p.write(file, data, p.want.FileMode, why); p.plan.Problem != nil {
		return false
	}
	p.correctName(primary)
	p.release(file)
	return true
}

// foreign reports a problem if runtimes load a file of this name that another program made.
func (p *planner) foreign(name string, own bool, kind string) bool {
	if _, err := Load(name, p.dir[name].Data); own || err != nil {
		return false
	}
	p.plan.Problem = fmt.Errorf("file %q is there and was not made by this program: choose another name for the %s", name, kind)
	return true
}

// released returns a planner for the directory without stanzas, except for the file to keep, and the directory's primary
// configuration. Without one, released sets the reason.
func (p *planner) released(keep string) (after *planner, primary string) {
	after = newPlanner(p.want, p.dir)
	after.release(keep)
	primary, ok := after.primary()
	if !ok {
		p.plan.Waiting, p.plan.Problem = after.plan.Waiting, after.plan.Problem
	}
	return after, primary
}

// asList returns a configuration as a list.
func (p *planner) asList(name string) ([]byte, error) {
	text := p.dir[name].Data
	if p.isList(name) || holdsList(text) {
		return text, nil
	}
	return Convert(text)
}

// standalone writes the stanza alone.
func (p *planner) standalone() {
	name := p.want.ConfName
	if name == "" {
		name = StandaloneName
	}
	if p.foreign(name, p.onlyOwn(name), "standalone file") {
		return
	}
	data := p.want.Stanza.Single()
	if path.Ext(name) == extList {
		data, _ = Convert(data) // Plan ensures that it is a plugin with a type
	}
	p.place(name, "", data, "the stanza alone")
}

// dropIn first writes the file beside the primary configuration, then removes the stanza from the list: the plugin always
// runs, for an instant possibly twice, which does no harm.
func (p *planner) dropIn() {
	after, primary := p.released("")
	if primary == "" {
		return
	}
	n, err := after.network(primary)
	if p.want.Mode == Auto && (err != nil || !p.loads(n.Name)) {
		p.inline()
		return
	}
	if p.want.DropIns == NotLoaded {
		p.warn("the runtime of this node does not load drop-in files: the stanza goes inline")
		p.inline()
		return
	}
	p.plan.Mode = DropIn
	if err != nil {
		p.plan.Problem = fmt.Errorf("primary configuration %q: %w", primary, err)
		return
	}
	file := n.Name + "/" + DropInName
	if !p.place(file, primary, p.want.Stanza.DropIn(), "libcni adds it to network "+n.Name) {
		return
	}
	if last := len(p.plan.Steps) - 1; last >= 0 && p.plan.Steps[last].Name == file { // runtimes do not watch its directory
		p.do(Step{Op: OpReload, Why: "the runtime reads the directory again"})
	}
	if others := p.dir.others(n.Name); len(others) > 0 && others[len(others)-1] > file {
		p.warn("file %q runs behind the stanza", others[len(others)-1])
	}
}

// loads reports whether the runtime, as far as known, loads the drop-in file of a network.
func (p *planner) loads(network string) bool {
	_, there := p.dir[network+"/"+DropInName]
	return p.want.DropIns == Loaded || p.want.DropIns == Unknown && there
}

// network returns a primary configuration that drop-in files can be added to.
func (p *planner) network(name string) (Network, error) {
	n, err := p.dir.load(name)
	if p.misplaced(name) {
		n, err = loadList(p.dir[name].Data)
	}
	switch {
	case err != nil:
		return n, err
	case !n.List:
		return n, errors.New("is a single plugin, and drop-in files are added to lists only; use inline")
	case n.InlinedOnly:
		return n, errors.New(`has "loadOnlyInlinedPlugins", which forbids drop-in files; use inline`)
	case n.Name == "" || n.Name == "." || n.Name == ".." || strings.ContainsAny(n.Name, "/\x00"):
		return n, fmt.Errorf("network name %q cannot be a directory; use inline", n.Name)
	}
	return n, nil
}
