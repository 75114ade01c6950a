package sandbox

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/hostpath"
	"github.com/meshcni/istio-cni/internal/node/netns"
)

// searchMounts searches the mounted namespaces: in the runtimes' directories, and in the mount table of the node's first process.
// The inode numbers in the table show that most of its namespaces are known from the directories.
func (w *sweep) searchMounts(ctx context.Context) {
	for _, dir := range w.view.Existing(w.places.Netns...) {
		w.searchedBy(w.searchDir(ctx, dir))
	}
	table := Searched{Source: FromMount, Place: w.view.Proc + "/1/mountinfo"}
	err := hostpath.EachMount(table.Place, func(m hostpath.Mount) error {
		inode, is := mountedNetNS(m)
		if is {
			table.Entries++
		}
		if known := w.spaces[inode]; is && (known == nil || !known.offered && !known.host) {
			if err := w.offer(w.view.Candidates(m.Point), FromMount); err != nil {
				table.fail(fmt.Errorf("opening the node's mount at %q: %w", m.Point, err))
			}
		}
		return ctx.Err()
	})
	if err != nil {
		table.Err = err
	}
	w.searchedBy(table)
}

func (w *sweep) searchDir(ctx context.Context, dir string) Searched {
	place := Searched{Source: FromMount, Place: dir}
	entries, err := os.ReadDir(dir)
	place.Err = err
	for _, entry := range entries {
		if !entry.IsDir() && ctx.Err() == nil {
			place.Entries++
			w.offerAny(filepath.Join(dir, entry.Name()), FromMount, &place)
		}
	}
	return place
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
