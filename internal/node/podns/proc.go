package podns

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/netns"
)

// host is the path of the node's own namespace: that of its first process, or of the kernel's threads where the first
// process may not be looked at. Those have process 2 as their first, in the node's pid namespace only.
func (p Places) host() (string, error) {
	first := filepath.Join(p.Proc, "1/ns/net")
	_, err := netns.InodeOf(first)
	if err == nil {
		return first, nil
	}
	stat, statErr := os.ReadFile(filepath.Join(p.Proc, "2/stat"))
	fields := strings.Fields(string(stat)) // PID (NAME) STATE PPID
	const name, parent = 1, 3
	if statErr != nil || len(fields) <= parent || fields[name] != "(kthreadd)" || fields[parent] != "0" {
		return "", err
	}
	kernel := filepath.Join(p.Proc, "2/ns/net")
	if _, kernelErr := netns.InodeOf(kernel); kernelErr != nil {
		return "", fmt.Errorf("%w; %w", err, kernelErr)
	}
	return kernel, nil
}

// processes goes through the processes of the node. Those that have ended have no namespace any more, also while their
// parents have not heard of it.
func (s *search) processes(ctx context.Context) error {
	look := Look{Source: FromProc, Place: s.places.Proc}
	defer func() { s.looked = append(s.looked, look) }()
	proc, err := os.Open(s.places.Proc)
	if err != nil {
		look.Err = err
		return nil
	}
	defer proc.Close() //nolint:errcheck // only read
	names, err := proc.Readdirnames(-1)
	look.Err = err
	for _, name := range names {
		if err := ctx.Err(); err != nil {
			return err
		}
		if _, err := strconv.ParseUint(name, 10, 32); err != nil {
			continue
		}
		look.Entries++
		s.candidate(s.places.Proc+"/"+name+"/ns/net", FromProc, &look)
	}
	return nil
}
