package main

import (
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
)

// What every start of the program costs, and so every pod, is what is linked into it and what that does before main.

// mostBytes is the size that the program may have. A call of reflect's MethodByName anywhere, as package text/template has, keeps every
// exported method linked, which is 3.6 MB.
const mostBytes = 24_000_000

// What initialisation may take, as the runtime counts it (GODEBUG=inittrace=1): packages with an init, allocations, bytes.
const (
	mostInits     = 170
	mostAllocs    = 3800
	mostInitBytes = 380_000
)

func TestTheProgramIsSmall(t *testing.T) {
	t.Parallel()
	info, err := os.Stat(chaintest.Build(t, t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("the program has %d bytes", info.Size())
	if info.Size() >= mostBytes {
		t.Errorf("%d bytes, want less than %d", info.Size(), mostBytes)
	}
}

// TestAStartInitialisesLittle counts what happens before main.
func TestAStartInitialisesLittle(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), chaintest.Build(t, t.TempDir()))
	cmd.Env = append(os.Environ(), "GODEBUG=inittrace=1", "CNI_COMMAND=VERSION")
	cmd.Stdin = strings.NewReader(`{"cniVersion":"1.0.0"}`)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil {
		t.Fatal(err, stderr.String())
	}
	var packages, size, allocs int
	for line := range strings.Lines(stderr.String()) {
		more, allocated, err := initOf(line)
		if err != nil {
			t.Fatal(err)
		}
		packages, size, allocs = packages+1, size+more, allocs+allocated
	}
	t.Logf("%d packages allocate %d bytes in %d pieces", packages, size, allocs)
	if packages < 10 || packages > mostInits || size > mostInitBytes || allocs > mostAllocs {
		t.Errorf("%d packages (at most %d) allocate %d bytes (at most %d) in %d pieces (at most %d) before main:\n%s",
			packages, mostInits, size, mostInitBytes, allocs, mostAllocs, stderr.String())
	}
}

// initOf reads a line such as "init net @0.5 ms, 0.017 ms clock, 960 bytes, 10 allocs".
func initOf(line string) (size, allocs int, err error) {
	parts := strings.Split(strings.TrimSpace(line), ", ")
	if len(parts) != 4 {
		return 0, 0, fmt.Errorf("not a line about an init: %q", line)
	}
	if size, err = strconv.Atoi(strings.TrimSuffix(parts[2], " bytes")); err == nil {
		allocs, err = strconv.Atoi(strings.TrimSuffix(parts[3], " allocs"))
	}
	return size, allocs, err
}
