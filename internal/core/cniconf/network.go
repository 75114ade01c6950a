package cniconf

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
)

// Network is a parsed file of the configuration directory, as container runtimes parse it.
type Network struct {
	// Name and Version belong to the list or to the single plugin.
	Name, Version string
	// List is set if the file holds a list of plugins.
	List bool
	// InlinedOnly is set if the list forbids drop-in files.
	InlinedOnly bool
	// Types are the plugins' types in the order of execution.
	Types []string
}

// File extensions that containerd and CRI-O read: ".conflist" is a list, the others are single plugins.
const (
	extList       = ".conflist"
	extSingle     = ".conf"
	extSingleJSON = ".json"
)

// Candidate reports whether runtimes read a file with this name.
func Candidate(name string) bool {
	return slices.Contains([]string{extList, extSingle, extSingleJSON}, path.Ext(name))
}

// common has the keys with a type in libcni; a wrong type makes libcni refuse the whole file.
type common struct {
	CNIVersion   string          `json:"cniVersion"`
	Name         string          `json:"name"`
	Type         string          `json:"type"`
	Capabilities map[string]bool `json:"capabilities"`
	IPAM         struct {
		Type string `json:"type"`
	} `json:"ipam"`
	DNS struct {
		Nameservers []string `json:"nameservers"`
		Domain      string   `json:"domain"`
		Search      []string `json:"search"`
		Options     []string `json:"options"`
	} `json:"dns"`
	PrevResult map[string]any `json:"prevResult"`
}

// Load reads a file as libcni does: a list if the name ends in .conflist, otherwise a single plugin. An error says why a
// runtime would skip the file.
func Load(name string, text []byte) (Network, error) {
	if path.Ext(name) == extList {
		return loadList(text)
	}
	return loadSingle(text)
}

func loadSingle(text []byte) (Network, error) {
	c, err := plugin(text)
	if err != nil {
		return Network{}, err
	}
	return Network{Name: c.Name, Version: c.CNIVersion, Types: []string{c.Type}}, nil
}

// plugin reads the object of one plugin.
func plugin(text []byte) (common, error) {
	var c common
	if err := json.Unmarshal(text, &c); err != nil {
		return c, unreadable(text, err)
	}
	if c.Type == "" {
		return c, errors.New(`no "type"`)
	}
	return c, nil
}

// unreadable explains why json.Unmarshal rejects a text.
func unreadable(text []byte, err error) error {
	if len(bytes.TrimSpace(text)) == 0 {
		return errors.New("empty")
	}
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok && wrong.Field != "" {
		return fmt.Errorf("key %q holds a %s, which is of the wrong type", wrong.Field, wrong.Value)
	}
	return fmt.Errorf("no valid JSON object: %w", err)
}

func loadList(text []byte) (Network, error) {
	// libcni decodes a whole list into Go values, so a number that does not fit makes the list unreadable.
	var keys map[string]any
	if err := json.Unmarshal(text, &keys); err != nil {
		return Network{}, unreadable(text, err)
	}
	n := Network{List: true}
	var ok bool
	if n.Name, ok = keys["name"].(string); !ok {
		return n, errors.New(`no "name", or it is not a string`)
	}
	if version, there := keys["cniVersion"]; there {
		if n.Version, ok = version.(string); !ok {
			return n, errors.New(`"cniVersion" is not a string`)
		}
	}
	if value, there := keys["cniVersions"]; there {
		versions, ok := value.([]any)
		if !ok || slices.ContainsFunc(versions, func(v any) bool { _, ok := v.(string); return !ok }) {
			return n, errors.New(`"cniVersions" is not a list of strings`)
		}
	}
	var err error
	if n.InlinedOnly, err = truth(keys, "loadOnlyInlinedPlugins"); err != nil {
		return n, err
	}
	for _, key := range []string{"disableCheck", "disableGC"} {
		if _, err = truth(keys, key); err != nil {
			return n, err
		}
	}
	n.Types, err = types(keys, n.InlinedOnly)
	return n, err
}

