package redirection_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/inspect"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
)

// remains are what a known program leaves in a namespace, and takes none of the pod's traffic.
type remains struct {
	program string
	items   []item
}

func byIPTables(name, text string) remains {
	return remains{name, []item{{name, "iptables-nft-restore --noflush", text}}}
}

func byIP6Tables(name, text string) remains {
	return remains{name, []item{{name, "ip6tables-nft-restore --noflush", text}}}
}

func byNFT(name, text string) remains { return remains{name, []item{{name, "nft -f -", text}}} }

// recorded are written by hand after the sets of these programs.
func recorded() []remains {
	all := slices.Concat(recordedIPTables(), recordedNFT())
	for i := range all {
		all[i].program = "program " + all[i].program
		for n := range all[i].items {
			all[i].items[n].kind = all[i].program
		}
	}
	return all
}

func recordedIPTables() []remains {
	return []remains{
		byIPTables("docker", `*raw
-A PREROUTING -d 172.17.0.2/32 ! -i docker0 -j DROP
COMMIT
*nat
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER
-A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-A DOCKER -i docker0 -j RETURN
-A DOCKER ! -i docker0 -p tcp -m tcp --dport 18081 -j DNAT --to-destination 172.17.0.2:80
COMMIT
*filter
:FORWARD DROP [0:0]
:DOCKER - [0:0]
:DOCKER-BRIDGE - [0:0]
:DOCKER-CT - [0:0]
:DOCKER-FORWARD - [0:0]
:DOCKER-USER - [0:0]
-A FORWARD -j DOCKER-USER
-A FORWARD -j DOCKER-FORWARD
-A DOCKER -d 172.17.0.2/32 ! -i docker0 -o docker0 -p tcp -m tcp --dport 80 -j ACCEPT
-A DOCKER ! -i docker0 -o docker0 -j DROP
-A DOCKER-BRIDGE -o docker0 -j DOCKER
-A DOCKER-CT -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A DOCKER-FORWARD -j DOCKER-CT
-A DOCKER-FORWARD -j DOCKER-BRIDGE
-A DOCKER-FORWARD -i docker0 -j ACCEPT
-A DOCKER-USER -j RETURN
COMMIT
`),
		byIPTables("docker's resolver", `*nat
:DOCKER_OUTPUT - [0:0]
:DOCKER_POSTROUTING - [0:0]
-A OUTPUT -d 127.0.0.11/32 -j DOCKER_OUTPUT
-A POSTROUTING -d 127.0.0.11/32 -j DOCKER_POSTROUTING
-A DOCKER_OUTPUT -d 127.0.0.11/32 -p tcp -m tcp --dport 53 -j DNAT --to-destination 127.0.0.11:41234
-A DOCKER_OUTPUT -d 127.0.0.11/32 -p udp -m udp --dport 53 -j DNAT --to-destination 127.0.0.11:41235
-A DOCKER_POSTROUTING -s 127.0.0.11/32 -p tcp -m tcp --sport 41234 -j SNAT --to-source :53
-A DOCKER_POSTROUTING -s 127.0.0.11/32 -p udp -m udp --sport 41235 -j SNAT --to-source :53
COMMIT
`),
		byIPTables("kube-proxy", `*nat
:KUBE-MARK-MASQ - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SEP-AAAAAAAAAAAAAAAA - [0:0]
:KUBE-SEP-BBBBBBBBBBBBBBBB - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-NPX46M4PTMTKRN6Y - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-NODEPORTS -p tcp -m comment --comment "default/web" -m tcp --dport 31080 -j KUBE-SVC-NPX46M4PTMTKRN6Y
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
-A KUBE-SEP-AAAAAAAAAAAAAAAA -s 10.244.0.3/32 -m comment --comment "default/web" -j KUBE-MARK-MASQ
-A KUBE-SEP-AAAAAAAAAAAAAAAA -p tcp -m comment --comment "default/web" -m tcp -j DNAT --to-destination 10.244.0.3:8080
-A KUBE-SEP-BBBBBBBBBBBBBBBB -p tcp -m comment --comment "default/web" -m tcp -j DNAT --to-destination 10.244.0.4:8080
-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -m comment --comment "default/web cluster IP" -m tcp --dport 443 -j KUBE-SVC-NPX46M4PTMTKRN6Y
-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
-A KUBE-SVC-NPX46M4PTMTKRN6Y ! -s 10.244.0.0/16 -d 10.96.0.1/32 -p tcp -m comment --comment "default/web cluster IP" -m tcp --dport 443 -j KUBE-MARK-MASQ
-A KUBE-SVC-NPX46M4PTMTKRN6Y -m comment --comment "default/web -> 10.244.0.3:8080" -m statistic --mode random --probability 0.50000000000 -j KUBE-SEP-AAAAAAAAAAAAAAAA
-A KUBE-SVC-NPX46M4PTMTKRN6Y -m comment --comment "default/web -> 10.244.0.4:8080" -j KUBE-SEP-BBBBBBBBBBBBBBBB
COMMIT
*filter
:KUBE-EXTERNAL-SERVICES - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SERVICES - [0:0]
-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes load balancer firewall" -j KUBE-PROXY-FIREWALL
-A INPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes externally-visible service portals" -j KUBE-EXTERNAL-SERVICES
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A OUTPUT -m conntrack --ctstate NEW -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A KUBE-SERVICES -d 10.96.0.9/32 -p tcp -m comment --comment "default/none has no endpoints" -m tcp --dport 80 -j REJECT --reject-with icmp-port-unreachable
COMMIT
`),
		byIPTables("KUBE-FIREWALL", `*filter
:KUBE-FIREWALL - [0:0]
-A INPUT -j KUBE-FIREWALL
-A OUTPUT -j KUBE-FIREWALL
-A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m comment --comment "block incoming localnet connections" -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP
COMMIT
*mangle
:KUBE-IPTABLES-HINT - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-PROXY-CANARY - [0:0]
COMMIT
`),
		byIPTables("Calico", `*raw
:cali-OUTPUT - [0:0]
:cali-PREROUTING - [0:0]
:cali-from-host-endpoint - [0:0]
:cali-rpf-skip - [0:0]
:cali-to-host-endpoint - [0:0]
-A PREROUTING -m comment --comment "cali:6gwbT8clXdHdC1b1" -j cali-PREROUTING
-A OUTPUT -m comment --comment "cali:tVnHkvAo15HuiPy0" -j cali-OUTPUT
-A cali-OUTPUT -m comment --comment "cali:njdnLwYeGqBJyMxW" -j MARK --set-xmark 0x0/0xf0000
-A cali-OUTPUT -m comment --comment "cali:rz86uTUcEZAfFsh7" -j cali-to-host-endpoint
-A cali-OUTPUT -m comment --comment "cali:pN0F5zD0b8yf9W1Z" -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-PREROUTING -m comment --comment "cali:XFX5xbM8B9qR10JG" -j MARK --set-xmark 0x0/0xf0000
-A cali-PREROUTING -i cali+ -m comment --comment "cali:EWMPb0zVROM-woQp" -j MARK --set-xmark 0x40000/0x40000
-A cali-PREROUTING -m comment --comment "cali:PWuxTAIaFCtsg5Qa" -m mark --mark 0x40000/0x40000 -j cali-rpf-skip
-A cali-PREROUTING -m comment --comment "cali:fSSbGND7dgyemWU7" -m mark --mark 0x40000/0x40000 -m rpfilter --validmark --invert -j DROP
-A cali-PREROUTING -m comment --comment "cali:ImU0-4Rl2WoOI9Ou" -m mark --mark 0x0/0x40000 -j cali-from-host-endpoint
-A cali-PREROUTING -m comment --comment "cali:lV4V2MPoMBf0hl9T" -m mark --mark 0x10000/0x10000 -j ACCEPT
COMMIT
*mangle
:cali-POSTROUTING - [0:0]
:cali-PREROUTING - [0:0]
:cali-from-host-endpoint - [0:0]
:cali-to-host-endpoint - [0:0]
-A PREROUTING -m comment --comment "cali:6gwbT8clXdHdC1b1" -j cali-PREROUTING
-A POSTROUTING -m comment --comment "cali:O3lYWMrLQYEMJtB5" -j cali-POSTROUTING
-A cali-POSTROUTING -m comment --comment "cali:NX-7roTexQ3fGRfU" -m mark --mark 0x10000/0x10000 -j RETURN
-A cali-POSTROUTING -m comment --comment "cali:qaajsWArU1ku9saf" -m mark ! --mark 0x0/0xf0000 -j RETURN
-A cali-POSTROUTING -m comment --comment "cali:nnqPh8lh2VOogSzX" -j MARK --set-xmark 0x0/0xf0000
-A cali-POSTROUTING -m comment --comment "cali:nquN8Jw8Tz72pcBW" -m conntrack --ctstate DNAT -j cali-to-host-endpoint
-A cali-PREROUTING -m comment --comment "cali:6BJqBjBC7crtA-7-" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A cali-PREROUTING -m comment --comment "cali:KX7AGNd6rMcDUai6" -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-PREROUTING -m comment --comment "cali:wNH7KsA3ILKJBsY9" -j cali-from-host-endpoint
-A cali-PREROUTING -m comment --comment "cali:Cg96MgVuoPm7UMRo" -m comment --comment "Host endpoint policy accepted packet." -m mark --mark 0x10000/0x10000 -j ACCEPT
COMMIT
*nat
:cali-OUTPUT - [0:0]
:cali-POSTROUTING - [0:0]
:cali-PREROUTING - [0:0]
:cali-fip-dnat - [0:0]
:cali-fip-snat - [0:0]
:cali-nat-outgoing - [0:0]
-A PREROUTING -m comment --comment "cali:6gwbT8clXdHdC1b1" -j cali-PREROUTING
-A OUTPUT -m comment --comment "cali:tVnHkvAo15HuiPy0" -j cali-OUTPUT
-A POSTROUTING -m comment --comment "cali:O3lYWMrLQYEMJtB5" -j cali-POSTROUTING
-A cali-OUTPUT -m comment --comment "cali:GBTAv2p5CwevEyJm" -j cali-fip-dnat
-A cali-POSTROUTING -m comment --comment "cali:Z-c7XtVd2Bq7s_hA" -j cali-fip-snat
-A cali-POSTROUTING -m comment --comment "cali:nYKhEzDlr11Jccal" -j cali-nat-outgoing
-A cali-PREROUTING -m comment --comment "cali:r6XmIziWUJsdOK6Z" -j cali-fip-dnat
-A cali-nat-outgoing -m comment --comment "cali:flqWnvo8yq4ULQLa" -m set --match-set lack4 src -m set ! --match-set have4 dst -j MASQUERADE --random-fully
COMMIT
*filter
:cali-INPUT - [0:0]
:cali-OUTPUT - [0:0]
:cali-from-host-endpoint - [0:0]
:cali-to-host-endpoint - [0:0]
:cali-wl-to-host - [0:0]
-A INPUT -m comment --comment "cali:Cz_u1IQiXIMmKD4c" -j cali-INPUT
-A OUTPUT -m comment --comment "cali:tVnHkvAo15HuiPy0" -j cali-OUTPUT
-A cali-INPUT -p udp -m comment --comment "cali:w7ud0UgQSEi_zKuQ" -m comment --comment "Allow IPv4 VXLAN packets from allowed hosts" -m multiport --dports 4789 -m set --match-set lack4 src -m addrtype --dst-type LOCAL -j ACCEPT
-A cali-INPUT -p udp -m comment --comment "cali:4cgmbdWsLmozYhJh" -m comment --comment "Drop IPv4 VXLAN packets from non-allowed hosts" -m multiport --dports 4789 -m addrtype --dst-type LOCAL -j DROP
-A cali-INPUT -i cali+ -m comment --comment "cali:i7okJZpS8VxaJB3n" -g cali-wl-to-host
-A cali-INPUT -m comment --comment "cali:6tP1qUmPFbbALVnU" -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-INPUT -m comment --comment "cali:CkkpBz5hyP1qEC4N" -j MARK --set-xmark 0x0/0xf0000
-A cali-INPUT -m comment --comment "cali:yGlzQxNlCxgGPDbF" -j cali-from-host-endpoint
-A cali-INPUT -m comment --comment "cali:VJ5LZqUlGhgSsT3u" -m comment --comment "Host endpoint policy accepted packet." -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-OUTPUT -m comment --comment "cali:Mq1_rAdXXH3YkrzW" -m mark --mark 0x10000/0x10000 -j ACCEPT
-A cali-OUTPUT -o cali+ -m comment --comment "cali:69FkRTJDvD5Vu6Vl" -j RETURN
-A cali-OUTPUT -m comment --comment "cali:Fskumj4SGQtDV6GC" -j MARK --set-xmark 0x0/0xf0000
-A cali-OUTPUT -m comment --comment "cali:1F4VWEsQu0QbRwKf" -m conntrack ! --ctstate DNAT -j cali-to-host-endpoint
-A cali-wl-to-host -m comment --comment "cali:nSZbcOoG1xPONxb8" -m comment --comment "Configured DefaultEndpointToHostAction" -j DROP
COMMIT
`),
		byIPTables("Cilium", `*raw
:CILIUM_OUTPUT_raw - [0:0]
:CILIUM_PRE_raw - [0:0]
-A PREROUTING -m comment --comment "cilium-feeder: CILIUM_PRE_raw" -j CILIUM_PRE_raw
-A OUTPUT -m comment --comment "cilium-feeder: CILIUM_OUTPUT_raw" -j CILIUM_OUTPUT_raw
-A CILIUM_OUTPUT_raw -o lxc+ -m mark --mark 0xa00/0xfffffeff -m comment --comment "cilium: NOTRACK for proxy return traffic" -j CT --notrack
-A CILIUM_OUTPUT_raw -o cilium_host -m mark --mark 0xa00/0xfffffeff -m comment --comment "cilium: NOTRACK for proxy return traffic" -j CT --notrack
-A CILIUM_OUTPUT_raw -m mark --mark 0x800/0xe00 -m comment --comment "cilium: NOTRACK for L7 proxy upstream traffic" -j CT --notrack
-A CILIUM_PRE_raw -m mark --mark 0x200/0xf00 -m comment --comment "cilium: NOTRACK for proxy traffic" -j CT --notrack
COMMIT
*mangle
:CILIUM_POST_mangle - [0:0]
:CILIUM_PRE_mangle - [0:0]
-A PREROUTING -m comment --comment "cilium-feeder: CILIUM_PRE_mangle" -j CILIUM_PRE_mangle
-A POSTROUTING -m comment --comment "cilium-feeder: CILIUM_POST_mangle" -j CILIUM_POST_mangle
-A CILIUM_PRE_mangle ! -o lo -m socket --transparent -m mark ! --mark 0xe00/0xf00 -m mark ! --mark 0x800/0xf00 -m comment --comment "cilium: any->pod redirect proxied traffic to host proxy" -j MARK --set-xmark 0x200/0xffffffff
-A CILIUM_PRE_mangle -p tcp -m mark --mark 0x3d8d0200 -m comment --comment "cilium: TPROXY to host cilium-dns-egress proxy" -j TPROXY --on-port 36157 --on-ip 127.0.0.1 --tproxy-mark 0x200/0xffffffff
COMMIT
*nat
:CILIUM_OUTPUT_nat - [0:0]
:CILIUM_POST_nat - [0:0]
:CILIUM_PRE_nat - [0:0]
-A PREROUTING -m comment --comment "cilium-feeder: CILIUM_PRE_nat" -j CILIUM_PRE_nat
-A OUTPUT -m comment --comment "cilium-feeder: CILIUM_OUTPUT_nat" -j CILIUM_OUTPUT_nat
-A POSTROUTING -m comment --comment "cilium-feeder: CILIUM_POST_nat" -j CILIUM_POST_nat
-A CILIUM_POST_nat -s 10.244.0.0/24 ! -d 10.244.0.0/24 ! -o cilium_+ -m comment --comment "cilium masquerade non-cluster" -j MASQUERADE
-A CILIUM_POST_nat -m mark --mark 0xa00/0xe00 -m comment --comment "exclude proxy return traffic from masquerade" -j ACCEPT
COMMIT
*filter
:CILIUM_INPUT - [0:0]
:CILIUM_OUTPUT - [0:0]
-A INPUT -m comment --comment "cilium-feeder: CILIUM_INPUT" -j CILIUM_INPUT
-A OUTPUT -m comment --comment "cilium-feeder: CILIUM_OUTPUT" -j CILIUM_OUTPUT
-A CILIUM_INPUT -m mark --mark 0x200/0xf00 -m comment --comment "cilium: ACCEPT for proxy traffic" -j ACCEPT
-A CILIUM_OUTPUT -m mark --mark 0xa00/0xe00 -m comment --comment "cilium: ACCEPT for proxy traffic" -j ACCEPT
-A CILIUM_OUTPUT -m mark ! --mark 0xe00/0xf00 -m mark ! --mark 0xd00/0xf00 -m mark ! --mark 0x400/0xf00 -m mark ! --mark 0xa00/0xe00 -m mark ! --mark 0x800/0xe00 -m mark ! --mark 0xf00/0xf00 -m comment --comment "cilium: host->any mark as from host" -j MARK --set-xmark 0xc00/0xf00
COMMIT
`),
		byIPTables("AWS VPC CNI", `*mangle
-A PREROUTING -i eth0 -m comment --comment "AWS, primary ENI" -m addrtype --dst-type LOCAL --limit-iface-in -j CONNMARK --set-xmark 0x80/0x80
-A PREROUTING -i eni+ -m comment --comment "AWS, primary ENI" -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80
COMMIT
*nat
:AWS-CONNMARK-CHAIN-0 - [0:0]
:AWS-SNAT-CHAIN-0 - [0:0]
-A PREROUTING -i eni+ -m comment --comment "AWS, outbound connections" -j AWS-CONNMARK-CHAIN-0
-A PREROUTING -m comment --comment "AWS, CONNMARK" -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80
-A POSTROUTING -m comment --comment "AWS SNAT CHAIN" -j AWS-SNAT-CHAIN-0
-A AWS-CONNMARK-CHAIN-0 -d 10.0.0.0/8 -m comment --comment "AWS CONNMARK CHAIN, VPC CIDR" -j RETURN
-A AWS-CONNMARK-CHAIN-0 -m comment --comment "AWS, CONNMARK" -j CONNMARK --set-xmark 0x80/0x80
-A AWS-SNAT-CHAIN-0 -d 10.0.0.0/8 -m comment --comment "AWS SNAT CHAIN" -j RETURN
-A AWS-SNAT-CHAIN-0 ! -o vlan+ -m comment --comment "AWS, SNAT" -m addrtype ! --dst-type LOCAL -j SNAT --to-source 10.1.0.2 --random-fully
COMMIT
`),
		byIPTables("NodeLocal DNSCache", `*raw
-A PREROUTING -d 169.254.20.10/32 -p udp -m udp --dport 53 -m comment --comment "NodeLocal DNS Cache: skip conntrack" -j CT --notrack
-A PREROUTING -d 169.254.20.10/32 -p tcp -m tcp --dport 53 -m comment --comment "NodeLocal DNS Cache: skip conntrack" -j CT --notrack
-A OUTPUT -s 169.254.20.10/32 -p udp -m udp --sport 53 -m comment --comment "NodeLocal DNS Cache: skip conntrack" -j CT --notrack
-A OUTPUT -s 169.254.20.10/32 -p tcp -m tcp --sport 53 -m comment --comment "NodeLocal DNS Cache: skip conntrack" -j CT --notrack
-A OUTPUT -d 169.254.20.10/32 -p udp -m udp --dport 53 -m comment --comment "NodeLocal DNS Cache: skip conntrack" -j CT --notrack
-A OUTPUT -d 169.254.20.10/32 -p tcp -m tcp --dport 53 -m comment --comment "NodeLocal DNS Cache: skip conntrack" -j CT --notrack
-A OUTPUT -d 169.254.20.10/32 -p tcp -m tcp --dport 8080 -m comment --comment "NodeLocal DNS Cache: skip conntrack" -j CT --notrack
COMMIT
*filter
-A INPUT -d 169.254.20.10/32 -p udp -m udp --dport 53 -m comment --comment "NodeLocal DNS Cache: allow DNS traffic" -j ACCEPT
-A OUTPUT -s 169.254.20.10/32 -p udp -m udp --sport 53 -m comment --comment "NodeLocal DNS Cache: allow DNS traffic" -j ACCEPT
COMMIT
`),
		byIPTables("tailscale", `*filter
:ts-forward - [0:0]
:ts-input - [0:0]
-A INPUT -j ts-input
-A FORWARD -j ts-forward
-A ts-forward -i tailscale0 -j MARK --set-xmark 0x40000/0xff0000
-A ts-forward -m mark --mark 0x40000/0xff0000 -j ACCEPT
-A ts-forward -s 100.64.0.0/10 -o tailscale0 -j DROP
-A ts-forward -o tailscale0 -j ACCEPT
-A ts-input -s 100.101.102.103/32 -i lo -j ACCEPT
-A ts-input -s 100.115.92.0/23 ! -i tailscale0 -j RETURN
-A ts-input -s 100.64.0.0/10 ! -i tailscale0 -j DROP
-A ts-input -i tailscale0 -j ACCEPT
-A ts-input -p udp -m udp --dport 41641 -j ACCEPT
COMMIT
*nat
:ts-postrouting - [0:0]
-A POSTROUTING -j ts-postrouting
-A ts-postrouting -m mark --mark 0x40000/0xff0000 -j MASQUERADE
COMMIT
`),
		byIPTables("fail2ban", `*filter
:f2b-sshd - [0:0]
:f2b-web - [0:0]
-A INPUT -p tcp -m multiport --dports 22 -j f2b-sshd
-A INPUT -p tcp -m multiport --dports 80,443 -j f2b-web
-A f2b-sshd -s 203.0.113.5/32 -j REJECT --reject-with icmp-port-unreachable
-A f2b-sshd -j RETURN
-A f2b-web -s 203.0.113.7/32 -j REJECT --reject-with icmp-port-unreachable
-A f2b-web -j RETURN
COMMIT
`),
		byIPTables("GKE metadata server", `*nat
-A PREROUTING -d 169.254.169.254/32 ! -i eth0 -p tcp -m tcp --dport 80 -m comment --comment "metadata-concealment: bridge traffic to metadata server goes to metadata proxy" -j DNAT --to-destination 169.254.169.252:988
COMMIT
*filter
-A INPUT -d 169.254.169.252/32 -p tcp -m tcp --dport 988 -m mac ! --mac-source 02:00:00:00:00:07 -j DROP
COMMIT
`),
		byIPTables("flannel and ip-masq-agent", `*nat
:FLANNEL-POSTRTG - [0:0]
:IP-MASQ-AGENT - [0:0]
-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG
-A POSTROUTING -m comment --comment "ip-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom IP-MASQ-AGENT chain" -m addrtype ! --dst-type LOCAL -j IP-MASQ-AGENT
-A FLANNEL-POSTRTG -m mark --mark 0x4000/0x4000 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.244.0.0/24 -d 10.244.0.0/16 -m comment --comment "flanneld masq" -j RETURN
-A FLANNEL-POSTRTG -s 10.244.0.0/16 ! -d 224.0.0.0/4 -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
-A IP-MASQ-AGENT -d 10.0.0.0/8 -m comment --comment "ip-masq-agent: local traffic is not subject to MASQUERADE" -j RETURN
-A IP-MASQ-AGENT -m comment --comment "ip-masq-agent: outbound traffic is subject to MASQUERADE (must be last in chain)" -j MASQUERADE
COMMIT
`),
		byIP6Tables("ufw", `*filter
:ufw6-before-input - [0:0]
:ufw6-before-output - [0:0]
:ufw6-logging-deny - [0:0]
-A INPUT -j ufw6-before-input
-A OUTPUT -j ufw6-before-output
-A ufw6-before-input -i lo -j ACCEPT
-A ufw6-before-input -m rt --rt-type 0 -j DROP
-A ufw6-before-input -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A ufw6-before-input -m conntrack --ctstate INVALID -j ufw6-logging-deny
-A ufw6-before-input -m conntrack --ctstate INVALID -j DROP
-A ufw6-before-input -p ipv6-icmp -j ACCEPT
-A ufw6-before-output -o lo -j ACCEPT
-A ufw6-before-output -m conntrack --ctstate NEW,RELATED,ESTABLISHED -j ACCEPT
-A ufw6-logging-deny -m conntrack --ctstate INVALID -m limit --limit 3/min --limit-burst 10 -j RETURN
-A ufw6-logging-deny -m limit --limit 3/min --limit-burst 10 -j LOG --log-prefix "[UFW BLOCK] "
COMMIT
`),
		byIPTables("CNI portmap", `*nat
:CNI-DN-2f1c9a7e5b3d8f604a1be - [0:0]
:CNI-HOSTPORT-DNAT - [0:0]
:CNI-HOSTPORT-MASQ - [0:0]
:CNI-HOSTPORT-SETMARK - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A OUTPUT -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
-A POSTROUTING -m comment --comment "CNI portfwd requiring masquerade" -j CNI-HOSTPORT-MASQ
-A CNI-DN-2f1c9a7e5b3d8f604a1be -s 10.244.0.0/24 -p tcp -m tcp --dport 18080 -j CNI-HOSTPORT-SETMARK
-A CNI-DN-2f1c9a7e5b3d8f604a1be -s 127.0.0.1/32 -p tcp -m tcp --dport 18080 -j CNI-HOSTPORT-SETMARK
-A CNI-DN-2f1c9a7e5b3d8f604a1be -p tcp -m tcp --dport 18080 -j DNAT --to-destination 10.244.0.5:80
-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment "dnat name: \"cbr0\" id: \"0123456789abcdef\"" -m multiport --dports 18080 -j CNI-DN-2f1c9a7e5b3d8f604a1be
-A CNI-HOSTPORT-MASQ -m mark --mark 0x2000/0x2000 -j MASQUERADE
-A CNI-HOSTPORT-SETMARK -m comment --comment "CNI portfwd masquerade mark" -j MARK --set-xmark 0x2000/0x2000
COMMIT
`),
		byIPTables("libvirt", `*mangle
:LIBVIRT_PRT - [0:0]
-A POSTROUTING -j LIBVIRT_PRT
-A LIBVIRT_PRT -o virbr0 -p udp -m udp --dport 68 -j CHECKSUM --checksum-fill
COMMIT
*nat
:LIBVIRT_PRT - [0:0]
-A POSTROUTING -j LIBVIRT_PRT
-A LIBVIRT_PRT -s 192.168.122.0/24 -d 224.0.0.0/24 -j RETURN
-A LIBVIRT_PRT -s 192.168.122.0/24 ! -d 192.168.122.0/24 -p tcp -j MASQUERADE --to-ports 1024-65535
-A LIBVIRT_PRT -s 192.168.122.0/24 ! -d 192.168.122.0/24 -j MASQUERADE
COMMIT
*filter
:LIBVIRT_FWI - [0:0]
:LIBVIRT_INP - [0:0]
:LIBVIRT_OUT - [0:0]
-A INPUT -j LIBVIRT_INP
-A FORWARD -j LIBVIRT_FWI
-A OUTPUT -j LIBVIRT_OUT
-A LIBVIRT_FWI -d 192.168.122.0/24 -o virbr0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A LIBVIRT_FWI -o virbr0 -j REJECT --reject-with icmp-port-unreachable
-A LIBVIRT_INP -i virbr0 -p udp -m udp --dport 53 -j ACCEPT
-A LIBVIRT_INP -i virbr0 -p tcp -m tcp --dport 53 -j ACCEPT
-A LIBVIRT_OUT -o virbr0 -p udp -m udp --dport 68 -j ACCEPT
COMMIT
`),
		byIPTables("Antrea", `*mangle
:ANTREA-MANGLE - [0:0]
:ANTREA-OUTPUT - [0:0]
-A PREROUTING -m comment --comment "Antrea: jump to Antrea mangle rules" -j ANTREA-MANGLE
-A OUTPUT -m comment --comment "Antrea: jump to Antrea output rules" -j ANTREA-OUTPUT
-A ANTREA-OUTPUT -o antrea-gw0 -m comment --comment "Antrea: mark LOCAL output packets" -m addrtype --src-type LOCAL -j MARK --set-xmark 0x80000000/0x80000000
COMMIT
*raw
:ANTREA-OUTPUT - [0:0]
:ANTREA-PREROUTING - [0:0]
-A PREROUTING -m comment --comment "Antrea: jump to Antrea prerouting rules" -j ANTREA-PREROUTING
-A OUTPUT -m comment --comment "Antrea: jump to Antrea output rules" -j ANTREA-OUTPUT
-A ANTREA-OUTPUT -m comment --comment "Antrea: reserved" -p udp -m udp --dport 6081 -m addrtype --dst-type LOCAL -j CT --notrack
-A ANTREA-PREROUTING -m comment --comment "Antrea: do not track incoming encapsulation packets" -p udp -m udp --dport 6081 -m addrtype --dst-type LOCAL -j CT --notrack
COMMIT
*nat
:ANTREA-POSTROUTING - [0:0]
-A POSTROUTING -m comment --comment "Antrea: jump to Antrea postrouting rules" -j ANTREA-POSTROUTING
-A ANTREA-POSTROUTING -s 10.244.0.0/24 -m comment --comment "Antrea: masquerade Pod to external packets" ! -o antrea-gw0 -m set ! --match-set have4 dst -j MASQUERADE
-A ANTREA-POSTROUTING -o antrea-gw0 -m comment --comment "Antrea: masquerade LOCAL traffic" -m addrtype ! --src-type LOCAL --limit-iface-out -m addrtype --src-type LOCAL -j MASQUERADE --random-fully
COMMIT
`),
		byIPTables("istio-init's --drop-invalid", `*mangle
-A PREROUTING -m conntrack --ctstate INVALID -j DROP
COMMIT
*nat
-A OUTPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
`),
		byIPTables("logs and counters", `*nat
:CHECKPOINT - [0:0]
-A PREROUTING -j CHECKPOINT
-A OUTPUT -j CHECKPOINT
-A OUTPUT -p tcp -m limit --limit 1/min -j LOG --log-prefix "out: "
-A CHECKPOINT -m comment --comment "seen"
-A CHECKPOINT -j RETURN
COMMIT
*mangle
-A PREROUTING -p tcp -m tcp --tcp-flags SYN,RST SYN -j NFLOG --nflog-group 5
-A POSTROUTING -p tcp -m tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu
-A POSTROUTING -j DSCP --set-dscp 0x0a
-A POSTROUTING -j TTL --ttl-set 64
-A OUTPUT -j SET --add-set lack4 dst --exist
COMMIT
`),
	}
}

