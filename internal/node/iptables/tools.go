// Package iptables reads and writes the rules of the current network namespace with the host's iptables tools.
//
// It promises one iptables-restore for each Program, to select the tools without writing any rule, and to read a namespace
// without tables without starting a process. The caller enters the namespace; this package never enters or touches another
// one, and starts no shell.
//
// Start at Choose.
package iptables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	goiptables "github.com/coreos/go-iptables/iptables"

	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables"
)

// Variant is one of the two implementations of iptables.
type Variant string

// The variants. They keep separate rules, and a packet traverses the rules of both.
const (
	NFT    Variant = "nft"
	Legacy Variant = "legacy"
)

// ParseVariant reads "legacy", "nft" or "" (choose).
func ParseVariant(text string) (Variant, error) {
	switch v := Variant(text); v {
	case "", NFT, Legacy:
		return v, nil
	}
	return "", fmt.Errorf("want legacy, nft or nothing")
}

// Host describes where to find the tools and how to start them.
type Host struct {
	// Path is a list of directories like $PATH. "" means the usual directories.
	Path string
	// Force selects the variant.
	Force Variant
	// Held, if set, is a file that every tool inherits, so that it stays open until the last tool has ended.
	Held *os.File
	// Lock is the file that legacy tools lock instead of the host's lock, for example the pod's namespace file. "" means the host's lock.
	Lock string

	versions map[string]version // by program, for the programs queried so far
	started  int
}

// Started returns the number of processes started for this host.
func (h *Host) Started() int { return h.started }

// version is the version of a program, from --version.
type version [3]int

// restoreWaits is the first version whose iptables-restore has --wait.
var restoreWaits = version{1, 6, 2} //nolint:gochecknoglobals // a constant

// usualPath lists where distributions install iptables. A runtime may start plugins with an incomplete PATH, or none.
const usualPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Tool is the pair of programs that reads and writes one family with one variant.
type Tool struct {
	Family  ruleset.Family
	Variant Variant
	save    string
	restore string
	program string
	host    *Host
}

// Name is the name of the program that writes.
func (t Tool) Name() string { return filepath.Base(t.restore) }

// base is the common start of a family's program names.
func base(f ruleset.Family) string {
	if f == ruleset.IPv6 {
		return "ip6tables"
	}
	return "iptables"
}

// Choose selects the tools for one family in the current namespace: the forced variant; else legacy where legacy tables
// exist; else nft if the kernel has it; else the program with the plain name. Choose writes neither to the kernel nor to
// the host. (The reference inserts and deletes a rule to try each variant.) The tools of the other variant follow if it may hold
// rules in this namespace, too.
func Choose(ctx context.Context, f ruleset.Family, h *Host) ([]Tool, error) {
	nft, haveNFT := h.find(f, NFT)
	legacy, haveLegacy := h.find(f, Legacy)
	inUse := LegacyInUse(f)
	_, nftErr := nftables.InUse(ctx, f)
	switch {
	case h.Force == NFT && haveNFT, h.Force == "" && haveNFT && nftErr == nil && (!haveLegacy || !inUse):
		return choice(haveLegacy && inUse, nft, legacy), nil
	case h.Force == Legacy && haveLegacy, h.Force == "" && haveLegacy && inUse:
		return choice(haveNFT && nftErr == nil, legacy, nft), nil
	case h.Force != "":
		return nil, h.missing(f, base(f)+"-"+string(h.Force))
	}
	plain, err := h.plain(ctx, f)
	if err != nil && haveLegacy {
		return []Tool{legacy}, nil
	}
	return []Tool{plain}, err
}

// Legacy returns the tools of the legacy variant, if the host has them.
func (h *Host) Legacy(f ruleset.Family) (Tool, bool) { return h.find(f, Legacy) }

// choice returns both tools, or only the first.
func choice(both bool, all ...Tool) []Tool {
	if both {
		return all
	}
	return all[:1]
}

// Names returns the program name for a dry run, which must not inspect the system.
func Names(f ruleset.Family) string { return base(f) + "-restore" }

func (h *Host) find(f ruleset.Family, v Variant) (Tool, bool) {
	return h.named(f, v, base(f)+"-"+string(v))
}

func (h *Host) named(f ruleset.Family, v Variant, name string) (Tool, bool) {
	save, ok := h.findProgram(name + "-save")
	restore, ok2 := h.findProgram(name + "-restore")
	program, ok3 := h.findProgram(name)
	return Tool{Family: f, Variant: v, save: save, restore: restore, program: program, host: h}, ok && ok2 && ok3
}

// plain finds the tools without a variant in their name, and gets the variant from --version.
func (h *Host) plain(ctx context.Context, f ruleset.Family) (Tool, error) {
	name := base(f)
	t, ok := h.named(f, Legacy, name)
	if !ok {
		return Tool{}, h.missing(f, name)
	}
	// On most systems the plain name is a link to a program whose name has the variant.
	if target, err := filepath.EvalSymlinks(t.restore); err == nil && strings.Contains(filepath.Base(target), "legacy") {
		return t, nil
	} else if err == nil && strings.Contains(filepath.Base(target), "nft") {
		t.Variant = NFT
		return t, nil
	}
	text, err := t.run(ctx, t.restore, "", "--version")
	if err != nil {
		return Tool{}, fmt.Errorf("detecting the variant of %q: %w", t.restore, err)
	}
	if strings.Contains(text, "nf_tables") {
		t.Variant = NFT
	}
	return t, nil
}

