package iptables

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestLegacyDigest: it is a cryptographic hash of all entries because a pod can write tables with any digest that it can compute.
func TestLegacyDigest(t *testing.T) {
	t.Parallel()
	for f, tool := range map[ruleset.Family]string{ruleset.IPv4: "iptables-legacy", ruleset.IPv6: "ip6tables-legacy"} {
		path := netnstest.New(t)
		for _, comment := range []string{"one", "other"} {
			netnstest.Run(t, path, tool, "-t", "raw", "-F")
			netnstest.Run(t, path, tool, "-t", "raw", "-A", "OUTPUT", "-m", "comment", "--comment", comment)
			check.OK(t, netnstest.Open(t, path).Do(func() error {
				var all []byte
				err := eachLegacy(f, func(table legacyTable) error {
					entries, err := table.read()
					clearCounters(f, entries[getEntriesHead:])
					all = append(all, entries...)
					return err
				})
				digest, failed := LegacyDigest(f)
				if digest != sha256.Sum256(all) || !bytes.Contains(all, []byte(comment)) {
					t.Errorf("%s, comment %s: digest %x of %d bytes", f, comment, digest, len(all))
				}
				return errors.Join(err, failed)
			}))
		}
	}
}

// TestRead_RuleOfSeveralLines: a name with a newline turns one rule into two in the text.
func TestRead_RuleOfSeveralLines(t *testing.T) {
	t.Parallel()
	path := netnstest.New(t)
	read := func() error {
		return netnstest.Open(t, path).Do(func() error {
			tool, found := new(Host).Legacy(ruleset.IPv4)
			check.Equal(t, found, true, "iptables-legacy is there")
			return check.Err(tool.Read(t.Context()))
		})
	}
	for _, rule := range [][]string{{"-A", "OUTPUT", "-p", "tcp", "-j", "ACCEPT"}, {"-N", "U"}, {"-A", "OUTPUT", "!", "-o", "a\n-A U", "-p", "tcp", "-j", "RETURN"}} {
		check.OK(t, read())
		netnstest.Run(t, path, "iptables-legacy", append([]string{"-t", "nat"}, rule...)...)
	}
	check.Is(t, read(), ErrUninspectable)
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
