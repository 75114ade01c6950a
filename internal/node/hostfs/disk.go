package hostfs

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/meshcni/istio-cni/internal/node/hostpath"
)

// Marks between the name of a file and the digits that end the name of its temporary file. The names of temporary files have no
// extension that a container runtime reads.
const (
	// tempMark is the mark of Istio's agent, of older versions of this program, and of other programs.
	tempMark = ".tmp."
	// ownMark precedes tempMark only in names of this program, so that Sweep recognises leftovers by name.
	ownMark = ".istio-cni"
)

// Disk changes files of the node. The zero value is ready for use.
//
// An error means that nothing changed, with one exception: if the fsync of the directory fails after the rename, the
// complete new content is in place, but a loss of power can bring the old content back.
type Disk struct {
	Before func(Call) error // runs before each call and can refuse it; for tests
}

// WriteFile writes a file with exactly this mode, whatever the umask. A replaced file keeps its owner. WriteFile follows a
// symbolic link and replaces its target. A target that is not a regular file is an error.
func (d Disk) WriteFile(path string, data []byte, mode fs.FileMode) error {
	return d.put(path, data, mode, d.renameOnto)
}

func (d Disk) put(path string, data []byte, mode fs.FileMode, place func(temp, path string) error) error {
	target, old, err := d.resolve(path)
	if err == nil {
		err = d.replace(target, func(temp *os.File) error {
			failed := d.write(temp, data)
			if failed == nil {
				failed = d.chownLike(temp, old)
			}
			if failed == nil {
				failed = d.chmod(temp, mode) // after chown, which may clear bits
			}
			return failed
		}, place)
	}
	return wrapPath("writing", path, err)
}

// Append appends to an existing regular file. It follows no symbolic link. A crash can leave a part of the data.
func (Disk) Append(path string, data []byte) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0) //nolint:gosec // the caller's own file
	if err == nil {
		_, err = file.Write(data)
		err = errors.Join(err, file.Close())
	}
	return wrapPath("appending to", path, err)
}

// resolve returns the path to replace and the existing file, or nil.
func (d Disk) resolve(path string) (string, fs.FileInfo, error) {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return path, nil, nil
	case err != nil:
		return "", nil, wrap("examining", err)
	case info.IsDir():
		return "", nil, syscall.EISDIR
	case info.Mode().Type() != fs.ModeSymlink:
		return path, info, nil
	}
	link, err := os.Readlink(path)
	if err != nil {
		return "", nil, wrap("reading link", err)
	}
	target, err := hostpath.Follow(path)
	if err == nil {
		info, err = os.Lstat(target)
	}
	// Another kind of file can be intended, such as /dev/null to hide a file.
	if err == nil && !info.Mode().IsRegular() {
		err = ErrNotRegular
	}
	if err != nil {
		return "", nil, linkError{fmt.Errorf("following symbolic link %q to %q: %w", path, link, cause(err))}
	}
	return target, info, nil
}

// replace fills a temporary file with fill and renames it with place.
func (d Disk) replace(path string, fill func(temp *os.File) error, place func(temp, path string) error) error {
	temp, err := d.create(path)
	if err != nil {
		return err
	}
	if err = d.complete(temp, fill); err == nil {
		err = place(temp.Name(), path)
	}
	return d.finish(temp.Name(), path, err)
}

// finish makes the new name of a temporary file durable, or removes the temporary file after an error.
func (d Disk) finish(temp, path string, err error) error {
	if err != nil {
		_ = d.remove(temp) // the next sweep tries again
		return err
	}
	return d.SyncDir(filepath.Dir(path))
}

func (d Disk) renameOnto(temp, path string) error {
	return wrap("renaming temporary file", d.rename(temp, path, 0))
}

// complete fills a temporary file, syncs it and closes it.
func (d Disk) complete(temp *os.File, fill func(temp *os.File) error) error {
	err := fill(temp)
	if err == nil {
		err = wrap("syncing temporary file", d.on("sync", temp.Name(), temp.Sync))
		dropPageCache(temp)
	}
	if closed := d.close(temp); err == nil {
		err = wrap("closing temporary file", closed)
	}
	return err
}

func (d Disk) create(path string) (file *os.File, err error) {
	temp := temporary(path)
	err = d.on("create", temp, func() (err error) {
		file, err = os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600) //nolint:gosec // the caller's path
		return err
	})
	return file, wrap("creating temporary file", inDirectory(filepath.Dir(path), err))
}

// temporary returns a name for a temporary file of path. A leftover of this name is an error, and the next write has another name.
func temporary(path string) string {
	return path + ownMark + tempMark + strconv.FormatUint(uint64(rand.Uint32()), 10) //nolint:gosec // a name, not a secret
}

func (d Disk) write(temp *os.File, data []byte) error {
	return wrap("writing temporary file", d.do(Call{Name: "write", Path: temp.Name(), Data: data}, func() error {
		_, err := temp.Write(data)
		return err
	}))
}

