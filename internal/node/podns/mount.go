package podns

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/hostpath"
	"github.com/meshcni/istio-cni/internal/node/netns"
)

// mounts goes through the mounted namespaces: those in the runtimes' directories, and whatever else the node's first process
// sees mounted.
func (s *search) mounts(ctx context.Context) error {
	for _, dir := range s.netnsDirs() {
		look := Look{Source: FromMount, Place: dir}
		err := s.mountDir(ctx, dir, &look)
		s.looked = append(s.looked, look)
		if err != nil {
			return err
		}
	}
	look := Look{Source: FromMount, Place: s.view.Proc + "/1/mountinfo"}
	if err := s.mountTable(ctx, &look); err != nil {
		look.Err = err
	}
	s.looked = append(s.looked, look)
	return ctx.Err()
}

// netnsDirs are the directories of the runtimes as they are seen here, each one once.
func (s *search) netnsDirs() []string {
	var dirs []string
	for _, dir := range s.places.Netns {
		seen := s.view.Existing(dir)
		if len(seen) == 0 {
			seen = []string{dir} // so that the error names it
		}
		for _, one := range seen {
			if !slices.Contains(dirs, one) {
				dirs = append(dirs, one)
			}
		}
	}
	return dirs
}

func (s *search) mountDir(ctx context.Context, dir string, look *Look) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		look.Err = err
		return nil //nolint:nilerr // other places may be there
	}
	for _, entry := range entries {
		if err := ctx.Err(); err != nil {
			return err
		}
		if entry.IsDir() {
			continue
		}
		look.Entries++
		s.candidate(filepath.Join(dir, entry.Name()), FromMount, look)
	}
	return nil
}

// candidate looks at a place that may or may not be a namespace. That it is none, or that it is gone, is no failure.
func (s *search) candidate(path string, from Source, look *Look) {
	_, err := s.consider(path, from)
	switch {
	case err == nil, errors.Is(err, netns.ErrNotNetwork), errors.Is(err, fs.ErrNotExist),
		errors.Is(err, unix.ESRCH):
		return
	}
	look.fail(err)
}

// mountTable goes through the network namespaces that are mounted anywhere (proc_pid_mountinfo(5)). Most have been seen
// in the directories, which the table itself tells.
func (s *search) mountTable(ctx context.Context, look *Look) error {
	return hostpath.EachMount(look.Place, func(m hostpath.Mount) error {
		inode, is := mountedNetNS(m)
		if is {
			look.Entries++
		}
		if _, known := s.seen[inode]; is && !known {
			if _, err := s.firstOf(s.view.Candidates(m.Point), FromMount); err != nil {
				look.fail(fmt.Errorf("reaching what the node has mounted at %q: %w", m.Point, err))
			}
		}
		return ctx.Err()
	})
}

// mountedNetNS is the network namespace that is mounted, if it is one.
func mountedNetNS(m hostpath.Mount) (netns.Inode, bool) {
	var ino uint64
	var major, minor uint32
	if _, err := fmt.Sscanf(m.Root, "net:[%d]", &ino); err != nil || m.Type != "nsfs" {
		return netns.Inode{}, false
	}
	if _, err := fmt.Sscanf(m.Device, "%d:%d", &major, &minor); err != nil {
		return netns.Inode{}, false
	}
	return netns.Inode{Dev: unix.Mkdev(major, minor), Ino: ino}, true
}
