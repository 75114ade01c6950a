package iptables

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// TestTool_OfTheWorkingDirectory: a tool of the host gets absolute directories only, whatever the caller's PATH is,
// so that a program that it starts by name is never a file of the working directory.
func TestTool_OfTheWorkingDirectory(t *testing.T) {
	dir := t.TempDir()
	tool := filepath.Join(dir, "tool")
	for _, file := range []string{tool, filepath.Join(dir, "iptables-nft")} {
		if err := os.WriteFile(file, []byte("#!/bin/sh\nprintf %s \"$PATH\"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
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
		if file, found := h.look("iptables-nft"); found && !strings.HasPrefix(file, "/usr") && !strings.HasPrefix(file, "/sbin") {
			t.Errorf("with Path %q %q is found", path, file)
		}
	}
}
