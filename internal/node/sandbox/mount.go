package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/hostpath"
	"github.com/meshcni/istio-cni/internal/node/netns"
)

// searchMounts searches the mounted namespaces: in the runtimes' directories, and in the mount table of the node's first process.
// The inode numbers in the table show that most of its namespaces are known from the directories.
func (s *search) searchMounts(ctx context.Context) error {
	for _, dir := range s.view.Existing(s.places.Netns...) {
		s.searched = append(s.searched, s.searchDir(ctx, dir))
	}
	table := Searched{Source: FromMount, Place: s.view.Proc + "/1/mountinfo"}
	err := hostpath.EachMount(table.Place, func(m hostpath.Mount) error {
		inode, is := mountedNetNS(m)
		if is {
			table.Entries++
		}
		if _, known := s.verdicts[inode]; is && !known {
			if _, err := s.checkFirst(s.view.Candidates(m.Point), FromMount); err != nil {
				table.fail(fmt.Errorf("opening the node's mount at %q: %w", m.Point, err))
			}
		}
		return ctx.Err()
	})
	if err != nil {
		table.Err = err
	}
	s.searched = append(s.searched, table)
	return ctx.Err()
}

func (s *search) searchDir(ctx context.Context, dir string) Searched {
	place := Searched{Source: FromMount, Place: dir}
	entries, err := os.ReadDir(dir)
	place.Err = err
	for _, entry := range entries {
		if !entry.IsDir() && ctx.Err() == nil {
			place.Entries++
			s.checkAny(filepath.Join(dir, entry.Name()), FromMount, &place)
		}
	}
	return place
}

// checkAny checks a path that may lead to a namespace. A missing file or another kind of file is not a failure.
func (s *search) checkAny(path string, from Source, place *Searched) {
	_, err := s.check(path, from)
	if err != nil && !errors.Is(err, netns.ErrNotNetwork) && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ESRCH) {
		place.fail(err)
	}
}

// mountedNetNS returns the mounted network namespace. It reports whether the mount is one.
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
