package selfcheck

import (
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func run(t *testing.T) (Verdict, error) {
	t.Helper()
	return Run(t.Context(), "/usr/sbin:/sbin", true, slog.New(slog.DiscardHandler))
}

func TestRun_EveryBackend(t *testing.T) {
	v, err := run(t)
	check.OK(t, err)
	if len(v.Results) != 3 || v.Choice != redirect.Netlink || v.Kernel == "" {
		t.Errorf("got %+v", v)
	}
	check.Equal(t, v.Summary(), "", "problems")
	check.Contains(t, v.Text(), "backend auto is netlink")
}

// TestRun_WithoutPrograms starts no process: the search path has none.
func TestRun_WithoutPrograms(t *testing.T) {
	v, err := Run(t.Context(), "/nonexistent", false, slog.New(slog.DiscardHandler))
	check.OK(t, err)
	if last := v.Results[2]; last.Backend != redirect.Tools || last.Untried != "another backend works" || v.Choice != redirect.Netlink {
		t.Errorf("got %+v", v)
	}
}

// TestRun_WithoutRules: rules without effect fail the test.
func TestRun_WithoutRules(t *testing.T) {
	for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
		s, err := newTestbed(f)
		check.OK(t, err)
		defer s.close()
		check.Fails(t, s.packets(t.Context()),
			"a connection of the app to the outside did not arrive at port 15001",
			"a connection of a client to the app did not arrive at port 15006", "a DNS query of the app did not arrive at port 15053",
		)
	}
}

// TestRun_WithoutPrivilege runs as a user without capabilities.
func TestRun_WithoutPrivilege(t *testing.T) {
	if !netnstest.Inside(t, func(cmd *exec.Cmd) {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1337, Gid: 1337}}
	}) {
		return
	}
	check.Is(t, check.Err(run(t)), ErrPrivilege)
}

// TestRun_UserNamespace runs the self-test in a user namespace that is not the first. Its network namespaces
// belong to the same one, which maps the proxy's user, so the kernel accepts iptables' owner match.
func TestRun_UserNamespace(t *testing.T) {
	if !netnstest.Inside(t, func(cmd *exec.Cmd) {
		ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 65536}}
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids}
	}) {
		return
	}
	v, err := run(t)
	if err != nil || len(v.Results) != 3 || v.Summary() != "" {
		t.Errorf("got %s, %v", v.Text(), err)
	}
}

func TestVerdict_Chooses(t *testing.T) {
	problem := func(f, m string) Problem { return Problem{Family: f, Mode: m, Text: "no module"} }
	none, tproxy := []Problem(nil), []Problem{problem("IPv4", "TPROXY")}
	broken, noIPv6 := []Problem{problem("IPv4", "REDIRECT"), problem("IPv4", "TPROXY")}, []Problem{problem("IPv6", "REDIRECT")}
	for name, c := range map[string]struct {
		netlink, native, tools []Problem
		untried                string // for the tools: the agent's image may lack them and the node have them
		want                   redirect.Backend
	}{
		"all works":                             {none, none, none, "", redirect.Netlink},
		"no nft_compat":                         {broken, none, broken, "", redirect.Native},
		"no nft_compat, tools unknown":          {broken, none, none, "no iptables", redirect.Native},
		"no nft_compat, legacy tools work":      {broken, none, none, "", redirect.Native},
		"no nf_tables":                          {broken, broken, none, "", redirect.Tools},
		"no nf_tables, tools unknown":           {broken, broken, none, "no iptables", redirect.Tools},
		"netlink lacks TPROXY":                  {tproxy, none, none, "", redirect.Native},
		"netlink and native lack TPROXY":        {tproxy, tproxy, none, "", redirect.Tools},
		"no IPv6":                               {noIPv6, noIPv6, noIPv6, "", redirect.Netlink},
		"there are no tools":                    {none, none, broken, "", redirect.Netlink},
		"netlink and native lack IPv6, no tool": {noIPv6, noIPv6, broken, "", redirect.Netlink},
		"nothing works":                         {broken, broken, broken, "", ""},
		"netlink works, tools unknown":          {none, none, none, "no iptables", redirect.Netlink},
	} {
		t.Run(name, func(t *testing.T) {
			v := Verdict{Version: version, Kernel: kernel(), Results: []Result{
				{Backend: redirect.Netlink, Problems: c.netlink},
				{Backend: redirect.Native, Problems: c.native},
				{Backend: redirect.Tools, Problems: c.tools, Untried: c.untried},
			}}
			v.choose()
			check.Equal(t, v.Choice, c.want, "chose")
			check.Equal(t, v.Served("") != nil, c.want == "", "an error for auto")
			check.Equal(t, v.Served(redirect.Native) != nil, len(c.native) == 2, "an error for native")
			if c.untried != "" && (v.Served(redirect.Tools) != nil || !strings.Contains(v.Text(), "iptables  was not tried: no iptables")) {
				t.Errorf("tools: %v, text %s", v.Served(redirect.Tools), v.Text())
			}
			dir := t.TempDir()
			check.OK(t, v.Record(hostfs.Disk{}, dir))
			if got := Recorded(dir); got.Choice != c.want || (got.Served(redirect.Auto) != nil) != (c.want == "") || got.Text() != v.Text() {
				t.Errorf("recorded %+v", got)
			}
		})
	}
}

func TestVerdict_Invalid(t *testing.T) {
	for _, text := range []string{"no file", "", "{", "[]", `{"version":2,"choice":"iptables"}`, `{"version":1,"choice":"magic"}`, `{"version":1}`, `{"version":1,"kernel":"another","choice":"","results":[{"backend":"netlink"}]}`} {
		dir := t.TempDir()
		if text != "no file" {
			check.OK(t, os.WriteFile(filepath.Join(dir, FileName), []byte(text), 0o600))
		}
		if got := Recorded(dir); len(got.Results) > 0 || got.Choice != "" || got.Served(redirect.Auto) != nil {
			t.Errorf("%s: %+v", text, got)
		}
	}
}
