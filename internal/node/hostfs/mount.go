package hostfs

import (
	"bufio"
	"os"
	"path/filepath"
	"strings"
)

// MountedFrom tells what is mounted where a path lies: device and directory within it, as proc_pid_mountinfo(5) has them.
// It changes when that directory is moved or removed, although the mount shows the same files. Empty is not known.
//
// The kernel gives the table piece by piece, and one that changes meanwhile may lack a line: what is told was read twice.
func MountedFrom(path string) string {
	const attempts = 10
	last := readMount(path)
	for range attempts {
		again := readMount(path)
		if again == last {
			break
		}
		last = again
	}
	return last
}

func readMount(path string) string {
	file, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return ""
	}
	defer func() { _ = file.Close() }() // only read
	path = filepath.Clean(path)
	best, from := -1, ""
	for lines := bufio.NewScanner(file); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		const device, root, point = 2, 3, 4
		if len(fields) <= point {
			continue
		}
		at := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(fields[point])
		inside := at == "/" || path == at || strings.HasPrefix(path, at+"/")
		if inside && len(at) >= best { // of two at one place the later one is on top
			best, from = len(at), fields[device]+" "+fields[root]
		}
	}
	return from
}
