package hostpath

import (
	"bufio"
	"fmt"
	"os"
	"strings"
)

// Mount is a line of a mount table (proc_pid_mountinfo(5)).
type Mount struct {
	// Device is MAJOR:MINOR, Root the mounted directory of the file system, Point the mount point.
	Device, Root, Point string
	// Type is the type of the file system.
	Type string
}

// maxLine bounds a line in bytes: the options of an overlay are long.
const maxLine = 1 << 20

// EachMount calls visit with the mounts of a table, in order, until visit returns an error. It skips malformed
// lines.
func EachMount(table string, visit func(Mount) error) error {
	file, err := os.Open(table) //nolint:gosec // below a procfs
	if err != nil {
		return err
	}
	defer file.Close() //nolint:errcheck // only read
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		if mount, ok := parseMount(lines.Text()); ok {
			if err := visit(mount); err != nil {
				return err
			}
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("reading %q: %w", table, err)
	}
	return nil
}

// parseMount reads "ID PARENT MAJOR:MINOR ROOT POINT OPTIONS ... - TYPE ...".
func parseMount(line string) (Mount, bool) {
	before, after, _ := strings.Cut(line, " - ")
	fields := strings.Fields(before)
	const device, root, point = 2, 3, 4
	if len(fields) <= point {
		return Mount{}, false
	}
	kind, _, _ := strings.Cut(after, " ")
	unescaped := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(fields[point])
	return Mount{Device: fields[device], Root: fields[root], Point: unescaped, Type: kind}, true
}
