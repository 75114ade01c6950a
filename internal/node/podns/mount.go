package podns

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/netns"
)

// mounts goes through the mounted namespaces: those in the runtimes' directories, and whatever else the node's first process
// sees mounted.
func (s *search) mounts(ctx context.Context) error {
	for _, dir := range s.places.Mounts {
		look := Look{Source: FromMount, Place: dir}
		err := s.mountDir(ctx, dir, &look)
		s.looked = append(s.looked, look)
		if err != nil {
			return err
		}
	}
	look := Look{Source: FromMount, Place: s.places.Proc + "/1/mountinfo"}
	err := s.mountTable(ctx, &look)
	s.looked = append(s.looked, look)
	return err
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
	file, err := os.Open(look.Place)
	if err != nil {
		look.Err = err
		return nil
	}
	defer file.Close() //nolint:errcheck // only read
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20) // the options of an overlay are long
	for lines.Scan() {
		if err := ctx.Err(); err != nil {
			return err
		}
		point, inode, is := mountedNetNS(lines.Text())
		if !is {
			continue
		}
		look.Entries++
		if _, known := s.seen[inode]; known {
			continue
		}
		if _, err := s.firstOf(s.places.seen(point), FromMount); err != nil {
			look.fail(fmt.Errorf("reaching what the node has mounted at %q: %w", point, err))
		}
	}
	if err := lines.Err(); err != nil {
		look.Err = fmt.Errorf("reading %q: %w", look.Place, err)
	}
	return nil
}

// mountedNetNS reads a line of the table: "ID PARENT MAJOR:MINOR ROOT POINT OPTIONS ... - TYPE ...".
func mountedNetNS(line string) (point string, inode netns.Inode, is bool) {
	fields := strings.Fields(line)
	const device, root, at = 2, 3, 4
	if len(fields) <= at {
		return "", netns.Inode{}, false
	}
	number, found := strings.CutPrefix(fields[root], "net:[")
	if !found || !strings.Contains(line, " - nsfs ") {
		return "", netns.Inode{}, false
	}
	ino, err := strconv.ParseUint(strings.TrimSuffix(number, "]"), 10, 64)
	if err != nil {
		return "", netns.Inode{}, false
	}
	var major, minor uint32
	if _, err := fmt.Sscanf(fields[device], "%d:%d", &major, &minor); err != nil {
		return "", netns.Inode{}, false
	}
	point = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(fields[at])
	return point, netns.Inode{Dev: unix.Mkdev(major, minor), Ino: ino}, true
}
