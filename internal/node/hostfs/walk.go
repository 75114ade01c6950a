package hostfs

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/fsnotify/fsnotify"
)

// maxLinks is how many symbolic links a path may take, as in the kernel.
const maxLinks = 40

// An identity tells directories apart that have the same path one after the other, and a directory from itself after its
// removal, which the kernel keeps to itself for as long as a mount holds it: see [Gone].
type identity struct {
	dev, ino uint64
	gone     bool
}

// A place is a directory on the way of a path, or at its end.
type place struct {
	id    identity
	names map[string]bool // the entries that paths take
	whole []Path          // the paths that end here, for the entries that they want
}

// A sight is what a set of paths leads through.
type sight struct {
	// The directories to watch, by path without links. One that can be reached in two ways, by a bind mount, is here
	// by the first: the kernel would not watch it twice.
	places map[string]*place
	ids    map[identity]*place
}

// walk follows the paths as far as they exist.
func walk(paths []Path) (*sight, error) {
	s := &sight{places: make(map[string]*place), ids: make(map[identity]*place)}
	var errs []error
	for _, p := range paths {
		if err := s.follow(p); err != nil {
			errs = append(errs, wrapPath("following", p.Name, err))
		}
	}
	return s, errors.Join(errs...)
}

// follow walks one path. It ends, without an error, at the directory in which the next name is missing or is a file.
func (s *sight) follow(path Path) error {
	t := traveller{sight: s, rest: elements(path.Name)}
	on, err := t.enter("/")
	for on && len(t.rest) > 0 {
		on, err = t.step()
	}
	if err != nil || !on {
		return unlessMissing(err)
	}
	t.at.whole = append(t.at.whole, path)
	return nil
}

// A traveller is on the way of a path.
type traveller struct {
	sight *sight
	dir   string // where it is, a path without links
	at    *place
	rest  []string // what is still to go
	links int      // how many it has taken
}

// step takes one element of the path, and reports whether the way goes on.
func (t *traveller) step() (on bool, err error) {
	name := t.rest[0]
	t.rest = t.rest[1:]
	if name == ".." {
		return t.enter(filepath.Dir(t.dir))
	}
	t.at.names[name] = true
	next := filepath.Join(t.dir, name)
	kind, id, err := examine(next)
	switch {
	case err != nil:
		return false, err
	case kind == fs.ModeDir:
		t.arrive(next, id)
		return true, nil
	case kind == fs.ModeSymlink:
		return t.turn(next)
	}
	return false, nil // if it is not where the path ends it stands in the way, and is watched until it does not
}

// turn takes a symbolic link.
func (t *traveller) turn(link string) (on bool, err error) {
	if t.links++; t.links > maxLinks {
		return false, syscall.ELOOP
	}
	target, err := os.Readlink(link)
	if err != nil {
		return false, cause(err)
	}
	t.rest = append(elements(target), t.rest...)
	if filepath.IsAbs(target) {
		return t.enter("/")
	}
	return true, nil
}

// enter goes to a directory that no name leads to.
func (t *traveller) enter(dir string) (on bool, err error) {
	_, id, err := examine(dir)
	if err != nil {
		return false, err
	}
	t.arrive(dir, id)
	return true, nil
}

// arrive makes a directory part of the sight.
func (t *traveller) arrive(dir string, id identity) {
	t.dir, t.at = dir, t.sight.ids[id]
	if t.at == nil {
		t.at = &place{id: id, names: make(map[string]bool)}
		t.sight.ids[id] = t.at
		t.sight.places[dir] = t.at
	}
}

// elements are the names in a path, without those that lead nowhere.
func elements(path string) []string {
	return slices.DeleteFunc(strings.Split(path, "/"), func(name string) bool { return name == "" || name == "." })
}

func examine(path string) (kind fs.FileMode, id identity, err error) {
	info, err := os.Lstat(path)
	if err != nil {
		return 0, identity{}, cause(err)
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, identity{}, errors.ErrUnsupported
	}
	return info.Mode().Type(), identity{
		dev: uint64(stat.Dev), ino: stat.Ino, gone: stat.Nlink == 0, //nolint:unconvert // the size differs between machines
	}, nil
}

// unlessMissing keeps an error unless it says that what was there a moment ago is not, or is something else: whatever
// happened is an event of a name that is watched.
func unlessMissing(err error) error {
	for _, gone := range []error{fs.ErrNotExist, syscall.ENOTDIR, syscall.EINVAL} {
		if errors.Is(err, gone) {
			return nil
		}
	}
	return err
}

// watches reports whether the directory is one of the places.
func (s *sight) watches(dir string) bool { return s.places[dir] != nil }

// counts reports whether the event concerns any of the paths.
func (s *sight) counts(path string, event fsnotify.Event) bool {
	if p := s.places[path]; p != nil && (ended(event) || event.Has(fsnotify.Chmod) && len(p.whole) > 0) {
		return true
	}
	p := s.places[filepath.Dir(path)]
	if p == nil {
		return false
	}
	base := filepath.Base(path)
	return p.names[base] || slices.ContainsFunc(p.whole, func(w Path) bool { return w.Only == nil || w.Only(base) })
}

// ended reports whether the path that the event is about is no more.
func ended(event fsnotify.Event) bool {
	return event.Has(fsnotify.Remove) || event.Has(fsnotify.Rename)
}

// equal reports whether two sights lead through the same directories by the same names.
func (s *sight) equal(other *sight) bool {
	return maps.EqualFunc(s.places, other.places, func(a, b *place) bool {
		return a.id == b.id && maps.Equal(a.names, b.names) && len(a.whole) == len(b.whole)
	})
}
