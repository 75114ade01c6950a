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

// primary finds the configuration for the stanza. Without one, the plan waits.
func (p *planner) primary() (string, bool) {
	if name := p.want.ConfName; name != "" && p.want.Mode != Standalone {
		return p.named(name)
	}
	for _, name := range p.dir.Names() {
		if unseen := p.dir[name].Unseen; unseen != "" {
			p.plan.Problem = fmt.Errorf("the runtime may load file %q, which cannot be read from here: %s", name, unseen)
			return "", false
		}
		if (p.loadable(name) || p.repair(name)) && !p.ownFile(name) {
			return name, true
		}
	}
	p.plan.Waiting = "waiting for a valid CNI configuration"
	_, _, skipped := p.dir.Loaded()
	for _, err := range skipped {
		p.plan.Waiting += fmt.Sprintf("; %v", err)
	}
	return "", false
}

// named finds the file that the settings name, otherwise its twin: a single plugin may have become a list.
func (p *planner) named(name string) (string, bool) {
	stem, names := strings.TrimSuffix(name, path.Ext(name)), []string{name}
	switch path.Ext(name) {
	case extSingle, extSingleJSON:
		names = append(names, name+extList, stem+extList)
	case extList:
		names = append(names, stem+extSingle)
	}
	at := slices.IndexFunc(names, func(name string) bool { _, there := p.dir[name]; return there })
	if at < 0 {
		p.plan.Waiting = fmt.Sprintf("waiting for file %q", name)
		return "", false
	}
	name = names[at]
	if err := p.readable(name); err != nil && !p.repair(name) {
		p.plan.Waiting = fmt.Sprintf("waiting for file %q to be valid: %v", name, err)
		return "", false
	}
	return name, true
}

func (p *planner) loadable(name string) bool {
	_, err := p.dir.load(name)
	return err == nil
}

// repair removes our damaged stanza from a list in the planner's view if the list is valid without it: no other program
// would remove it. repair reports whether it removed the stanza.
func (p *planner) repair(name string) bool {
	f := p.dir[name]
	if !p.isList(name) || !p.hasOwn(name) {
		return false
	}
	without, err := Remove(f.Data)
	if err != nil {
		return false
	}
	if _, err = loadList(without); err != nil {
		return false
	}
	f.Data = without
	p.dir[name] = f
	p.repaired[name] = true
	return true
}

// readable returns the reason why a named file, with any extension, cannot be used.
func (p *planner) readable(name string) error {
	text := p.dir[name].Data
	if !p.isList(name) {
		_, err := loadSingle(text)
		return err
	}
	n, err := loadList(text)
	if err == nil && len(n.Types) == 0 {
		err = errors.New(`no "plugins"`)
	}
	return err
}

// isList reports whether a file is a list: by its extension, otherwise by its content.
func (p *planner) isList(name string) bool {
	switch path.Ext(Original(name)) {
	case extList:
		return true
	case extSingle, extSingleJSON:
		return p.misplaced(name)
	}
	_, err := inlined(p.dir[name].Data)
	return err == nil
}

// misplaced reports whether the user named a list with the extension of a single plugin. Runtimes refuse such a file, so
// the plan renames it.
func (p *planner) misplaced(name string) bool {
	ext := path.Ext(name)
	return name == p.want.ConfName && (ext == extSingle || ext == extSingleJSON) && holdsList(p.dir[name].Data)
}

// holdsList reports whether a text is a list of plugins.
func holdsList(text []byte) bool {
	n, err := loadList(text)
	_, single := loadSingle(text)
	return err == nil && single != nil && len(n.Types) > 0
}

// ownFile reports whether this program made a file. Such a file cannot be the primary configuration.
func (p *planner) ownFile(name string) bool {
	return p.onlyOwn(name) || p.isOwnedCopy(name) || p.want.Mode == Owned && name == p.want.OwnedName
}

// onlyOwn reports whether a file holds only this program's stanza.
func (p *planner) onlyOwn(name string) bool {
	text := p.dir[name].Data
	if !p.isList(name) {
		return isOwn(text)
	}
	list, err := inlined(text)
	return err == nil && len(list.elements) > 0 && len(list.own(text)) == len(list.elements)
}

// isOwnedCopy reports whether a file is owned mode's copy of a primary configuration. The only configuration of a
// directory is not a copy: the runtime needs it.
func (p *planner) isOwnedCopy(name string) bool {
	if !p.hasOwn(name) || !p.isList(name) {
		return false
	}
	known := name == p.want.OwnedName || name == OwnedName
	return slices.ContainsFunc(p.dir.Names(), func(other string) bool {
		return other > name && !p.onlyOwn(other) && p.loadable(other) && (known || p.copies(name, other))
	})
}

