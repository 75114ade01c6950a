package podns

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/netns"
)

// hostNamespace is the path of the node's own namespace: that of its first process, or of the kernel's threads where the first
// process may not be looked at. Those have process 2 as their first, in the node's pid namespace only.
func (s *search) hostNamespace() (string, error) {
	if s.view.Proc == "" {
		return "", fmt.Errorf("there is no procfs of the node at %q", s.places.Proc)
	}
	first := filepath.Join(s.view.Proc, "1/ns/net")
	_, err := netns.InodeOf(first)
	if err == nil {
		return first, nil
	}
	stat, statErr := os.ReadFile(filepath.Join(s.view.Proc, "2/stat"))
	fields := strings.Fields(string(stat)) // PID (NAME) STATE PPID
	const name, parent = 1, 3
	if statErr != nil || len(fields) <= parent || fields[name] != "(kthreadd)" || fields[parent] != "0" {
		return "", err
	}
	kernel := filepath.Join(s.view.Proc, "2/ns/net")
	if _, kernelErr := netns.InodeOf(kernel); kernelErr != nil {
		return "", fmt.Errorf("%w; %w", err, kernelErr)
	}
	return kernel, nil
}

// processes goes through the processes of the node. Those that have ended have no namespace any more, also while their
// parents have not heard of it. Those of other pods are passed over: their namespaces are not the pod's, however many they
// make.
func (s *search) processes(ctx context.Context) error {
	look := Look{Source: FromProc, Place: s.view.Proc}
	defer func() { s.looked = append(s.looked, look) }()
	others := 0
	err := s.eachProcess(ctx, func(process string) {
		look.Entries++
		inode, err := netns.InodeOf(process + "/ns/net")
		if judged, known := s.seen[inode]; err == nil && (!known || judged == matching) && s.occupied(process, inode) {
			others++
			return
		}
		s.candidate(process+"/ns/net", FromProc, &look)
	})
	if others > 0 {
		look.Notes = append(look.Notes, fmt.Sprintf("%d of other pods", others))
	}
	if ctx.Err() == nil {
		look.Err, err = errors.Join(look.Err, err), nil
	}
	return err
}

// eachProcess calls fn with the directory of each process.
func (s *search) eachProcess(ctx context.Context, fn func(process string)) error {
	proc, err := os.Open(s.view.Proc)
	if err != nil {
		return err
	}
	defer proc.Close() //nolint:errcheck // only read
	names, err := proc.Readdirnames(-1)
	for _, name := range names {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if _, notOne := strconv.ParseUint(name, 10, 32); notOne == nil {
			fn(s.view.Proc + "/" + name)
		}
	}
	return err
}