func recordedNFT() []remains {
	return []remains{
		byNFT("netavark", `table inet netavark {
	chain INPUT { type filter hook input priority filter; policy accept;
		ip saddr 10.88.0.0/16 meta l4proto { tcp, udp } th dport 53 accept
	}
	chain FORWARD { type filter hook forward priority filter; policy accept;
		ct state invalid drop
		jump NETAVARK-ISOLATION-1
		ip daddr 10.88.0.0/16 ct state established,related accept
		ip saddr 10.88.0.0/16 accept
	}
	chain POSTROUTING { type nat hook postrouting priority srcnat; policy accept;
		meta mark & 0x00002000 == 0x00002000 masquerade
		ip saddr 10.88.0.0/16 jump nv_2f259bab_10_88_0_0_nm16
	}
	chain PREROUTING { type nat hook prerouting priority dstnat; policy accept;
		fib daddr type local jump NETAVARK-HOSTPORT-DNAT
	}
	chain OUTPUT { type nat hook output priority -100; policy accept;
		fib daddr type local jump NETAVARK-HOSTPORT-DNAT
	}
	chain NETAVARK-HOSTPORT-DNAT {
		tcp dport 18080 jump nv_2f259bab_10_88_0_0_nm16_dnat
	}
	chain NETAVARK-HOSTPORT-SETMARK { meta mark set meta mark | 0x00002000; }
	chain NETAVARK-ISOLATION-1 { }
	chain nv_2f259bab_10_88_0_0_nm16 {
		ip daddr 10.88.0.0/16 accept
		ip daddr != 224.0.0.0/4 masquerade
	}
	chain nv_2f259bab_10_88_0_0_nm16_dnat {
		ip saddr 10.88.0.0/16 tcp dport 18080 jump NETAVARK-HOSTPORT-SETMARK
		ip saddr 127.0.0.1 tcp dport 18080 jump NETAVARK-HOSTPORT-SETMARK
		tcp dport 18080 dnat ip to 10.88.0.2:80
	}
}
`),
		byNFT("docker (nft)", `table ip docker-bridges {
	map filter-forward-in-jumps { type ifname : verdict; elements = { "docker0" : jump filter-forward-in__docker0 }; }
	chain filter-FORWARD { type filter hook forward priority filter; policy accept;
		oifname vmap @filter-forward-in-jumps
	}
	chain filter-forward-in__docker0 {
		ct state established,related counter accept
		iifname "docker0" counter accept
		counter drop
	}
	chain nat-OUTPUT { type nat hook output priority -100; policy accept;
		ip daddr != 127.0.0.0/8 fib daddr type local counter jump nat-prerouting-and-output
	}
	chain nat-POSTROUTING { type nat hook postrouting priority srcnat; policy accept;
		oifname != "docker0" ip saddr 172.17.0.0/16 counter masquerade
	}
	chain nat-PREROUTING { type nat hook prerouting priority dstnat; policy accept;
		fib daddr type local counter jump nat-prerouting-and-output
	}
	chain nat-prerouting-and-output {
		iifname != "docker0" tcp dport 18081 counter dnat to 172.17.0.2:80
	}
	chain raw-PREROUTING { type filter hook prerouting priority raw; policy accept;
		ip daddr 172.17.0.2 iifname != "docker0" counter drop
	}
}
`),
		byNFT("firewalld", `table inet firewalld {
	chain mangle_PREROUTING { type filter hook prerouting priority mangle + 10; policy accept;
		jump mangle_PREROUTING_ZONES
	}
	chain mangle_PREROUTING_ZONES { iifname "eth0" goto mangle_PRE_trusted; goto mangle_PRE_trusted; }
	chain mangle_PRE_trusted { jump mangle_PRE_trusted_log; }
	chain mangle_PRE_trusted_log { }
	chain nat_PREROUTING { type nat hook prerouting priority dstnat + 10; policy accept;
		jump nat_PREROUTING_ZONES
	}
	chain nat_PREROUTING_ZONES { iifname "eth0" goto nat_PRE_trusted; goto nat_PRE_trusted; }
	chain nat_PRE_trusted { }
	chain nat_POSTROUTING { type nat hook postrouting priority srcnat + 10; policy accept;
		meta nfproto ipv4 oifname != "lo" oifname "docker0" masquerade
	}
	chain nat_OUTPUT { type nat hook output priority -90; policy accept; jump nat_PRE_trusted; }
	chain filter_PREROUTING { type filter hook prerouting priority filter + 10; policy accept;
		icmpv6 type { nd-router-advert, nd-neighbor-solicit } accept
		meta nfproto ipv6 fib saddr . mark . iif oif missing drop
	}
	chain filter_INPUT { type filter hook input priority filter + 10; policy accept;
		ct state { established, related } accept
		ct status dnat accept
		iifname "lo" accept
		ct state invalid drop
		jump filter_INPUT_ZONES
		reject with icmpx admin-prohibited
	}
	chain filter_INPUT_ZONES { iifname "eth0" goto filter_IN_trusted; goto filter_IN_trusted; }
	chain filter_IN_trusted { jump filter_IN_trusted_log; accept; }
	chain filter_IN_trusted_log { }
	chain filter_OUTPUT { type filter hook output priority filter + 10; policy accept;
		ct state { established, related } accept
		oifname "lo" accept
	}
}
`),
		byNFT("kube-proxy (nft)", `table ip kube-proxy {
	set cluster-ips { type ipv4_addr; elements = { 10.96.0.1, 10.96.0.10 }; }
	set nodeport-ips { type ipv4_addr; elements = { 10.9.9.9 }; }
	map no-endpoint-services { type ipv4_addr . inet_proto . inet_service : verdict; elements = { 10.96.0.9 . tcp . 80 : goto reject-chain }; }
	map no-endpoint-nodeports { type inet_proto . inet_service : verdict; elements = { tcp . 31081 : goto reject-chain }; }
	map firewall-ips { type ipv4_addr . inet_proto . inet_service : verdict; }
	map service-ips { type ipv4_addr . inet_proto . inet_service : verdict; elements = { 10.96.0.1 . tcp . 443 : goto service-2QRHZV4L-default/web/tcp/ }; }
	map service-nodeports { type inet_proto . inet_service : verdict; elements = { tcp . 31080 : goto service-2QRHZV4L-default/web/tcp/ }; }
	chain cluster-ips-check { ip daddr @cluster-ips reject; }
	chain endpoint-5OJB2KTY-default/web/tcp/__10.244.0.3/8080 {
		ip saddr 10.244.0.3 jump mark-for-masquerade
		meta l4proto tcp dnat to 10.244.0.3:8080
	}
	chain endpoint-XPZ7H2TL-default/web/tcp/__10.244.0.4/8080 {
		ip saddr 10.244.0.4 jump mark-for-masquerade
		meta l4proto tcp dnat to 10.244.0.4:8080
	}
	chain filter-input { type filter hook input priority -110; policy accept;
		ct state new jump nodeport-endpoints-check
		ct state new jump service-endpoints-check
	}
	chain filter-output { type filter hook output priority -110; policy accept;
		ct state new jump service-endpoints-check
		ct state new jump firewall-check
	}
	chain filter-output-post-dnat { type filter hook output priority -90; policy accept;
		ct state new jump cluster-ips-check
	}
	chain filter-prerouting { type filter hook prerouting priority -110; policy accept;
		ct state new jump firewall-check
	}
	chain firewall-check { ip daddr . meta l4proto . th dport vmap @firewall-ips; }
	chain mark-for-masquerade { meta mark set meta mark | 0x00004000; }
	chain masquerading {
		meta mark & 0x00004000 == 0x00000000 return
		meta mark set meta mark ^ 0x00004000
		masquerade fully-random
	}
	chain nat-output { type nat hook output priority -100; policy accept;
		jump services
	}
	chain nat-postrouting { type nat hook postrouting priority 100; policy accept;
		jump masquerading
	}
	chain nat-prerouting { type nat hook prerouting priority -100; policy accept;
		jump services
	}
	chain nodeport-endpoints-check { ip daddr @nodeport-ips meta l4proto . th dport vmap @no-endpoint-nodeports; }
	chain reject-chain { reject; }
	chain service-2QRHZV4L-default/web/tcp/ {
		ip daddr 10.96.0.1 tcp dport 443 ip saddr != 10.244.0.0/16 jump mark-for-masquerade
		numgen random mod 2 vmap { 0 : goto endpoint-5OJB2KTY-default/web/tcp/__10.244.0.3/8080, 1 : goto endpoint-XPZ7H2TL-default/web/tcp/__10.244.0.4/8080 }
	}
	chain service-endpoints-check { ip daddr . meta l4proto . th dport vmap @no-endpoint-services; }
	chain services {
		ip daddr . meta l4proto . th dport vmap @service-ips
		ip daddr @nodeport-ips meta l4proto . th dport vmap @service-nodeports
	}
}
`),
		byNFT("systemd-networkd", `table ip io.systemd.nat {
	set masq_saddr { type ipv4_addr; flags interval; elements = { 192.168.0.0/16 }; }
	map map_port_ipport { type inet_proto . inet_service : ipv4_addr . inet_service; elements = { tcp . 18082 : 192.168.1.2 . 80 }; }
	chain prerouting { type nat hook prerouting priority dstnat + 1; policy accept;
		fib daddr type local dnat ip addr . port to meta l4proto . th dport map @map_port_ipport
	}
	chain output { type nat hook output priority -99; policy accept;
		ip daddr != 127.0.0.0/8 oif "lo" dnat ip addr . port to meta l4proto . th dport map @map_port_ipport
	}
	chain postrouting { type nat hook postrouting priority srcnat + 1; policy accept;
		ip saddr @masq_saddr masquerade
	}
}
`),
		byNFT("Incus", `table inet incus {
	chain pstrt.incusbr0 { type nat hook postrouting priority srcnat; policy accept;
		ip saddr 10.7.0.0/24 ip daddr != 10.7.0.0/24 masquerade
	}
	chain fwd.incusbr0 { type filter hook forward priority filter; policy accept;
		ip version 4 oifname "incusbr0" accept
		ip version 4 iifname "incusbr0" accept
	}
	chain in.incusbr0 { type filter hook input priority filter; policy accept;
		iifname "incusbr0" tcp dport 53 accept
		iifname "incusbr0" udp dport { 53, 67 } accept
		iifname "incusbr0" icmpv6 type { nd-router-solicit, nd-neighbor-solicit } accept
	}
	chain out.incusbr0 { type filter hook output priority filter; policy accept;
		oifname "incusbr0" tcp sport 53 accept
		oifname "incusbr0" udp sport { 53, 67 } accept
	}
}
`),
		byNFT("fail2ban (nft)", `table inet f2b-table {
	set addr-set-sshd { type ipv4_addr; elements = { 203.0.113.5 }; }
	set addr6-set-sshd { type ipv6_addr; elements = { 2001:db8::5 }; }
	chain f2b-chain { type filter hook input priority filter - 1; policy accept;
		tcp dport 22 ip saddr @addr-set-sshd reject with icmp port-unreachable
		meta l4proto tcp ip saddr @addr-set-sshd reject
		tcp dport { 80, 443 } ip6 saddr @addr6-set-sshd reject with icmpv6 port-unreachable
	}
}
`),
		byNFT("crowdsec (nft)", `table ip crowdsec {
	set crowdsec-blacklists { type ipv4_addr; flags timeout; elements = { 203.0.113.9 timeout 4h }; }
	chain crowdsec-chain-input { type filter hook input priority filter - 10; policy accept;
		ip saddr @crowdsec-blacklists counter drop
	}
}
table ip6 crowdsec6 {
	set crowdsec6-blacklists { type ipv6_addr; flags timeout; elements = { 2001:db8::9 timeout 4h }; }
	chain crowdsec6-chain-input { type filter hook input priority filter - 10; policy accept;
		ip6 saddr @crowdsec6-blacklists counter drop
	}
}
`),
		byNFT("Calico (nft)", `table ip calico {
	set cali40all-ipam-pools { type ipv4_addr; flags interval; elements = { 10.244.0.0/16 }; }
	chain raw-PREROUTING { type filter hook prerouting priority raw; policy accept;
		counter jump raw-cali-PREROUTING
	}
	chain raw-cali-PREROUTING {
		counter meta mark set meta mark & 0xfff0ffff
		iifname "cali*" counter meta mark set meta mark or 0x40000
		meta mark & 0x40000 == 0x40000 fib saddr . mark . iif oif 0 counter drop
		meta mark & 0x10000 == 0x10000 counter accept
	}
	chain mangle-PREROUTING { type filter hook prerouting priority mangle; policy accept;
		ct state established,related counter accept
		meta mark & 0x10000 == 0x10000 counter accept
	}
	chain filter-INPUT { type filter hook input priority filter; policy accept;
		iifname "cali*" counter drop
		meta mark & 0x10000 == 0x10000 counter accept
		counter meta mark set meta mark & 0xfff0ffff
	}
	chain nat-POSTROUTING { type nat hook postrouting priority srcnat; policy accept;
		ip saddr @cali40all-ipam-pools ip daddr != @cali40all-ipam-pools counter masquerade fully-random
	}
}
`),
		byNFT("counters (nft)", `table inet watch {
	counter web { }
	set talkers { type ipv4_addr; flags dynamic, timeout; size 1024; timeout 1m; }
	chain in { type filter hook prerouting priority -310; policy accept;
		tcp dport 80 counter name web
		add @talkers { ip saddr }
		ct state new log prefix "new " group 3
	}
	chain out { type filter hook output priority -310; policy accept;
		meta skuid 1000 counter
		limit rate 5/minute log
		ct state vmap { new : continue, established : accept }
	}
	chain mss { type filter hook postrouting priority mangle; policy accept;
		tcp flags syn tcp option maxseg size set rt mtu
	}
}
`),
		byNFT("NeuVector and kill switches of other ports", `table ip filter {
	chain nv { type filter hook input priority filter; policy accept;
		tcp dport 25 drop
		iifname "tun0" drop
		meta l4proto { sctp, dccp } drop
	}
	chain forward { type filter hook forward priority filter; policy drop; }
	chain output { type filter hook output priority filter; policy accept;
		ip daddr 169.254.169.254 drop
		oifname "wg0" meta mark != 0xca6c reject
	}
}
`),
	}
}

