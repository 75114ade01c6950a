package cluster

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// makeCgroups creates a cgroup for the cluster in each hierarchy, below this process's own cgroup: it becomes the
// root of the cluster's cgroup namespace and can be removed as a whole. The paths are written to the file list, one
// per line.
func makeCgroups(list, run string) error {
	groups, err := ownGroups()
	if err != nil {
		return err
	}
	var all []string
	for _, g := range groups {
		top, err := mountOf(g)
		if err != nil {
			return err
		}
		switch {
		case top == "":
		case g.id == "0" && hasControllers(top):
			// In version 2 only the root cgroup may have processes and enabled controllers. The cluster's cgroup is therefore
			// a child of the root, which must delegate its controllers.
			delegateControllers(top)
			all = append(all, filepath.Join(top, filepath.Base(run)))
		default:
			all = append(all, filepath.Join(top, g.path, filepath.Base(run)))
		}
	}
	if len(all) == 0 {
		return errors.New("no cgroup hierarchy is mounted on this machine")
	}
	// The list is written first: if this process is killed here, the next run removes the cgroups.
	if err := os.WriteFile(list, []byte(strings.Join(all, "\n")+"\n"), 0o644); err != nil {
		return fmt.Errorf("writing the list of cgroups: %w", err)
	}
	for _, dir := range all {
		if err := os.Mkdir(dir, 0o755); err != nil {
			return fmt.Errorf("making a cgroup: %w", err)
		}
		if err := fillCpuset(dir); err != nil {
			return err
		}
	}
	return nil
}

func hasControllers(top string) bool {
	text, err := os.ReadFile(filepath.Join(top, "cgroup.controllers"))
	return err == nil && strings.TrimSpace(string(text)) != ""
}

// delegateControllers enables each controller of the root for its children and ignores errors: a controller may be in
// use by a version 1 hierarchy.
func delegateControllers(top string) {
	text, _ := os.ReadFile(filepath.Join(top, "cgroup.controllers"))
	for controller := range strings.FieldsSeq(string(text)) {
		_ = writeKernelFile(filepath.Join(top, "cgroup.subtree_control"), "+"+controller)
	}
}

// fillCpuset copies cpuset.cpus and cpuset.mems from the parent to a new version 1 cgroup, which accepts no processes
// while they are empty.
func fillCpuset(dir string) error {
	for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || strings.TrimSpace(string(text)) != "" || hasControllers(dir) {
			continue
		}
		above, err := os.ReadFile(filepath.Join(filepath.Dir(dir), name))
		if err != nil {
			return fmt.Errorf("reading a cpuset: %w", err)
		}
		if err := writeKernelFile(filepath.Join(dir, name), strings.TrimSpace(string(above))); err != nil {
			return err
		}
	}
	return nil
}

// enter joins the cgroups, creates a cgroup namespace whose root they are, and executes the program again as
// nameInit.
func enter(run directory) error {
	runtime.LockOSThread()
	list, err := os.ReadFile(run.cgroups())
	if err != nil {
		return fmt.Errorf("reading the list of cgroups: %w", err)
	}
	for dir := range strings.Lines(string(list)) {
		if err = writeKernelFile(filepath.Join(strings.TrimSpace(dir), "cgroup.procs"), "0"); err != nil { // 0: the writer
			return err
		}
	}
	if err = unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("making a cgroup namespace: %w", err)
	}
	err = unix.Exec("/proc/self/exe", append([]string{nameInit}, os.Args[1:]...), os.Environ())
	return fmt.Errorf("executing the program again: %w", err)
}

// removeCgroups removes the listed cgroups and their children. It retries, because the kernel releases a cgroup some
// time after the exit of its last process.
func removeCgroups(list string) error {
	text, err := os.ReadFile(list)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading the list of cgroups: %w", err)
	}
	const tries, pause = 100, 50 * time.Millisecond
	var left []string
	for range tries {
		left = nil
		for dir := range strings.Lines(string(text)) {
			dir = strings.TrimSpace(dir)
			removeTree(dir)
			if _, err := os.Stat(dir); err == nil {
				left = append(left, dir)
			}
		}
		if len(left) == 0 {
			return nil
		}
		time.Sleep(pause)
	}
	return fmt.Errorf("cgroups are still there: %q", left)
}

// removeTree removes a cgroup and its children, leaves first. Its files are virtual and are not deleted.
func removeTree(dir string) {
	entries, _ := os.ReadDir(dir)
	for _, entry := range entries {
		if entry.IsDir() {
			removeTree(filepath.Join(dir, entry.Name()))
		}
	}
	_ = unix.Rmdir(dir)
}
