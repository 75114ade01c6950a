package redirection_test

import (
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
)

// Foreign rules, some of which resemble ours. They must be the same after every change of the mesh's rules.
const (
	// early ones are there before the mesh.
	early = `*filter
:KUBE-FIREWALL - [0:0]
:ISTIO - [0:0]
-A INPUT -i eth9 -j ACCEPT
-A INPUT -p tcp -j DROP
-A FORWARD -i eth9 -o eth8 -j ACCEPT
-A OUTPUT -o eth9 -m comment --comment "it's a \"quoted\" text -j ISTIO_OUTPUT # *nat" -j ACCEPT
-A OUTPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL -p udp -m udp --dport 53 -j ACCEPT
-A KUBE-FIREWALL -i eth9 -j RETURN
-A ISTIO -i eth9 -j ACCEPT
COMMIT
*mangle
:FORWARD DROP [0:0]
:istio-mangle - [0:0]
-A PREROUTING -i eth9 -j ACCEPT
-A PREROUTING -p tcp -m mark --mark 0x539 -j ACCEPT
-A INPUT -i eth9 -j ACCEPT
-A FORWARD -i eth9 -j ACCEPT
-A OUTPUT -o eth9 -j ACCEPT
-A OUTPUT -m comment --comment "-j ISTIO_INBOUND" -j istio-mangle
-A POSTROUTING -o eth9 -j ACCEPT
-A istio-mangle -j MARK --set-xmark 0x539/0xffffffff
COMMIT
*nat
:KUBE-SERVICES - [0:0]
-A PREROUTING -i eth9 -j ACCEPT
-A PREROUTING -m comment --comment "two  spaces, and a colon: [1:2]" -j KUBE-SERVICES
-A INPUT -i eth9 -j ACCEPT
-A OUTPUT -o eth9 -j ACCEPT
-A OUTPUT -j KUBE-SERVICES
-A POSTROUTING -o eth9 -j MASQUERADE
-A KUBE-SERVICES -p tcp -m tcp --dport 9999 -j REDIRECT --to-ports 15001
COMMIT
*raw
-A PREROUTING -i eth9 -j ACCEPT
-A OUTPUT -o eth9 -j ACCEPT
-A OUTPUT -p udp -m udp --dport 5353 -j CT --zone 2
COMMIT
`
	// late ones came after it.
	late = `*filter
-A INPUT -i eth9 -j RETURN
-A OUTPUT -o eth9 -j RETURN
COMMIT
*mangle
-A PREROUTING -m conntrack --ctstate INVALID -j DROP
-A PREROUTING -i eth9 -j RETURN
-A OUTPUT -o eth9 -j RETURN
COMMIT
*nat
-A PREROUTING -p udp -m udp --dport 53 -j REDIRECT --to-ports 15053
-A PREROUTING -i eth9 -j RETURN
-A OUTPUT -p tcp -m tcp --dport 9998 -j REDIRECT --to-ports 15001
-A OUTPUT -o eth9 -j RETURN
COMMIT
*raw
-A PREROUTING -p udp -m udp --sport 53 -j CT --zone 7
-A OUTPUT -p udp -m udp --dport 53 -j CT --notrack
COMMIT
`
)

// plant adds rules to both families.
func (p pod) plant(tb testing.TB, v iptables.Variant, text string) {
	tb.Helper()
	for _, f := range families {
		p.restore(tb, v, f, text)
	}
}

// foreign returns a saved text without the lines of the wanted Sets and without the chains of the mesh.
func foreign(saved string, wanted ...ruleset.Set) string {
	ours := map[string]bool{}
	for _, s := range wanted {
		for line := range strings.Lines(s.String()) {
			ours[line] = strings.HasPrefix(line, "-A")
		}
	}
	var b strings.Builder
	for line := range strings.Lines(saved) {
		inChain := strings.HasPrefix(line, ":ISTIO_") || strings.HasPrefix(line, "-A ISTIO_")
		if !ours[line] && !inChain {
			b.WriteString(line)
		}
	}
	return b.String()
}
