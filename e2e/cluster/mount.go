package cluster

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// mountAll mounts the file systems of the servers. The mount namespace is private, so the machine does not see them.
func mountAll(tier Tier, run directory, name string) error {
	if err := mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := mount("proc", "/proc", "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return err
	}
	if tier != Node {
		return nil
	}
	if err := unix.Sethostname([]byte(name)); err != nil {
		return fmt.Errorf("setting the host name: %w", err)
	}
	steps := []func(directory) error{mountSys, bindSysctls, overlaySystem, bindState, mountRun}
	for _, step := range steps {
		if err := step(run); err != nil {
			return err
		}
	}
	// Mounts of the kubelet's volumes must propagate to containers.
	return mount("", "/", "", unix.MS_REC|unix.MS_SHARED, "")
}

func mount(source, target, kind string, flags uintptr, data string) error {
	if err := unix.Mount(source, target, kind, flags, data); err != nil {
		return fmt.Errorf("mounting %s %q at %q (%s): %w", kind, source, target, data, err)
	}
	return nil
}

// mountSys mounts the sysfs of this network namespace and the cgroup file systems of this cgroup namespace, in the
// machine's version: 2, or each hierarchy of version 1.
func mountSys(directory) error {
	if err := mount("sysfs", "/sys", "sysfs", 0, ""); err != nil {
		return err
	}
	groups, err := ownGroups()
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(groups, func(g group) bool { return g.isV1Controller() }) {
		return mountV2()
	}
	const top = "/sys/fs/cgroup"
	if err := mount("cgroup", top, "tmpfs", 0, "mode=755"); err != nil {
		return err
	}
	for _, g := range groups {
		if g.id == "0" {
			continue
		}
		if err := mountV1(top, g); err != nil {
			return err
		}
	}
	return nil
}

func mountV1(top string, g group) error {
	dir, data := filepath.Join(top, g.controllers), g.controllers
	if name, named := strings.CutPrefix(g.controllers, "name="); named {
		dir, data = filepath.Join(top, name), "none,"+g.controllers
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return fmt.Errorf("making a mount point: %w", err)
	}
	if err := mount("cgroup", dir, "cgroup", 0, data); err != nil {
		if g.isV1Controller() {
			return err
		}
		return os.Remove(dir) // a named hierarchy is not needed
	}
	parts := strings.Split(g.controllers, ",")
	if len(parts) == 1 {
		return nil
	}
	for _, part := range parts {
		if err := os.Symlink(g.controllers, filepath.Join(top, part)); err != nil {
			return fmt.Errorf("linking a controller: %w", err)
		}
	}
	return nil
}

// mountV2 mounts cgroup2 and moves all processes to a leaf: a cgroup with enabled controllers may not have processes.
func mountV2() error {
	const top = "/sys/fs/cgroup"
	if err := mount("cgroup2", top, "cgroup2", 0, ""); err != nil {
		return err
	}
	if err := os.Mkdir(top+"/init", 0o755); err != nil {
		return fmt.Errorf("making a cgroup: %w", err)
	}
	processes, err := os.ReadFile(top + "/cgroup.procs")
	if err != nil {
		return fmt.Errorf("reading the processes of a cgroup: %w", err)
	}
	for pid := range strings.FieldsSeq(string(processes)) {
		if err = writeKernelFile(top+"/init/cgroup.procs", pid); err != nil {
			return err
		}
	}
	controllers, err := os.ReadFile(top + "/cgroup.controllers")
	if err != nil {
		return fmt.Errorf("reading the controllers of a cgroup: %w", err)
	}
	for controller := range strings.FieldsSeq(string(controllers)) {
		if err := writeKernelFile(top+"/cgroup.subtree_control", "+"+controller); err != nil {
			return err
		}
	}
	return nil
}

