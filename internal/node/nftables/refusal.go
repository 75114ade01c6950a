package nftables

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// explain turns the kernel's refusal into an error that names the refused object, the cause and a remedy.
func (w *writer) explain(r *nfnetlink.Refused) error {
	if r.Message < 0 {
		return fmt.Errorf("writing rules: %w%s", r.Cause, hintForErrno(r.Cause))
	}
	n := w.notes[r.Message]
	e := expressionAt(r)
	text := "writing rules: " + n.String()
	if e != "" {
		text += ", " + e
	}
	if missing := missingPart(n, e, r.Cause); missing != "" {
		return fmt.Errorf("%s: %w: %s [%w]", text, ErrUnsupported, missing, r.Cause)
	}
	return fmt.Errorf("%s: %w%s", text, r.Cause, hint(n, e, r.Cause))
}

// expressionAt names the expression of a rule that has the wrong attribute: "match owner", "target CT", "immediate".
func expressionAt(r *nfnetlink.Refused) string {
	all, offset := attributeAt(r.Attributes, r.Offset)
	if all.Kind != unix.NFTA_RULE_EXPRESSIONS {
		return ""
	}
	e, _ := attributeAt(all.Value, offset)
	parts := nfnetlink.Attributes(e.Value)
	name := parts.Get(unix.NFTA_EXPR_NAME).Text()
	if name == "match" || name == "target" { // NFTA_TARGET_NAME has the same number as NFTA_MATCH_NAME
		name += " " + nfnetlink.Attributes(parts.Get(unix.NFTA_EXPR_DATA).Value).Get(unix.NFTA_MATCH_NAME).Text()
	}
	return name
}

// attributeAt returns the attribute at an offset, and the offset within its value. An unknown offset is negative.
func attributeAt(all nfnetlink.Attributes, offset int) (nfnetlink.Attribute, int) {
	at := 0
	for a := range all.All() {
		end := at + (unix.SizeofNlAttr+len(a.Value)+unix.NLA_ALIGNTO-1)&^(unix.NLA_ALIGNTO-1)
		if offset >= at && offset < end {
			return a, offset - at - unix.SizeofNlAttr
		}
		at = end
	}
	return nfnetlink.Attribute{}, -1
}

// viaCompat is the option that every match and target of x_tables needs besides its own.
const viaCompat = " and CONFIG_NFT_COMPAT (nft_compat)"

// parts has the kernel's options and modules for each match, target and expression.
var parts = map[string]string{ //nolint:gochecknoglobals // a constant table
	"match tcp":       "CONFIG_NETFILTER_XTABLES (x_tables)" + viaCompat,
	"match udp":       "CONFIG_NETFILTER_XTABLES (x_tables)" + viaCompat,
	"match multiport": "CONFIG_NETFILTER_XT_MATCH_MULTIPORT (xt_multiport)" + viaCompat,
	"match owner":     "CONFIG_NETFILTER_XT_MATCH_OWNER (xt_owner)" + viaCompat,
	"match connmark":  "CONFIG_NETFILTER_XT_CONNMARK (xt_connmark)" + viaCompat,
	"match conntrack": "CONFIG_NETFILTER_XT_MATCH_CONNTRACK (xt_conntrack)" + viaCompat,
	"target REDIRECT": "CONFIG_NETFILTER_XT_TARGET_REDIRECT (xt_REDIRECT)" + viaCompat,
	"target MARK":     "CONFIG_NETFILTER_XT_MARK (xt_mark)" + viaCompat,
	"target CONNMARK": "CONFIG_NETFILTER_XT_CONNMARK (xt_connmark) of kernel 4.17 or later" + viaCompat,
	"target TPROXY":   "CONFIG_NETFILTER_XT_TARGET_TPROXY (xt_TPROXY)" + viaCompat,
	"target CT":       "CONFIG_NETFILTER_XT_TARGET_CT (xt_CT)" + viaCompat,
	"target REJECT":   "CONFIG_IP_NF_TARGET_REJECT (ipt_REJECT), CONFIG_IP6_NF_TARGET_REJECT (ip6t_REJECT)" + viaCompat,

	"ct":     "CONFIG_NFT_CT (nft_ct)",
	"redir":  "CONFIG_NFT_REDIR (nft_redir)",
	"tproxy": "CONFIG_NFT_TPROXY (nft_tproxy)",
	"reject": "CONFIG_NFT_REJECT_INET (nft_reject_inet)",
}

// missingPart names the missing option of the kernel, "" if the refusal has another cause.
func missingPart(n note, expression string, cause error) string {
	lacks := errors.Is(cause, unix.ENOENT) || errors.Is(cause, unix.EOPNOTSUPP) || errors.Is(cause, unix.EPROTONOSUPPORT)
	option, known := parts[expression]
	switch {
	case errors.Is(cause, unix.EAFNOSUPPORT):
		option = map[ruleset.Family]string{
			ruleset.IPv4: "CONFIG_NF_TABLES_IPV4", ruleset.IPv6: "CONFIG_NF_TABLES_IPV6", ruleset.Inet: "CONFIG_NF_TABLES_INET",
		}[n.family]
		return fmt.Sprintf("the kernel has no nf_tables for %s: it needs %s", n.family, option)
	case lacks && known:
		return "the kernel needs " + option
	case lacks && n.rule == "" && n.chain != "" && strings.HasSuffix(n.table, "nat"):
		return "the kernel needs CONFIG_NFT_NAT (nft_chain_nat)"
	}
	return ""
}

func hint(n note, expression string, cause error) string {
	switch {
	case errors.Is(cause, unix.ENOENT) && expression == "immediate":
		return "; the chain it leads to does not exist"
	case errors.Is(cause, unix.EINVAL) && expression == "match owner":
		return "; in a pod with hostUsers: false the kernel refuses rules that match the owner of traffic; use the " +
			"backend native, which auto selects there"
	case errors.Is(cause, unix.EBUSY) && n.chain != "" && n.rule == "":
		return "; a foreign rule jumps to this chain"
	}
	return hintForErrno(cause)
}

func hintForErrno(cause error) string {
	if errors.Is(cause, unix.EPERM) {
		return "; this needs CAP_NET_ADMIN in the namespace"
	}
	return ""
}
