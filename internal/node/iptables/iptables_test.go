package iptables

import (
	"bytes"
	"errors"
	"hash/fnv"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// relation has small factors: the sum of their products with powers of FNV's prime is 0 in 64 bits. They come from lattice reduction.
var relation = []int{0, 1, 1, 5, 0, 1, 0, -1, -3, 0, -1, 0, -3, 2, 5, 2, -2, 0, -2, 1, -3, 1, -1, -1}

// collide returns two texts of letters and digits that bring FNV-1a of 64 bits from the states a and b, whose difference is a part
// of the relation, to the same state.
func collide(a, b uint64, relation []int) (one, other string, found bool) {
	const prime, letters = 0x100000001b3, "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	if len(relation) == 0 {
		return "", "", true
	}
	for _, x := range []byte(letters) {
		for _, y := range []byte(letters) {
			// The effect of a letter on a state depends on the state's last byte.
			if int(byte(b)^y)-int(byte(b))-int(byte(a)^x)+int(byte(a)) != relation[0] {
				continue
			}
			if one, other, found = collide((a^uint64(x))*prime, (b^uint64(y))*prime, relation[1:]); found {
				return string(x) + one, string(y) + other, true
			}
		}
	}
	return "", "", false
}

// entriesOf returns the input of a table's digest.
func entriesOf(f ruleset.Family, table string) ([]byte, error) {
	l, err := openLegacy(f)
	if err != nil {
		return nil, err
	}
	defer l.close()
	info, err := l.info(table)
	if err != nil {
		return nil, err
	}
	entries, err := l.entries(table, info.size)
	if err == nil {
		clearCounters(f, entries[getEntriesHead:])
	}
	return entries, err
}

// TestLegacyDigest_ForgedTable: a pod can write tables with any digest that it can compute.
func TestLegacyDigest_ForgedTable(t *testing.T) {
	t.Parallel()
	for f, tool := range map[ruleset.Family]string{ruleset.IPv4: "iptables-legacy", ruleset.IPv6: "ip6tables-legacy"} {
		path := netnstest.New(t)
		set := func(comment string) (entries []byte, digest any) {
			netnstest.Run(t, path, tool, "-t", "raw", "-F")
			netnstest.Run(t, path, tool, "-t", "raw", "-A", "OUTPUT", "-m", "comment", "--comment", comment)
			err := netnstest.Open(t, path).Do(func() (err error) {
				if entries, err = entriesOf(f, "raw"); err == nil {
					digest, err = LegacyDigest(f)
				}
				return err
			})
			check.OK(t, err)
			return entries, digest
		}
		sum := func(b []byte) uint64 {
			h := fnv.New64a()
			_, _ = h.Write(b)
			return h.Sum64()
		}
		filler := strings.Repeat("x", len(relation))
		before, _ := set(filler)
		state := sum(before[:bytes.Index(before, []byte(filler))])
		one, other, _ := collide(state, state, relation)
		first, digest := set(one)
		second, forged := set(other)
		if one == other || sum(first) != sum(second) {
			t.Fatalf("%s: %q and %q do not collide", f, one, other)
		}
		if digest == forged {
			t.Errorf("%s: %q and %q have one digest", f, one, other)
		}
		if _, again := set(other); again != forged {
			t.Errorf("%s: the same rules have the digests %x and %x", f, forged, again)
		}
	}
}

// TestRead_RuleOfSeveralLines: a name with a newline turns one rule into two in the text.
func TestRead_RuleOfSeveralLines(t *testing.T) {
	t.Parallel()
	path := netnstest.New(t)
	for _, rule := range [][]string{{"-A", "OUTPUT", "-p", "tcp", "-j", "ACCEPT"}, {"-N", "U"}, {"-A", "OUTPUT", "!", "-o", "a\n-A U", "-p", "tcp", "-j", "RETURN"}} {
		err := netnstest.Open(t, path).Do(func() error {
			tool, found := new(Host).Legacy(ruleset.IPv4)
			if !found {
				t.Fatal("no iptables-legacy")
			}
			_, err := tool.Read(t.Context())
			return err
		})
		check.OK(t, err)
		netnstest.Run(t, path, "iptables-legacy", append([]string{"-t", "nat"}, rule...)...)
	}
	err := netnstest.Open(t, path).Do(func() error {
		tool, _ := new(Host).Legacy(ruleset.IPv4)
		_, err := tool.Read(t.Context())
		return err
	})
	if !errors.Is(err, ErrUninspectable) {
		t.Errorf("got error %v", err)
	}
}

// TestTool_OfTheWorkingDirectory: a tool of the host gets only absolute directories, whatever the caller's PATH is,
// so that it never starts a program from the working directory.
func TestTool_OfTheWorkingDirectory(t *testing.T) {
	dir := t.TempDir()
	tool := filepath.Join(dir, "tool")
	for _, file := range []string{tool, filepath.Join(dir, "iptables-nft")} {
		check.OK(t, os.WriteFile(file, []byte("#!/bin/sh\nprintf %s \"$PATH\"\n"), 0o700))
	}
	t.Chdir(dir)
	for path, want := range map[string]string{
		"": usualPath, ":": usualPath, ".": usualPath, "::/opt/bin:": "/opt/bin:" + usualPath,
		"bin:/opt/bin:./x:../y": "/opt/bin:" + usualPath, "/opt/bin": "/opt/bin:" + usualPath,
	} {
		h := &Host{Path: path}
		got, err := Tool{Family: ruleset.IPv4, host: h}.run(t.Context(), tool, "")
		if err != nil || got != want {
			t.Errorf("with Path %q a tool gets PATH %q (%v), want %q", path, got, err, want)
		}
		if file, found := h.findProgram("iptables-nft"); found && !strings.HasPrefix(file, "/usr") && !strings.HasPrefix(file, "/sbin") {
			t.Errorf("with Path %q %q is found", path, file)
		}
	}
}
