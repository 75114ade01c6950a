package selfcheck

import (
	"cmp"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// FileName is the name of the verdict's file in the agent's run directory.
const FileName = "selftest.json"

// version is the version of the file. A plugin ignores a verdict of another version.
const version = 1

// Verdict is the result of a self-test of the node. The zero Verdict means that no test has run.
type Verdict struct {
	Version int      `json:"version"`
	Kernel  string   `json:"kernel"`
	Results []Result `json:"results"`
	// Choice is the backend that auto selects, "" if none works.
	Choice redirect.Backend `json:"choice"`
}

// Result is the result of one backend.
type Result struct {
	Backend  redirect.Backend `json:"backend"`
	Problems []Problem        `json:"problems,omitempty"`
	// Untried says why there is no result: the programs are missing where the test ran. The node may have them.
	Untried string `json:"untried,omitempty"`
}

// Problem is one family and mode that failed.
type Problem struct {
	Family string `json:"family"`
	Mode   string `json:"mode"`
	// Text names the missing feature or the result of the packets.
	Text string `json:"text"`
}

// redirectsIPv4 reports whether the backend redirects IPv4 in mode REDIRECT, which nearly all pods need.
func (r Result) redirectsIPv4() bool {
	return !slices.ContainsFunc(r.Problems, func(p Problem) bool {
		return p.Family == ruleset.IPv4.String() && p.Mode == redirect.Redirect.String()
	})
}

// choose selects the backend with the fewest problems among those that redirect IPv4 in mode REDIRECT, the first if
// several are equal.
func (v *Verdict) choose() {
	fewest := -1
	for _, r := range v.Results {
		if r.Untried != "" && v.Choice == "" {
			v.Choice = r.Backend // unless another one works
		}
		if r.Untried != "" || !r.redirectsIPv4() {
			continue
		}
		if fewest < 0 || len(r.Problems) < fewest {
			v.Choice, fewest = r.Backend, len(r.Problems)
		}
	}
}

// Err returns an error if packets were sent and no backend redirected them. An untried backend prevents the error because the
// plugin may have its programs.
func (v Verdict) Err() error {
	if v.Choice == "" && len(v.Results) > 0 {
		return fmt.Errorf("no backend can redirect pods on this node: %s", v.Summary())
	}
	return nil
}

// Served returns why a backend cannot redirect pods, nil if it can. Auto means the Choice. The zero Verdict accepts every
// backend.
func (v Verdict) Served(by redirect.Backend) error {
	if by == "" || by == redirect.Auto {
		by = v.Choice
	}
	if err := v.Err(); by == "" && err != nil {
		return err
	}
	for _, r := range v.Results {
		if r.Backend == by && !r.redirectsIPv4() {
			return fmt.Errorf("pods cannot be redirected by %s on this node: %s", by, r.summary())
		}
	}
	return nil
}

// Summary returns the problems in one line.
func (v Verdict) Summary() string {
	var all []string
	for _, r := range v.Results {
		if len(r.Problems) > 0 {
			all = append(all, fmt.Sprintf("%s: %s", r.Backend, r.summary()))
		}
	}
	return strings.Join(all, "; ")
}

func (r Result) summary() string {
	var all []string
	for _, p := range r.Problems {
		all = append(all, p.String())
	}
	return strings.Join(all, "; ")
}

// String returns one line.
func (p Problem) String() string {
	return fmt.Sprintf("%s %s: %s", p.Family, p.Mode, strings.ReplaceAll(p.Text, "\n", ", "))
}

// Text formats the verdict for people.
func (v Verdict) Text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "kernel %s\n", v.Kernel)
	for _, r := range v.Results {
		switch {
		case r.Untried != "":
			fmt.Fprintf(&b, "%-9s was not tried: %s\n", r.Backend, r.Untried)
		case len(r.Problems) == 0:
			fmt.Fprintf(&b, "%-9s works\n", r.Backend)
		default:
			fmt.Fprintf(&b, "%-9s does not fully work\n", r.Backend)
		}
		for _, p := range r.Problems {
			fmt.Fprintf(&b, "          %s\n", p)
		}
	}
	fmt.Fprintf(&b, "backend auto is %s\n", cmp.Or(string(v.Choice), "none: no pod of the mesh can be redirected"))
	return b.String()
}

// Record writes the verdict's file for the plugin.
func (v Verdict) Record(disk hostfs.Disk, runDir string) error {
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return fmt.Errorf("encoding the verdict: %w", err)
	}
	const readable = 0o644 // the file contains no secret
	return disk.WriteFile(filepath.Join(runDir, FileName), append(text, '\n'), readable)
}

// maxVerdict bounds the file.
const maxVerdict = 64 << 10

// Recorded returns the verdict of the last self-test of this node. It is the zero Verdict if none has this version and kernel.
func Recorded(runDir string) Verdict {
	text, _, err := hostfs.ReadFile(filepath.Join(runDir, FileName), maxVerdict)
	var v Verdict
	if err != nil || json.Unmarshal(text, &v) != nil || v.Version != version || len(v.Results) == 0 || v.Kernel != kernel() {
		return Verdict{}
	}
	if _, err := redirect.ParseBackend(string(v.Choice)); err != nil {
		return Verdict{}
	}
	return v
}

// kernel returns the release of the running kernel.
func kernel() string {
	var name unix.Utsname
	_ = unix.Uname(&name) // it fails only for a bad address
	return unix.ByteSliceToString(name.Release[:])
}