// version runs the tool's program once for its version.
func (t Tool) version() (version, error) {
	if v, known := t.host.versions[t.program]; known {
		return v, nil
	}
	proto := goiptables.ProtocolIPv4
	if t.Family == ruleset.IPv6 {
		proto = goiptables.ProtocolIPv6
	}
	t.host.started++
	ipt, err := goiptables.New(goiptables.IPFamily(proto), goiptables.Path(t.program))
	if err != nil {
		return version{}, fmt.Errorf("querying %q for its version: %w", t.program, err)
	}
	var v version
	v[0], v[1], v[2] = ipt.GetIptablesVersion()
	// Both families come from the same build.
	t.host.versions = map[string]version{t.program: v, strings.Replace(t.program, "/iptables", "/ip6tables", 1): v}
	return v, nil
}

// ErrMissing is returned when the host has no usable tools.
var ErrMissing = errors.New("no usable iptables")

func (h *Host) missing(f ruleset.Family, name string) error {
	path := h.Path
	if path == "" {
		path = usualPath
	}
	return fmt.Errorf("finding %s tools: %w: %s, %s-save and %s-restore are not all in %q; install the package iptables on the node",
		f, ErrMissing, name, name, name, path)
}

// directories returns the host's path and then the usual directories. It drops relative ones: the working directory of this
// process does not belong to the host's path.
func (h *Host) directories() []string {
	all := filepath.SplitList(h.Path + string(os.PathListSeparator) + usualPath)
	return slices.DeleteFunc(all, func(dir string) bool { return !filepath.IsAbs(dir) })
}

// findProgram finds an executable file in the host's path, then in the usual one.
func (h *Host) findProgram(name string) (string, bool) {
	for _, dir := range h.directories() {
		file := filepath.Join(dir, name)
		if info, err := os.Stat(file); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return file, true
		}
	}
	return "", false
}

// inUse reports whether the variant has any table of the family here, or that this is not known.
func (t Tool) inUse(ctx context.Context) bool {
	if t.Variant == Legacy {
		return LegacyInUse(t.Family)
	}
	found, err := nftables.InUse(ctx, t.Family)
	return found || err != nil
}

// Read returns all rules of the namespace that the tool lists. It returns ErrUninspectable if they exceed the bounds.
func (t Tool) Read(ctx context.Context) (ruleset.Set, error) {
	if !t.inUse(ctx) {
		return ruleset.Set{Family: t.Family}, nil
	}
	text, err := t.run(ctx, t.save, "")
	if err != nil {
		return ruleset.Set{}, fmt.Errorf("reading %s rules: %w", t.Family, err)
	}
	if lines := strings.Count(text, "\n"); lines > maxRules {
		return ruleset.Set{}, fmt.Errorf("reading %s rules: %w", t.Family, overBudget())
	}
	set, err := ruleset.Parse(t.Family, text)
	if err == nil && t.Variant == Legacy {
		err = checkRuleCount(set)
	}
	return set, err
}

// Apply runs a Program. Each of its tables is one transaction. An error names the line that the kernel or the tool
// refused.
func (t Tool) Apply(ctx context.Context, p ruleset.Program) error {
	if p.Empty() {
		return nil
	}
	args := []string{"--noflush"}
	if t.Variant == Legacy {
		v, err := t.version()
		if err != nil {
			return err
		}
		if slices.Compare(v[:], restoreWaits[:]) >= 0 {
			args = append(args, lockWait)
		}
	}
	_, err := t.run(ctx, t.restore, p.String(), args...)
	if err != nil {
		return fmt.Errorf("writing %s rules: %w", t.Family, err)
	}
	return nil
}

// Count is the number of packets that matched a rule.
type Count struct {
	Family  ruleset.Family
	Rule    walk.Hop
	Packets uint64
}

// Counts returns the counters of all rules of the namespace that the tool lists.
func (t Tool) Counts(ctx context.Context) ([]Count, error) {
	if !t.inUse(ctx) {
		return nil, nil
	}
	text, err := t.run(ctx, t.save, "", "-c")
	if err != nil {
		return nil, fmt.Errorf("reading the counters of %s rules: %w", t.Family, err)
	}
	return parseCounts(t.Family, text), nil
}

// parseCounts reads the output of iptables-save -c: "*TABLE", and "[PACKETS:BYTES] -A CHAIN RULE" for each rule.
func parseCounts(f ruleset.Family, text string) (all []Count) {
	table, numbers := "", map[string]int{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if name, begins := strings.CutPrefix(line, "*"); begins {
			table = name
			clear(numbers)
			continue
		}
		counters, rule, _ := strings.Cut(line, " -A ")
		packets, _, is := strings.Cut(strings.TrimPrefix(counters, "["), ":")
		n, err := strconv.ParseUint(packets, 10, 64)
		if !is || err != nil || len(all) == maxRules {
			continue
		}
		chain, spec, _ := strings.Cut(rule, " ")
		numbers[chain]++
		spec = strings.TrimLeft(spec, " ")
		all = append(all, Count{f, walk.Hop{
			Table: table, Chain: chain, Number: numbers[chain], Rule: spec, Target: ruleset.Read(spec).Target, Answer: walk.Yes,
		}, n})
	}
	return all
}