// copies reports whether a list differs from another file only by the stanza. An equal network name alone does not
// justify removing a file.
func (p *planner) copies(name, other string) bool {
	theirs, err := p.asList(other)
	if err == nil {
		theirs, err = Remove(theirs)
	}
	own, errOwn := Remove(p.dir[name].Data)
	return err == nil && errOwn == nil && Same(own, theirs)
}

// interrupted renames a list in a single plugin's file, left by an interrupted earlier installer. No runtime reads that
// file, and its stanza shows that this program wrote it.
func (p *planner) interrupted() {
	for _, name := range p.dir.Names() {
		ext := path.Ext(name)
		list := strings.TrimSuffix(name, ext) + extList
		_, taken := p.dir[list]
		if ext != extList && !taken && holdsList(p.dir[name].Data) && p.hasOwn(name) {
			p.do(Step{Op: OpRename, Name: name, To: list, Why: "it holds a list: finishes another installer's conversion"})
		}
	}
}

// hasOwn reports whether a file holds a stanza of this program.
func (p *planner) hasOwn(name string) bool {
	text := p.dir[name].Data
	list, err := inlined(text)
	return err == nil && len(list.own(text)) > 0 || isOwn(text)
}

// release removes every stanza of this program from the directory, except from the file to keep.
func (p *planner) release(keep string) {
	p.releaseDropIns(keep)
	for _, name := range slices.Sorted(maps.Keys(p.dir)) {
		if _, still := p.dir[name]; still && name != keep && !Saved(name) && p.hasOwn(name) {
			p.releaseFile(name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(p.dir)) {
		if Saved(name) && !slices.Contains(targets(Original(name)), keep) {
			p.do(Step{Op: OpRemove, Name: name, Why: "the converted file is gone"})
		}
	}
}

// releaseDropIns removes all drop-in files with this program's stanza, whatever their names.
func (p *planner) releaseDropIns(keep string) {
	removed := false
	for _, name := range slices.Sorted(maps.Keys(p.dir)) {
		network, base := path.Dir(name), path.Base(name)
		if network == "." || name == keep || !isOwn(p.dir[name].Data) && base != DropInName {
			continue
		}
		removed = true
		p.do(Step{Op: OpRemove, Name: name, Why: "the stanza goes"})
		if len(p.dir.DropIns(network)) == 0 {
			p.do(Step{Op: OpRemoveDir, Name: network, Why: "it is empty"})
		}
	}
	if removed {
		p.do(Step{Op: OpReload, Why: "the runtime reads the directory again"})
	}
}

// Becomes returns the names that a file of this name may get, or leave beside itself.
func Becomes(name string) []string {
	return append(targets(name), name+savedSuffix)
}

// targets returns the possible names of a converted file.
func targets(single string) []string {
	out := []string{single + extList, single}
	if ext := path.Ext(single); ext == extSingle || ext == extSingleJSON {
		out = append(out, strings.TrimSuffix(single, ext)+extList)
	}
	return out
}

// releaseFile removes the stanza from one file.
func (p *planner) releaseFile(name string) {
	if p.onlyOwn(name) || p.isOwnedCopy(name) {
		p.do(Step{Op: OpRemove, Name: name, Why: "it is of this program's making"})
		return
	}
	f := p.dir[name]
	without, err := Remove(f.Data)
	if err != nil || p.restore(name, without) {
		return
	}
	for _, single := range p.dir.Names() {
		if p.converts(single, name) {
			p.do(Step{Op: OpRemove, Name: name, Why: "its original is there"})
			return
		}
	}
	p.write(name, without, f.Mode, "the stanza goes")
}

// converts reports whether this program made the list from the single plugin's file: the list is its conversion plus a stanza.
func (p *planner) converts(single, list string) bool {
	f, there := p.dir[single]
	_, is := p.dir[list]
	if !there || !is || single == list || !slices.Contains(targets(single), list) || !p.hasOwn(list) {
		return false
	}
	converted, err := Convert(f.Data)
	without, errList := Remove(p.dir[list].Data)
	return err == nil && errList == nil && bytes.Equal(converted, without)
}

// restore replaces a converted file by its original, unless another program changed it since. It reports whether the
// original is in place.
func (p *planner) restore(name string, without []byte) bool {
	for _, saved := range slices.Sorted(maps.Keys(p.dir)) { // two originals may fit: the order makes the choice deterministic
		single := Original(saved)
		if !Saved(saved) || !slices.Contains(targets(single), name) {
			continue
		}
		_, there := p.dir[single]
		converted, err := p.asList(saved)
		if there = there && single != name; !there && (err != nil || !bytes.Equal(converted, without)) {
			continue
		}
		if !there {
			p.do(Step{Op: OpRename, Name: saved, To: single, Why: "the original comes back"})
		}
		if single != name {
			p.do(Step{Op: OpRemove, Name: name, Why: "its original is there again"})
		}
		return true
	}
	return false
}
