package main

import (
	"os"
	"os/exec"
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
	cmd.Env = append(os.Environ(), "CNI_COMMAND=VERSION")
	cmd.Stdin = strings.NewReader(`{"cniVersion":"1.0.0"}`)
	all, err := chaintest.Inits(cmd)
	if err != nil {
		t.Fatal(err)
	}
	var size, allocs int
	for _, one := range all {
		size, allocs = size+one.Bytes, allocs+one.Allocs
	}
	t.Logf("%d packages allocate %d bytes in %d pieces", len(all), size, allocs)
	if len(all) > mostInits || size > mostInitBytes || allocs > mostAllocs {
		t.Errorf("%d packages (at most %d) allocate %d bytes (at most %d) in %d pieces (at most %d) before main: %v",
			len(all), mostInits, size, mostInitBytes, allocs, mostAllocs, all)
	}
}