func (d Disk) chownLike(temp *os.File, old fs.FileInfo) error {
	if old == nil {
		return nil
	}
	now, was := stat(temp), old.Sys().(*syscall.Stat_t) //nolint:forcetypeassert // of Linux
	if was.Uid == now.Uid && was.Gid == now.Gid {
		return nil
	}
	// Without CAP_CHOWN the agent becomes the file's owner, like every program that writes by rename.
	err := d.on("chown", temp.Name(), func() error { return temp.Chown(int(was.Uid), int(was.Gid)) })
	if errors.Is(err, syscall.EPERM) {
		return nil
	}
	return wrap("changing owner", err)
}

// Symlink durably makes link a symbolic link to target. It replaces a file at link. A directory at link is an error.
func (d Disk) Symlink(target, link string) error {
	temp := temporary(link)
	err := d.do(Call{Name: "symlink", Path: target, To: temp}, func() error { return os.Symlink(target, temp) })
	if err != nil {
		err = wrap("creating temporary link", inDirectory(filepath.Dir(link), err))
	} else {
		err = d.finish(temp, link, d.renameOnto(temp, link))
	}
	return wrapPath("linking", link, err)
}

// Rename durably renames a file within its directory. It replaces a file at the new name.
func (d Disk) Rename(from, to string) error {
	err := d.rename(from, to, 0)
	if err == nil {
		err = d.SyncDir(filepath.Dir(to))
	}
	if err != nil {
		return fmt.Errorf("renaming %q to %q: %w", from, to, cause(err))
	}
	return nil
}

// Remove durably removes a file, a link or an empty directory. A missing file is no error.
func (d Disk) Remove(path string) error {
	err := d.remove(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = d.SyncDir(filepath.Dir(path))
	}
	return wrapPath("removing", path, err)
}

// parentMode is the mode of new parent directories.
const parentMode fs.FileMode = 0o755

// MkdirAll durably makes a directory and its missing parents. The directory gets exactly this mode, and the parents 0755,
// whatever the umask. Existing directories stay unchanged.
func (d Disk) MkdirAll(path string, mode fs.FileMode) error {
	return wrapPath("making directory", path, d.mkdirAll(filepath.Clean(path), mode))
}

func (d Disk) mkdirAll(path string, mode fs.FileMode) error {
	info, err := os.Stat(path)
	switch {
	case err == nil && !info.IsDir():
		return syscall.ENOTDIR
	case err == nil || !errors.Is(err, fs.ErrNotExist):
		return cause(err)
	}
	parent := filepath.Dir(path)
	if err = d.mkdirAll(parent, parentMode); err != nil {
		return err
	}
	err = d.on("mkdir", path, func() error { return os.Mkdir(path, mode) })
	if errors.Is(err, fs.ErrExist) {
		if made, statErr := os.Stat(path); statErr == nil && made.IsDir() {
			return nil // another process was faster
		}
	}
	if err != nil {
		return cause(err)
	}
	// The umask may have cleared bits. Another owner of the parent may have replaced the directory with a link.
	err = d.on("chmod", path, func() error {
		dir, failed := os.OpenFile(path, syscall.O_DIRECTORY|syscall.O_NOFOLLOW, 0) //nolint:gosec // the caller's path
		if failed != nil {
			return failed
		}
		defer dir.Close() //nolint:errcheck // it was only opened
		return dir.Chmod(mode)
	})
	if err != nil {
		return wrap("changing mode", err)
	}
	return d.SyncDir(parent)
}

// Sweep removes the temporary files that writes to these names, by this program or by Istio's agent, have left in the
// directory, and returns their names. It continues after a failure and joins the errors. A missing directory is no error.
//
// The caller ensures that no other process writes these files: see [Lock].
func (d Disk) Sweep(dir string, names ...string) (removed []string, err error) {
	return d.sweep(dir, func(file string, _ bool) bool { return slices.Contains(names, file) })
}

// SweepOwn is Sweep for these names and for all temporary files of this program, whatever their names.
func (d Disk) SweepOwn(dir string, names ...string) (removed []string, err error) {
	return d.sweep(dir, func(file string, own bool) bool { return own || slices.Contains(names, file) })
}

// sweep removes the temporary files for which leftover returns true. Its arguments are the results of tempOf.
func (d Disk) sweep(dir string, leftover func(file string, own bool) bool) (removed []string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, wrapPath("sweeping directory", dir, err)
	}
	var errs []error
	for _, e := range entries {
		if file, own := tempOf(e.Name()); e.IsDir() || file == "" || !leftover(file, own) {
			continue
		}
		path := filepath.Join(dir, e.Name())
		if err := d.remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, wrapPath("removing", path, err))
			continue
		}
		removed = append(removed, path)
	}
	if len(removed) > 0 {
		errs = append(errs, d.SyncDir(dir))
	}
	return removed, errors.Join(errs...)
}

// tempOf returns the intended name of a temporary file, or "" for another file, and whether this program made the temporary
// file.
func tempOf(temp string) (file string, own bool) {
	at := strings.LastIndex(temp, tempMark)
	if at < 0 {
		return "", false
	}
	if digits := temp[at+len(tempMark):]; digits == "" || strings.Trim(digits, "0123456789") != "" {
		return "", false
	}
	return strings.CutSuffix(temp[:at], ownMark)
}