// bindSysctls bind-mounts private files over the sysctls that the kubelet writes and no namespace isolates, and over
// the boot ID. The kernel lets the user namespace of a pod mount proc only if there is one without such files.
func bindSysctls(run directory) error {
	whole := run.path("state", "proc")
	if err := os.MkdirAll(whole, 0o555); err != nil {
		return fmt.Errorf("making a mount point: %w", err)
	}
	if err := mount("proc", whole, "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return err
	}
	for name, value := range map[string]string{
		"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
		"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
	} {
		file := run.path("state", "sysctl-"+strings.ReplaceAll(name, "/", "."))
		if err := os.WriteFile(file, []byte(value+"\n"), 0o644); err != nil {
			return fmt.Errorf("covering a sysctl: %w", err)
		}
		if err := mount(file, "/proc/sys/"+name, "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	return mount(run.bootID(), "/proc/sys/kernel/random/boot_id", "", unix.MS_BIND, "")
}

// overlaySystem mounts a writable overlay over directories of the machine. Mount points are created in the overlay:
// removing one on the machine would unmount it in every other mount namespace.
func overlaySystem(run directory) error {
	top := run.path("state", "overlay")
	if err := os.MkdirAll(top, 0o755); err != nil {
		return fmt.Errorf("making a directory: %w", err)
	}
	if err := mount("tmpfs", top, "tmpfs", 0, ""); err != nil {
		return err
	}
	for _, name := range []string{"etc", "opt", "var"} {
		upper, work := path.Join(top, name+".upper"), path.Join(top, name+".work")
		for _, dir := range []string{upper, work} {
			if err := os.Mkdir(dir, 0o755); err != nil {
				return fmt.Errorf("making a directory: %w", err)
			}
		}
		data := fmt.Sprintf("lowerdir=/%s,upperdir=%s,workdir=%s", name, upper, work)
		if err := mount("overlay", "/"+name, "overlay", 0, data); err != nil {
			return err
		}
	}
	return nil
}

// bindState bind-mounts directories from the cluster's directory, for files that are large or are read after the
// test.
func bindState(run directory) error {
	for _, name := range []string{"/var/lib/kubelet", "/var/lib/cni", "/var/lib/containerd", "/var/log", "/etc/cni", "/opt/cni"} {
		own := run.path("state", "root", name)
		for _, dir := range []string{own, name} {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return fmt.Errorf("making a directory: %w", err)
			}
		}
		if err := mount(own, name, "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	return nil
}

func mountRun(directory) error {
	// /run is a new tmpfs. Name resolution needs only /etc/resolv.conf, which may be a link into /run.
	if err := mount("tmpfs", "/run", "tmpfs", 0, "mode=755"); err != nil {
		return err
	}
	for _, dir := range []string{"/run/lock", "/run/netns", "/opt/cni/bin", "/etc/cni/net.d"} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("making a directory: %w", err)
		}
	}
	return nil
}

// group is one line of /proc/self/cgroup.
type group struct{ id, controllers, path string }

func (g group) isV1Controller() bool {
	return g.id != "0" && !strings.HasPrefix(g.controllers, "name=")
}

func ownGroups() ([]group, error) {
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, fmt.Errorf("reading /proc/self/cgroup: %w", err)
	}
	var all []group
	for line := range strings.Lines(string(text)) {
		if parts := strings.SplitN(strings.TrimSpace(line), ":", 3); len(parts) == 3 {
			all = append(all, group{parts[0], parts[1], parts[2]})
		}
	}
	return all, nil
}

// mountOf returns the mount point of a hierarchy, "" if it is not mounted.
func mountOf(g group) (string, error) {
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return "", fmt.Errorf("reading mounts: %w", err)
	}
	lines := bufio.NewScanner(bytes.NewReader(text))
	for lines.Scan() {
		before, after, found := strings.Cut(lines.Text(), " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if !found || len(left) < 5 || len(right) < 3 {
			continue
		}
		v2 := g.id == "0" && right[0] == "cgroup2"
		v1 := g.id != "0" && right[0] == "cgroup" &&
			slices.Contains(strings.Split(right[2], ","), strings.Split(g.controllers, ",")[0])
		if v1 || v2 {
			return left[4], nil
		}
	}
	return "", lines.Err()
}

// writeKernelFile writes to a file of procfs or cgroupfs.
func writeKernelFile(file, text string) error {
	if err := os.WriteFile(file, []byte(text), 0); err != nil {
		return fmt.Errorf("writing %q to %q: %w", text, file, err)
	}
	return nil
}