// stateIn is the state of a namespace as the agent judges it, without processes and listeners. It is the same by the rules alone.
func stateIn(t *testing.T, n redirection.Namespace, spec redirect.Spec) (audit.State, []audit.Problem) {
	t.Helper()
	report, err := n.Audit(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	problems := audit.Assess(spec, audit.Observation{
		Mesh: report.Mesh, Rules: audit.Rules(report.Mesh, report.Diffs, report.Ways), Routing: report.Routing, Families: report.Families,
	})
	state := audit.StateOf(problems)
	alone, err := inspect.Alone(t.Context(), n)
	if err != nil {
		t.Fatal(err)
	}
	if alone.State != state {
		t.Errorf("by the rules alone the state is %s: %+v; of the pod's configuration it is %s: %+v", alone.State, alone.Problems, state, problems)
	}
	return state, problems
}

// usual are the packets of a pod.
func (w *walked) usual() (all []*asked) {
	add := func(q inspect.Question, from labtest.Actor, to netip.AddrPort) {
		a := &asked{Question: q, Request: labtest.Request{From: from, Via: tcp, To: to, SourcePort: w.FreshPort()}}
		if q.UDP {
			a.Via = udp
		}
		if q.Inbound {
			a.Source = q.From
		}
		all = append(all, a)
	}
	for _, f := range families {
		for _, uid := range []uint32{labtest.AppUID, redirect.DefaultID} {
			places := []netip.AddrPort{labtest.Far.Port(f, 80), labtest.Pod.Port(f, 9000), labtest.Resolver.Port(f, 53)}
			if uid == labtest.AppUID {
				places = append(places, labtest.Peer.Port(f, 443), labtest.Loopback.Port(f, 8080), labtest.Far.Port(f, 15020))
			}
			for _, to := range places {
				who := labtest.Actor{Name: "process", Namespace: w.Path(), UID: int(uid), GID: int(uid)}
				add(inspect.Question{To: to, UID: uid, GID: uid}, who, to)
				if to.Port() == 53 {
					add(inspect.Question{To: to, UID: uid, GID: uid, UDP: true}, who, to)
				}
			}
		}
		for _, port := range []uint16{80, 9000, 15020} {
			add(inspect.Question{Inbound: true, From: labtest.Far.Addr(f), Port: port}, w.Peer(), labtest.Pod.Port(f, port))
		}
	}
	return all
}

// ways sends the usual packets, and returns where each went.
func (w *walked) ways(t *testing.T) (all []*asked, ways []string) {
	t.Helper()
	all = w.usual()
	sendTogether(t.Context(), all, patient)
	for _, a := range all {
		ways = append(ways, fmt.Sprintf("%s: %s", a.command(), w.went(a.Request, a.got)))
	}
	return all, ways
}

// captured is a pod with the mesh's rules.
func captured(t *testing.T, mode redirect.Mode) (w *walked) {
	t.Helper()
	spec := dualStack(mode)
	spec.DNS, spec.DNSServers = redirect.DNSAll, nil
	w = &walked{fixture: newFixture(t, spec, families...), tb: t}
	w.sets(t)
	return w
}

// beside is how the mesh's rules get into a namespace that a program uses, too.
type beside struct {
	by    iptables.Variant
	mode  redirect.Mode
	ahead bool // the program was there first
}

func (b beside) String() string {
	return fmt.Sprintf("%s %s %s", map[bool]string{true: "ahead of", false: "behind"}[b.ahead], b.by, b.mode)
}

// TestState_HarmlessPrograms: what a program leaves that takes no packet is no fault of a pod, wherever it was first, and the way of
// usual packets is known.
func TestState_HarmlessPrograms(t *testing.T) {
	t.Parallel()
	without := map[beside][]string{}
	for _, by := range []iptables.Variant{byNetlink, byTables, iptables.Legacy} {
		for _, mode := range []redirect.Mode{redirect.Redirect, redirect.TPROXY} {
			w := captured(t, mode)
			w.apply(t, by, w.spec)
			_, without[beside{by: by, mode: mode}] = w.ways(t)
		}
	}
	for n, c := range recorded() {
		cells := []beside{{byNetlink, redirect.Redirect, false}, {byNetlink, redirect.Redirect, true}}
		if marks := c.items[0].text; strings.Contains(marks, "MARK ") || strings.Contains(marks, "mark set") { // TPROXY is done by them
			cells = append(cells, beside{byNetlink, redirect.TPROXY, true})
		}
		other := beside{byTables, redirect.Redirect, true}
		if n%2 == 0 && !strings.HasPrefix(c.items[0].command, "nft") {
			other.by = iptables.Legacy
		}
		for _, cell := range append(cells, other) {
			t.Run(fmt.Sprintf("%s %s", c.program, cell), func(t *testing.T) {
				t.Parallel()
				c.harmless(t, cell, without[beside{by: cell.by, mode: cell.mode}])
			})
		}
	}
}

func (r remains) install(t *testing.T, w *walked, by iptables.Variant) {
	t.Helper()
	for _, i := range r.items {
		if by == iptables.Legacy {
			i.command = strings.Replace(i.command, "-nft-", "-legacy-", 1)
		}
		if err := i.install(t.Context(), w.Path()); err != nil {
			t.Fatal(err)
		}
	}
}

// published reports whether a problem is about what a program takes, ahead of the mesh or in an order that is not known: the ports that it
// publishes for containers, and the addresses of services.
func (b beside) published(program, detail string) bool {
	of := map[string]string{
		"program netavark": "chain NETAVARK-HOSTPORT-DNAT", "program docker (nft)": "tcp dport 18081", "program kube-proxy (nft)": "table ip kube-proxy",
		"program kube-proxy": "nat/KUBE-", "program CNI portmap": "nat/CNI-HOSTPORT-DNAT",
	}[program]
	return of != "" && strings.Contains(detail, of) && (b.ahead || strings.Contains(detail, "table "))
}

func (r remains) harmless(t *testing.T, at beside, without []string) {
	t.Helper()
	w := captured(t, at.mode)
	if at.ahead {
		r.install(t, w, at.by)
	}
	w.apply(t, at.by, w.spec)
	if !at.ahead {
		r.install(t, w, at.by)
	}
	n := namespaceOf(w.Fixture, at.by)
	state, problems := stateIn(t, n, w.spec)
	all, ways := w.ways(t)
	if diff := cmp.Diff(without, ways); diff != "" {
		t.Errorf("it takes a packet (-without +with):\n%s", diff)
	}
	takes := slices.DeleteFunc(slices.Clone(problems), func(p audit.Problem) bool {
		return p.State == audit.ForeignRule && at.published(r.program, p.Detail)
	})
	if state != audit.Captured && len(takes) > 0 {
		t.Errorf("the state is %s: %+v", state, takes)
	}
	var unknown []string
	for _, a := range all {
		answer, err := inspect.Walk(t.Context(), n, w.spec, a.Question)
		if err != nil {
			t.Fatal(err)
		}
		if answer.Verdict == walk.CannotTell.String() {
			unknown = append(unknown, a.command()+": "+answer.Sentence)
		}
	}
	if len(unknown) > 0 {
		t.Errorf("%d of %d usual packets have no answer: %s", len(unknown), len(all), unknown[0])
	}
}

// taker takes packets of a captured pod.
type taker struct {
	name, command, text string
	// question is one about a packet that it takes; want is what becomes of it, by the name of the listener or the error.
	question inspect.Question
	want     string
	state    audit.State
	// only is the backend beside which it is one, "" for each.
	only iptables.Variant
}

// takers are rules that take traffic past the proxy, or end it.
func takers() []taker {
	out := func(to string) inspect.Question {
		return inspect.Question{To: netip.MustParseAddrPort(to), UID: labtest.AppUID, GID: labtest.AppUID}
	}
	in := inspect.Question{Inbound: true, From: labtest.Far.Addr(ruleset.IPv4), Port: 9000}
	web := out("10.2.0.9:80")
	nft := func(name, text string, q inspect.Question, want string) taker {
		return taker{name, "nft -f -", text, q, want, audit.ForeignRule, ""}
	}
	refused, silent := labtest.ErrRefused.Error(), labtest.ErrSilent.Error()
	redirects := func(table, chain string, priority int) string {
		return fmt.Sprintf("table %s {\nchain %s { type nat hook output priority %d; tcp dport 80 redirect to :9090; }\n}\n", table, chain, priority)
	}
	return []taker{
		nft("redirect in ip nat mine at -150", redirects("ip nat", "mine", -150), web, refused),
		nft("redirect in ip nat output at -110", redirects("ip nat", "output", -110), web, refused),
		nft("redirect in ip nat output at -101", redirects("ip nat", "output", -101), web, refused),
		nft("redirect in ip nat output at -100", redirects("ip nat", "output", -100), web, ""),
		nft("redirect in inet foo at -150", redirects("inet foo", "mine", -150), web, refused),
		nft("redirect in the table of a trace", redirects("ip istio-cni-trace-1", "mine", -150), web, refused),
		nft("nat output behind, of what the mesh lets go", "table ip nat {\nchain late { type nat hook output priority 0; tcp dport 9999 dnat to 10.2.0.9:80; }\n}\n",
			out("10.1.0.2:9999"), labtest.ByPeer),
		nft("drop in ip raw prerouting", "table ip raw {\nchain prerouting { type filter hook prerouting priority -300; tcp dport 9000 drop; }\n}\n", in, silent),
		nft("drop in ip mangle x", "table ip mangle {\nchain x { type filter hook output priority -150; tcp dport 80 drop; }\n}\n", web, silent),
		nft("policy drop in ip filter in", "table ip filter {\nchain in { type filter hook input priority 0; policy drop; ct state established,related accept; }\n}\n", in, silent),
		nft("rewriting behind, outbound", "table ip x {\nchain y { type route hook output priority 0; ip daddr 127.0.0.1 tcp dport 15001 ip daddr set ct original ip daddr tcp dport set ct original proto-dst; }\n}\n",
			web, ""),
		nft("rewriting behind, outbound, in the table of a trace", "table ip istio-cni-trace-1 {\nchain y { type route hook output priority 0; ip daddr 127.0.0.1 tcp dport 15001 ip daddr set ct original ip daddr tcp dport set ct original proto-dst; }\n}\n",
			web, ""),
		nft("rewriting behind, inbound", "table ip x {\nchain y { type filter hook input priority 0; tcp dport 15006 tcp dport set ct original proto-dst; }\n}\n", in, ""),
		nft("rewriting ahead, in ip raw", "table ip raw {\nchain y { type filter hook output priority -310; tcp dport 80 tcp dport set 15020; }\n}\n", web, ""),
		nft("notrack", "table inet x {\nchain y { type filter hook output priority -300; tcp dport 80 notrack; }\n}\n", web, ""),
		nft("notrack in ip raw", "table ip raw {\nchain y { type filter hook output priority -300; tcp dport 80 notrack; }\n}\n", web, ""),
		nft("ingress drop", "table netdev x {\nchain y { type filter hook ingress device \"eth0\" priority 0; tcp dport 9000 drop; }\n}\n", in, silent),
		nft("ingress rewriting", "table netdev x {\nchain y { type filter hook ingress device \"eth0\" priority 0; tcp dport 9000 tcp dport set 15020; }\n}\n", in, ""),
		nft("ingress on lo", "table netdev x {\nchain y { type filter hook ingress device \"lo\" priority 0; tcp dport 15001 drop; }\n}\n", web, silent),
		nft("verdict map", "table inet x {\nchain y { type filter hook output priority -200; tcp dport vmap { 80 : drop, 443 : accept }; }\n}\n", web, silent),
		nft("set with the address", "table ip x {\nset s { type ipv4_addr; elements = { 10.2.0.9 }; }\nchain y { type filter hook output priority -150; ip daddr @s drop; }\n}\n", web, silent),
		nft("chain behind two jumps", "table ip x {\nchain a { jump b; }\nchain b { tcp dport 80 drop; }\nchain y { type filter hook output priority -150; jump a; }\n}\n", web, silent),
		nft("redirect of inbound ahead", "table ip nat {\nchain in { type nat hook prerouting priority -110; tcp dport 9000 redirect to :15020; }\n}\n", in, labtest.ByStatus),
		{"iptables notrack, behind the mesh's", "iptables-nft-restore --noflush", "*raw\n-A OUTPUT -p tcp -m tcp --dport 80 -j CT --notrack\nCOMMIT\n", web, "", audit.ForeignRule, ""},
		{"iptables RETURN ahead", "iptables-nft-restore --noflush", "*nat\n-I OUTPUT -p tcp -m tcp --dport 80 -j RETURN\nCOMMIT\n", web, labtest.ByPeer, audit.ForeignRule, byNetlink},
		{"iptables-legacy REDIRECT beside", "iptables-legacy-restore --noflush", "*nat\n-A OUTPUT -p tcp -m tcp --dport 80 -j REDIRECT --to-ports 15020\nCOMMIT\n", web, "", audit.ForeignRule, ""},
		{"iptables DROP in raw, behind the mesh's", "iptables-nft-restore --noflush", "*raw\n-A PREROUTING -p tcp -m multiport --dports 1:9999 -m comment --comment x -j DROP\nCOMMIT\n", in, silent, audit.ForeignRule, ""},
		{"iptables queue behind", "iptables-nft-restore --noflush", "*filter\n-A OUTPUT -p tcp -m tcp --dport 15001 -j NFQUEUE --queue-num 5\nCOMMIT\n", web, silent, audit.ForeignRule, ""},
		{"copies by TEE and a drop", "iptables-nft-restore --noflush", "*mangle\n-A OUTPUT -d 10.2.0.9 -p tcp -j TEE --gateway 10.1.0.1\nCOMMIT\n*filter\n-A OUTPUT -p tcp -m tcp --dport 15001 -j DROP\nCOMMIT\n", web, "", audit.ForeignRule, ""},
		{"copies and a drop", "nft -f -", "table ip x {\nchain y { type filter hook output priority -300; tcp dport 80 dup to 10.1.0.1; }\nchain z { type filter hook output priority 0; tcp dport 15001 drop; }\n}\n", web, "", audit.ForeignRule, ""},
		{"eth0 named lo", "ip -batch -", "link set lo name lo0\nlink set eth0 name lo\n", out("10.2.0.9:80"), labtest.ByPeer, audit.Drifted, ""},
	}
}

// TestState_Takers: a pod of which a program takes packets is not captured, and no answer says that they are redirected.
func TestState_Takers(t *testing.T) {
	t.Parallel()
	for _, c := range takers() {
		for _, v := range []iptables.Variant{byNetlink, byTables} {
			if c.only != "" && c.only != v {
				continue
			}
			t.Run(fmt.Sprintf("%s/%s", c.name, v), func(t *testing.T) {
				t.Parallel()
				w := captured(t, redirect.Redirect)
				w.apply(t, v, w.spec)
				if err := (item{c.name, c.command, c.text}).install(t.Context(), w.Path()); err != nil {
					t.Fatal(err)
				}
				a := asked{Question: c.question, Request: labtest.Request{From: w.App(), Via: tcp, To: c.question.To, SourcePort: w.FreshPort()}}
				if c.question.Inbound {
					a.Request.From, a.Source, a.Request.To = w.Peer(), c.question.From, labtest.Pod.Port(ruleset.IPv4, c.question.Port)
				}
				state, problems := stateIn(t, namespaceOf(w.Fixture, v), w.spec)
				if state != c.state {
					t.Errorf("the state is %s, want %s: %+v", state, c.state, problems)
				}
				all := []*asked{&a}
				w.ask(t, v, w.spec, all)
				witness := w.Watch(t)
				sendTogether(t.Context(), all, time.Second)
				witness.Look()
				went := w.went(a.Request, a.got)
				if went == labtest.ByOutbound || went == labtest.ByInbound || c.want != "" && went != c.want {
					t.Errorf("the packet ends at %q, want %q: this test shows nothing", went, c.want)
				}
				if why := w.disagreement(a, witness); why != "" {
					t.Errorf("%s\n%s\nanswer: %s\nwent:   %s", a.command(), why, a.answer.Sentence, a.got)
				}
			})
		}
	}
}