// types reads the plugins of a list.
func types(keys map[string]any, inlinedOnly bool) ([]string, error) {
	value, there := keys["plugins"]
	if !there && !inlinedOnly {
		return nil, nil
	}
	elements, ok := value.([]any)
	switch {
	case !ok:
		return nil, errors.New(`"plugins" is missing or no list`)
	case len(elements) == 0:
		return nil, errors.New(`"plugins" is empty`)
	}
	var out []string
	for i, element := range elements {
		c, err := plugin(encoded(element, ""))
		if err != nil {
			return nil, fmt.Errorf("plugin %d of the list: %w", i+1, err)
		}
		out = append(out, c.Type)
	}
	return out, nil
}

// truth reads a boolean, which may be a string.
func truth(keys map[string]any, key string) (bool, error) {
	value, there := keys[key]
	switch strings.ToLower(fmt.Sprint(value)) {
	case "true":
		return true, nil
	case "false":
		return false, nil
	}
	if there {
		return false, fmt.Errorf("%q is neither true nor false", key)
	}
	return false, nil
}

// Usable returns the error of a runtime that loads a configuration with the stanza.
func Usable(stanza []byte) error {
	if _, err := loadSingle(stanza); err != nil {
		return err
	}
	_, err := loadList(fmt.Appendf(nil, `{"name":"n","plugins":[%s]}`, stanza))
	return err
}

// File is a file of a configuration directory.
type File struct {
	Data []byte
	// Mode are the permission bits.
	Mode uint32
	// Link is set if the name is a symbolic link.
	Link bool
	// Unseen says why the file cannot be read here although the runtime may read it; "" if readable.
	Unseen string
}

// Dir is the relevant content of a configuration directory, by relative name: candidates, files that this program made,
// and drop-in files, "<network name>/*.conf". It is immutable; Apply returns a new Dir.
type Dir map[string]File

// Names returns the names of the candidates in the order in which runtimes read them.
func (d Dir) Names() []string {
	return d.names(func(name string) bool { return Candidate(name) && !strings.Contains(name, "/") })
}

// DropIns returns the names of a network's drop-in files in the order of execution.
func (d Dir) DropIns(network string) []string {
	return d.names(func(name string) bool {
		return strings.HasPrefix(name, network+"/") && path.Dir(name) == network && path.Ext(name) == extSingle
	})
}

// names returns the matching file names, sorted.
func (d Dir) names(want func(name string) bool) []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(d)), func(name string) bool { return !want(name) })
}

// Loaded returns the file that a runtime loads: the first valid file. skipped has the error of each file before it. The name
// is empty if no file is valid.
func (d Dir) Loaded() (name string, n Network, skipped []error) {
	for _, name = range d.Names() {
		n, err := d.load(name)
		if err == nil {
			return name, n, skipped
		}
		skipped = append(skipped, fmt.Errorf("file %q: %w", name, err))
	}
	return "", Network{}, skipped
}

// load reads a file as a runtime does, drop-ins included.
func (d Dir) load(name string) (Network, error) {
	n, err := Load(name, d[name].Data)
	if err == nil && n.List && len(n.Types) == 0 && len(d.others(n.Name)) == 0 {
		return n, errors.New(`no "plugins"`)
	}
	return n, err
}

// others returns the network's drop-in files from other programs.
func (d Dir) others(network string) []string {
	return slices.DeleteFunc(d.DropIns(network), func(name string) bool { return isOwn(d[name].Data) })
}

// Apply returns the directory after a step.
func (d Dir) Apply(s Step) Dir {
	out := Dir{}
	maps.Copy(out, d)
	switch s.Op {
	case OpWrite:
		out[s.Name] = File{Data: s.Data, Mode: s.Mode, Link: d[s.Name].Link}
	case OpRename:
		out[s.To] = d[s.Name]
		delete(out, s.Name)
	case OpRemove:
		delete(out, s.Name)
	case OpRemoveDir, OpReload:
	}
	return out
}
