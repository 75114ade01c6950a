package nftables

import (
	"errors"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/native"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
	"github.com/meshcni/istio-cni/internal/node/nftables/xtables"
)

// TestRefusal_MissingKernelOptions makes the kernel refuse the expression of each match and target that rules of the mesh
// use, like a kernel built without it. No test kernel lacks any of them.
func TestRefusal_MissingKernelOptions(t *testing.T) {
	compat, plain := ruleset.IPTables, ruleset.NFT
	for _, tt := range []struct {
		expression, option string
		rule               ruleset.Rule
	}{
		{"match\x00", "CONFIG_NETFILTER_XT_MATCH_OWNER (xt_owner) and CONFIG_NFT_COMPAT (nft_compat)", compat("", ruleset.Return, ruleset.Owner{ID: 5})},
		{"match\x00", "CONFIG_NETFILTER_XT_MATCH_MULTIPORT (xt_multiport)", compat("", ruleset.Return, ruleset.AnyPort{Protocol: ruleset.TCP, List: ruleset.PortList(0, 0)})},
		{"match\x00", "CONFIG_NETFILTER_XT_CONNMARK (xt_connmark)", compat("", ruleset.Return, ruleset.Mark{Value: 5, Connection: true})},
		{"match\x00", "CONFIG_NETFILTER_XT_MATCH_CONNTRACK (xt_conntrack)", compat("", ruleset.Return, ruleset.StateNew)},
		{"target\x00", "CONFIG_NETFILTER_XT_TARGET_REDIRECT (xt_REDIRECT)", compat("", ruleset.RedirectTo(5))},
		{"target\x00", "CONFIG_NETFILTER_XT_MARK (xt_mark)", compat("", ruleset.SetMark{Value: 1})},
		{"target\x00", "CONFIG_NETFILTER_XT_CONNMARK (xt_connmark)", compat("", ruleset.CopyMark{})},
		{"target\x00", "CONFIG_NETFILTER_XT_TARGET_TPROXY (xt_TPROXY)", compat("", ruleset.TProxy{Family: ruleset.IPv6, Port: 5})},
		{"target\x00", "CONFIG_NETFILTER_XT_TARGET_CT (xt_CT)", compat("", ruleset.Zone(1))},
		{"target\x00", "CONFIG_IP6_NF_TARGET_REJECT (ip6t_REJECT)", compat("", ruleset.TCPReset)},
		{"ct\x00", "CONFIG_NFT_CT (nft_ct)", plain("", ruleset.Drop, ruleset.StateInvalid)},
		{"redir\x00", "CONFIG_NFT_REDIR (nft_redir)", plain("", ruleset.RedirectTo(5))},
		{"tproxy\x00", "CONFIG_NFT_TPROXY (nft_tproxy)", plain("", ruleset.TProxy{Port: 5})},
		{"reject\x00", "CONFIG_NFT_REJECT_INET (nft_reject_inet)", plain("", ruleset.TCPReset)},
	} {
		var b nfnetlink.Buffer
		text := tt.rule.String()
		var encoded error
		if strings.HasPrefix(text, "-") {
			encoded = xtables.Encode(&b, ruleset.IPv6, tt.rule)
		} else {
			encoded = native.Encode(&b, tt.rule, 1)
		}
		data, err := b.Bytes()
		if err = errors.Join(encoded, err); err != nil {
			t.Fatal(err)
		}
		w := &writer{notes: []note{{}, {tableKey{ruleset.IPv6, "mangle"}, "CHAIN", text}}}
		at := strings.Index(string(data), tt.expression)
		err = w.explain(&nfnetlink.Refused{Message: 1, Attributes: data, Offset: at, Cause: unix.ENOENT})
		for _, want := range []string{"IPv6, table mangle, chain CHAIN, rule \"" + text + "\"", tt.option} {
			if !errors.Is(err, ErrUnsupported) || !errors.Is(err, unix.ENOENT) || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: error %q, want %q in it", text, err, want)
			}
		}
	}
}

func TestRefusal_Hints(t *testing.T) {
	w := &writer{notes: []note{{tableKey{ruleset.IPv6, "nat"}, "OUTPUT", ""}}}
	tests := []struct {
		cause       error
		message     int
		want        string
		unsupported bool
	}{
		{unix.ENOENT, 0, "CONFIG_NFT_NAT (nft_chain_nat)", true},
		{unix.EAFNOSUPPORT, 0, "CONFIG_NF_TABLES_IPV6", true},
		{unix.EBUSY, 0, "a foreign rule jumps to this chain", false},
		{unix.EPERM, -1, "this needs CAP_NET_ADMIN in the namespace", false},
		{unix.EINVAL, 0, "IPv6, table nat, chain OUTPUT: invalid argument", false},
	}
	for _, tt := range tests {
		err := w.explain(&nfnetlink.Refused{Message: tt.message, Offset: -1, Cause: tt.cause})
		if !strings.Contains(err.Error(), tt.want) || errors.Is(err, ErrUnsupported) != tt.unsupported {
			t.Errorf("error %q, want %q in it", err, tt.want)
		}
	}
}

// TestApply_WithoutCapabilities drops all capabilities of a thread. The thread ends with the goroutine.
func TestApply_WithoutCapabilities(t *testing.T) {
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		none := [2]unix.CapUserData{}
		if err := unix.Capset(&header, &none[0]); err != nil {
			result <- err
			return
		}
		_, err := Generation()
		result <- err
	}()
	err := <-result
	if !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "CAP_NET_ADMIN") {
		t.Errorf("error %v", err)
	}
}
