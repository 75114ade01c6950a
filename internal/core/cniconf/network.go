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

// Network is a file of the configuration directory as a container runtime parses it.
type Network struct {
	// Name and Version are the list's, or the single plugin's.
	Name, Version string
	// List says that the file holds a list of plugins and not a single plugin.
	List bool
	// InlinedOnly says that the list forbids plugins from files beside it.
	InlinedOnly bool
	// Types are the plugins' types in the order in which they run.
	Types []string
}

// Extensions of files that runtimes read (containerd and CRI-O alike): ".conflist" holds a list, the others a single
// plugin.
const (
	extList       = ".conflist"
	extSingle     = ".conf"
	extSingleJSON = ".json"
)

// Candidate reports whether runtimes read a file of this name.
func Candidate(name string) bool {
	switch path.Ext(name) {
	case extList, extSingle, extSingleJSON:
		return true
	}
	return false
}

// common are the keys of which libcni knows the type; a wrong one makes it refuse the whole file.
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

// Load reads a file as libcni does for its name: a list if it ends in .conflist, else a single plugin. An error says why
// a runtime would skip the file.
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

// plugin reads one plugin's object.
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
	keys := map[string]json.RawMessage{}
	// libcni reads all of a list into Go's values, so that a number too big for them makes it unreadable.
	if err := errors.Join(json.Unmarshal(text, &keys), json.Unmarshal(text, &map[string]any{})); err != nil {
		return Network{}, unreadable(text, err)
	}
	n := Network{List: true}
	if name, there := keys["name"]; !there || !isString(name) {
		return n, errors.New(`no "name", or it is no string`)
	}
	_ = json.Unmarshal(keys["name"], &n.Name)
	if version, there := keys["cniVersion"]; there {
		if !isString(version) {
			return n, errors.New(`"cniVersion" is no string`)
		}
		_ = json.Unmarshal(version, &n.Version)
	}
	var versions []*string
	if text, there := keys["cniVersions"]; there && (json.Unmarshal(text, &versions) != nil || slices.Contains(versions, nil)) {
		return n, errors.New(`"cniVersions" is no list of strings`)
	}
	var err error
	if n.InlinedOnly, err = switched(keys, "loadOnlyInlinedPlugins"); err != nil {
		return n, err
	}
	for _, key := range []string{"disableCheck", "disableGC"} {
		if _, err = switched(keys, key); err != nil {
			return n, err
		}
	}
	n.Types, err = types(keys, n.InlinedOnly)
	return n, err
}

// types reads the plugins of a list.
func types(keys map[string]json.RawMessage, inlinedOnly bool) ([]string, error) {
	text, there := keys["plugins"]
	if !there && !inlinedOnly {
		return nil, nil
	}
	var elements []json.RawMessage
	if json.Unmarshal(text, &elements) != nil || elements == nil {
		return nil, errors.New(`"plugins" is missing or no list`)
	}
	if len(elements) == 0 {
		return nil, errors.New(`"plugins" is empty`)
	}
	var out []string
	for i, element := range elements {
		c, err := plugin(element)
		if err != nil {
			return nil, fmt.Errorf("plugin %d of the list: %w", i+1, err)
		}
		out = append(out, c.Type)
	}
	return out, nil
}

func isString(text json.RawMessage) bool {
	return len(text) > 0 && text[0] == '"'
}

// switched reads a truth value, which may be written as a string.
func switched(keys map[string]json.RawMessage, key string) (bool, error) {
	text, there := keys[key]
	if !there {
		return false, nil
	}
	var on bool
	if json.Unmarshal(text, &on) == nil && string(text) != "null" {
		return on, nil
	}
	var word string
	if isString(text) && json.Unmarshal(text, &word) == nil {
		switch string(bytes.ToLower([]byte(word))) {
		case "true":
			return true, nil
		case "false":
			return false, nil
		}
	}
	return false, fmt.Errorf("%q is neither true nor false", key)
}

// Usable returns the error with which a runtime would refuse a configuration that contains the stanza.
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
	// Link says that the name is a symbolic link to the file.
	Link bool
	// Unseen says why the runtime may read the file although it cannot be read here, "" if that is not so.
	Unseen string
}

// Dir is the content of a configuration directory, as far as it matters here, by name relative to it: candidates, files
// that this program made, and drop-in files, which are "<network name>/*.conf". It is a value; Apply makes another.
type Dir map[string]File

// Names returns the names of the candidates in the order in which runtimes try them.
func (d Dir) Names() []string {
	return d.names(func(name string) bool { return Candidate(name) && !strings.Contains(name, "/") })
}

// DropIns are the names of a network's drop-in files in the order in which plugins run.
func (d Dir) DropIns(network string) []string {
	return d.names(func(name string) bool {
		return strings.HasPrefix(name, network+"/") && path.Dir(name) == network && path.Ext(name) == extSingle
	})
}

// names are those of files, sorted.
func (d Dir) names(want func(name string) bool) []string {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(d)), func(name string) bool { return !want(name) })
}

// Loaded returns the file that a runtime loads: the first valid one. skipped has the error of each file before it. The name
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

// others are a network's drop-in files of other programs.
func (d Dir) others(network string) []string {
	return slices.DeleteFunc(d.DropIns(network), func(name string) bool { return isOwn(d[name].Data) })
}

// Apply returns the directory after a step.
func (d Dir) Apply(s Step) Dir {
	out := maps.Clone(d)
	if out == nil {
		out = Dir{}
	}
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
