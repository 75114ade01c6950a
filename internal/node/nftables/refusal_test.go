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

// TestWhatTheKernelLacksIsNamed lets the kernel refuse the expression of each match and target that rules of the mesh use,
// as one does that was built without it. No kernel for tests lacks any.
func TestWhatTheKernelLacksIsNamed(t *testing.T) {
	tests := []struct{ spec, expression, option string }{
		{"-m owner --uid-owner 5 -j RETURN", "match\x00", "CONFIG_NETFILTER_XT_MATCH_OWNER (xt_owner) and CONFIG_NFT_COMPAT (nft_compat)"},
		{"-p tcp -m multiport --dports 5 -j RETURN", "match\x00", "CONFIG_NETFILTER_XT_MATCH_MULTIPORT (xt_multiport)"},
		{"-p tcp -m connmark --mark 0x5 -j RETURN", "match\x00", "CONFIG_NETFILTER_XT_CONNMARK (xt_connmark)"},
		{"-m conntrack --ctstate NEW -j RETURN", "match\x00", "CONFIG_NETFILTER_XT_MATCH_CONNTRACK (xt_conntrack)"},
		{"-p tcp -j REDIRECT --to-ports 5", "target\x00", "CONFIG_NETFILTER_XT_TARGET_REDIRECT (xt_REDIRECT)"},
		{"-j MARK --set-xmark 0x1/0x1", "target\x00", "CONFIG_NETFILTER_XT_MARK (xt_mark)"},
		{"-p tcp -j CONNMARK --save-mark --nfmask 0x1 --ctmask 0x1", "target\x00", "CONFIG_NETFILTER_XT_CONNMARK (xt_connmark)"},
		{"-p tcp -j TPROXY --on-port 5 --on-ip :: --tproxy-mark 0x1/0x1", "target\x00", "CONFIG_NETFILTER_XT_TARGET_TPROXY (xt_TPROXY)"},
		{"-j CT --zone 1", "target\x00", "CONFIG_NETFILTER_XT_TARGET_CT (xt_CT)"},
		{"-j REJECT --reject-with tcp-reset", "target\x00", "CONFIG_IP6_NF_TARGET_REJECT (ip6t_REJECT)"},
	}
	for _, tt := range tests {
		var b nfnetlink.Buffer
		if err := xtables.Encode(&b, ruleset.IPv6, tt.spec); err != nil {
			t.Fatal(err)
		}
		data, err := b.Bytes()
		if err != nil {
			t.Fatal(err)
		}
		w := &writer{notes: []note{{}, {place{ruleset.IPv6, "mangle"}, "CHAIN", tt.spec}}}
		at := strings.Index(string(data), tt.expression)
		err = w.explain(&nfnetlink.Refused{Message: 1, Attributes: data, Offset: at, Cause: unix.ENOENT})
		for _, want := range []string{"IPv6, table mangle, chain CHAIN, rule \"" + tt.spec + "\"", tt.option} {
			if !errors.Is(err, ErrUnsupported) || !errors.Is(err, unix.ENOENT) || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: error %q, want %q in it", tt.spec, err, want)
			}
		}
	}
}

// TestWhatTheKernelLacksForNativeTablesIsNamed does the same for expressions of nf_tables itself.
func TestWhatTheKernelLacksForNativeTablesIsNamed(t *testing.T) {
	tests := []struct{ spec, expression, option string }{
		{"ct state invalid counter drop", "ct\x00", "CONFIG_NFT_CT (nft_ct)"},
		{"meta l4proto tcp counter redirect to :5", "redir\x00", "CONFIG_NFT_REDIR (nft_redir)"},
		{"meta l4proto tcp tproxy ip to :5", "tproxy\x00", "CONFIG_NFT_TPROXY (nft_tproxy)"},
		{"meta l4proto tcp counter reject with tcp reset", "reject\x00", "CONFIG_NFT_REJECT_INET (nft_reject_inet)"},
	}
	for _, tt := range tests {
		r, err := native.Parse(tt.spec, 1)
		if err != nil {
			t.Fatal(err)
		}
		var b nfnetlink.Buffer
		r.Encode(&b)
		data, err := b.Bytes()
		if err != nil {
			t.Fatal(err)
		}
		w := &writer{notes: []note{{place{native.Inet, native.NAT}, "chain", tt.spec}}}
		at := strings.Index(string(data), tt.expression)
		err = w.explain(&nfnetlink.Refused{Attributes: data, Offset: at, Cause: unix.ENOENT})
		if !errors.Is(err, ErrUnsupported) || !strings.Contains(err.Error(), tt.option) {
			t.Errorf("%s: error %q, want %q in it", tt.spec, err, tt.option)
		}
	}
}

func TestOtherRefusalsSayWhatMayHelp(t *testing.T) {
	w := &writer{notes: []note{{place{ruleset.IPv6, "nat"}, "OUTPUT", ""}}}
	tests := []struct {
		cause       error
		message     int
		want        string
		unsupported bool
	}{
		{unix.ENOENT, 0, "CONFIG_NFT_NAT (nft_chain_nat)", true},
		{unix.EAFNOSUPPORT, 0, "CONFIG_NF_TABLES_IPV6", true},
		{unix.EBUSY, 0, "a rule of somebody else leads to this chain", false},
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

// TestWithoutTheRightTo drops all capabilities of a thread, which ends with it.
func TestWithoutTheRightTo(t *testing.T) {
	result := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		none := [2]unix.CapUserData{}
		if err := unix.Capset(&header, &none[0]); err != nil {
			result <- err
			return
		}
		result <- Supported()
	}()
	err := <-result
	if !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "CAP_NET_ADMIN") {
		t.Errorf("error %v", err)
	}
}
