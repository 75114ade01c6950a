package probeset

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/nftables"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// The probe addresses of the reference, and the addresses of the node's pods.
const (
	probe4, probe6 = "169.254.7.127", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff"
	pod4, pod6     = "10.0.0.2", "fd00::2"
)

// want returns the wanted state for "ADDRESS=UID …".
func want(entries ...string) Want {
	w := Want{V4: netip.MustParseAddr(probe4), V6: netip.MustParseAddr(probe6), IPv6: true, Pods: map[netip.Addr]string{}}
	for _, e := range entries {
		address, uid, _ := strings.Cut(e, "=")
		w.Pods[netip.MustParseAddr(address)] = uid
	}
	return w
}

// node is the node's network namespace.
type node string

func (n node) nft(t *testing.T, script string) {
	t.Helper()
	netnstest.Feed(t, string(n), script, "nft", "-f", "-")
}

func (n node) list(t *testing.T) string {
	t.Helper()
	return netnstest.Run(t, string(n), "nft", "--stateless", "list", "ruleset")
}

// apply fails unless Apply writes exactly if it should.
func (n node) apply(t *testing.T, w Want, writes bool) {
	t.Helper()
	before := n.generation(t)
	changed, err := Apply(netnstest.At(string(n)), w)
	check.OK(t, err)
	check.Equal(t, changed, writes, "Apply has written")
	check.Equal(t, n.generation(t)-before, map[bool]uint32{true: 1}[writes], "number of transactions")
}

func (n node) generation(t *testing.T) uint32 {
	t.Helper()
	g, err := netns.In(netnstest.At(string(n)), nftables.Generation)
	check.OK(t, err)
	return g
}

func (n node) has(t *testing.T, w Want) {
	t.Helper()
	have, err := Read(netnstest.At(string(n)))
	check.OK(t, err)
	if !maps.Equal(have, w.Pods) {
		t.Errorf("the entries are %v, want %v", have, w.Pods)
	}
}

// reference is the table of the reference's nft mode, as its agent makes it at its start: also over a table that is there.
func reference(entries string) string {
	const comment = `comment "UUID of the pods that are part of ambient mesh";`
	return "add table inet istio-ambient-nat\nflush table inet istio-ambient-nat\n" +
		"add set inet istio-ambient-nat istio-inpod-probes-v4 { type ipv4_addr; " + comment + " }\n" +
		"add set inet istio-ambient-nat istio-inpod-probes-v6 { type ipv6_addr; " + comment + " }\n" +
		"add chain inet istio-ambient-nat postrouting { type nat hook postrouting priority 100; }\n" +
		"add rule inet istio-ambient-nat postrouting meta l4proto tcp skuid 0 ip daddr @istio-inpod-probes-v4 counter snat to " + probe4 + "\n" +
		"add rule inet istio-ambient-nat postrouting meta l4proto tcp skuid 0 ip6 daddr @istio-inpod-probes-v6 counter snat to " + probe6 + "\n" +
		entries
}

const text = `table inet istio-ambient-nat {
	set istio-inpod-probes-v4 {
		type ipv4_addr
		comment "UUID of the pods that are part of ambient mesh"
		elements = { 10.0.0.2 comment "uid-1" }
	}

	set istio-inpod-probes-v6 {
		type ipv6_addr
		comment "UUID of the pods that are part of ambient mesh"
		elements = { fd00::2 comment "uid-1" }
	}

	chain istio-probes {
		type nat hook postrouting priority srcnat - 1; policy accept;
		meta l4proto tcp meta skuid >= 0 ip daddr @istio-inpod-probes-v4 counter snat ip to 169.254.7.127
		meta l4proto tcp meta skuid >= 0 ip6 daddr @istio-inpod-probes-v6 counter snat ip6 to fd16:9254:7127:1337:ffff:ffff:ffff:ffff
	}
}
`

func TestApply_AsNftPrints(t *testing.T) {
	t.Parallel()
	n := node(netnstest.New(t))
	n.has(t, want())
	n.apply(t, want(pod4+"=uid-1", pod6+"=uid-1"), true)
	check.Diff(t, "nft prints", text, n.list(t))
	n.apply(t, want(pod4+"=uid-1", "::ffff:10.0.0.2=uid-1", pod6+"%eth0=uid-1"), false)
	other := node(netnstest.New(t))
	other.nft(t, text)
	other.apply(t, want(pod4+"=uid-1", pod6+"=uid-1"), false)
}

func TestApply_Difference(t *testing.T) {
	t.Parallel()
	n := node(netnstest.New(t))
	long := strings.Repeat("u", 200)
	for _, step := range []struct {
		name string
		Want
	}{
		{"new", want("10.0.0.2=a", "10.0.0.3=b", "fd00::2=a")},
		{"added", want("10.0.0.2=a", "10.0.0.3=b", "fd00::2=a", "10.0.0.4=c")},
		{"removed", want("10.0.0.2=a", "fd00::2=a", "10.0.0.4=c")},
		{"of another pod (defect 7.7)", want("10.0.0.2=d", "fd00::2=d", "10.0.0.4=c")},
		{"empty", want()},
	} {
		n.apply(t, step.Want, true)
		n.has(t, step.Want)
		n.apply(t, step.Want, false)
	}
	n.apply(t, want("10.0.0.2="+long), true)
	n.apply(t, want("10.0.0.2="+long), false)
	many := want()
	for i := range 1000 {
		many.Pods[netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})] = fmt.Sprintf("c0ffee00-0000-4000-8000-%012d", i)
	}
	n.apply(t, many, true)
	n.has(t, many)
	n.apply(t, want(), true)
}

func TestApply_Keep(t *testing.T) {
	t.Parallel()
	n := node(netnstest.New(t))
	n.apply(t, want("10.0.0.2=a", "10.0.0.3=b", "fd00::3=b"), true)
	w := want("10.0.0.2=c", "10.0.0.4=d")
	w.Keep = func(_ netip.Addr, uid string) bool { return uid == "b" }
	n.apply(t, w, true)
	n.has(t, want("10.0.0.2=c", "10.0.0.3=b", "fd00::3=b", "10.0.0.4=d"))
	w.IPv6 = false
	n.apply(t, w, true)
	n.has(t, want("10.0.0.2=c", "10.0.0.3=b", "10.0.0.4=d"))
}

func TestApply_IPv6Off(t *testing.T) {
	t.Parallel()
	n := node(netnstest.New(t))
	w := want(pod4+"=a", pod6+"=a")
	w.IPv6, w.V6 = false, netip.Addr{}
	n.apply(t, w, true)
	n.apply(t, w, false)
	n.has(t, want(pod4+"=a"))
	if got := n.list(t); strings.Contains(got, "ip6") {
		t.Error(got)
	}
	n.apply(t, want(pod4+"=a", pod6+"=a"), true)
	n.has(t, want(pod4+"=a", pod6+"=a"))
	if _, err := Apply(netnstest.At(string(n)), Want{IPv6: true, V4: netip.MustParseAddr(probe4)}); err == nil {
		t.Error("Apply takes no address")
	}
}

// TestApply_Foreign: other programs change our table, or all rules of the node.
func TestApply_Foreign(t *testing.T) {
	t.Parallel()
	const rule = "inet istio-ambient-nat istio-probes "
	for name, script := range map[string]string{
		"the table is deleted":             "delete table inet istio-ambient-nat",
		"all rules of the node are gone":   "flush ruleset",
		"the table is flushed":             "flush table inet istio-ambient-nat",
		"a set is flushed":                 "flush set inet istio-ambient-nat istio-inpod-probes-v4",
		"an element is deleted":            "delete element inet istio-ambient-nat istio-inpod-probes-v6 { fd00::2 }",
		"an element is added":              "add element inet istio-ambient-nat istio-inpod-probes-v4 { 10.9.9.9 }",
		"a rule is added":                  "add rule " + rule + "counter accept",
		"a rule is inserted":               "insert rule " + rule + "ip daddr 10.0.0.2 accept",
		"the rules are others":             "flush chain " + rule + "; add rule " + rule + "meta skuid 0 accept; add rule " + rule + "meta skuid 1 accept",
		"the source is another":            "flush chain " + rule + ";" + strings.ReplaceAll(rulesOf(rule), "7.127", "7.128"),
		"the rules compare another uid":    "flush chain " + rule + ";" + strings.ReplaceAll(rulesOf(rule), ">= 0", ">= 1"),
		"the rules are in another order":   "flush chain " + rule + ";" + strings.Join(reversed(rulesOf(rule)), ";"),
		"the policy is drop":               "chain " + rule + "{ policy drop; }",
		"there is another chain":           "add chain inet istio-ambient-nat x { type filter hook output priority 0; policy drop; }",
		"the table is dormant":             "table inet istio-ambient-nat { flags dormant; }",
		"the set is one of another type":   "delete table inet istio-ambient-nat; " + strings.ReplaceAll(text, "type ipv4_addr", "type ipv4_addr; flags interval"),
		"the chain is at another priority": "delete table inet istio-ambient-nat; " + strings.ReplaceAll(text, "srcnat - 1", "srcnat"),
		"the chain is at another hook":     "delete table inet istio-ambient-nat; " + strings.ReplaceAll(text, "postrouting priority srcnat - 1", "input priority 99"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n, w := node(netnstest.New(t)), want(pod4+"=uid-1", pod6+"=uid-1")
			n.nft(t, "table ip kube-proxy { chain c { ip daddr 1.2.3.4 accept; }; }")
			before := n.list(t)
			n.apply(t, w, true)
			n.nft(t, script)
			n.apply(t, w, true)
			n.apply(t, w, false)
			if name != "all rules of the node are gone" {
				check.Diff(t, "afterwards", before, strings.Replace(n.list(t), text, "", 1))
			}
			check.Equal(t, strings.Contains(n.list(t), text), true, n.list(t))
		})
	}
}

func rulesOf(chain string) string {
	var b []string
	for line := range strings.Lines(text) {
		if strings.Contains(line, "counter") {
			b = append(b, "add rule "+chain+strings.TrimSpace(line))
		}
	}
	return strings.Join(b, ";")
}

func reversed(rules string) []string {
	first, second, _ := strings.Cut(rules, ";")
	return []string{second, first}
}

// TestApply_Reference: an agent of the reference, nft mode, was here. Its entries stay while not all pods are known.
func TestApply_Reference(t *testing.T) {
	t.Parallel()
	n := node(netnstest.New(t))
	n.nft(t, reference(`add element inet istio-ambient-nat istio-inpod-probes-v4 { 10.0.0.2 comment "uid-1" }
add element inet istio-ambient-nat istio-inpod-probes-v6 { fd00::2 comment "uid-1" }`))
	n.has(t, want(pod4+"=uid-1", pod6+"=uid-1"))
	w := want()
	w.Keep = func(netip.Addr, string) bool { return true }
	n.apply(t, w, true)
	check.Diff(t, "nft prints", text, n.list(t))
}

// TestApply_BackToTheReference: its agent starts while our table is there; a chain of the name postrouting would stop it.
func TestApply_BackToTheReference(t *testing.T) {
	t.Parallel()
	n := node(netnstest.New(t))
	n.apply(t, want(pod4+"=uid-1", pod6+"=uid-1"), true)
	n.nft(t, reference(`flush set inet istio-ambient-nat istio-inpod-probes-v4
add element inet istio-ambient-nat istio-inpod-probes-v4 { 10.0.0.2 comment "uid-2" }`))
	check.OK(t, Remove(netnstest.At(string(n))))
	got := n.list(t)
	if strings.Contains(got, chainName) || !strings.Contains(got, "skuid 0") || !strings.Contains(got, "uid-2") {
		t.Errorf("after Remove: %s", got)
	}
}

func TestRemove(t *testing.T) {
	t.Parallel()
	n := node(netnstest.New(t))
	check.OK(t, Remove(netnstest.At(string(n))))
	n.apply(t, want(pod4+"=uid-1"), true)
	for range 2 {
		check.OK(t, Remove(netnstest.At(string(n))))
		check.Diff(t, "after Remove", "", n.list(t))
	}
}

// TestApply_WithoutEnd: reading is bounded, and there is no write without it.
func TestApply_WithoutEnd(t *testing.T) {
	// Not parallel because it changes a global bound.
	bound := budget
	budget.Bytes = 4 << 10
	t.Cleanup(func() { budget = bound })
	n := node(netnstest.New(t))
	n.apply(t, want(pod4+"=uid-1"), true)
	var all []string
	for i := range 250 {
		all = append(all, fmt.Sprintf("10.1.0.%d", i))
	}
	n.nft(t, "add element inet istio-ambient-nat istio-inpod-probes-v4 { "+strings.Join(all, ", ")+" }")
	before := n.list(t)
	check.Is(t, check.Err(Apply(netnstest.At(string(n)), want())), nfnetlink.ErrUninspectable, "Apply")
	check.Diff(t, "changed", before, n.list(t))
}

func TestExplain_KernelWithoutNAT(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err         error
		unsupported bool
	}{
		{nil, false},
		{&nfnetlink.Refused{Message: 1, Cause: unix.ENOENT}, true},
		{&nfnetlink.Refused{Message: 1, Cause: unix.EOPNOTSUPP}, true},
		{&nfnetlink.Refused{Message: -1, Cause: unix.EPERM}, false},
		{&nfnetlink.Refused{Message: 1, Cause: unix.ENOMEM}, false},
	} {
		got := explain(c.err)
		check.Equal(t, errors.Is(got, ErrUnsupported), c.unsupported, got)
	}
}

// lab is a node with a pod and, on another node, a client whose packets this node forwards.
type lab struct {
	node
	pod, client string
}

func newLab(t *testing.T) lab {
	t.Helper()
	l := lab{node(netnstest.New(t)), netnstest.New(t), netnstest.New(t)}
	for i, path := range []string{l.pod, l.client} {
		numbered := strings.NewReplacer("N", fmt.Sprint(i), "PATH", path)
		node := "link set lo up\nlink add vethN type veth peer name eth0 netns PATH\naddr add 10.0.N.1/24 dev vethN\n" +
			"addr add fd0N::1/64 dev vethN nodad\nlink set vethN up\n"
		netnstest.Feed(t, string(l.node), numbered.Replace(node), "ip", "-batch", "-")
		pod := "link set lo up\naddr add 10.0.N.2/24 dev eth0\naddr add fd0N::2/64 dev eth0 nodad\nlink set eth0 up\n" +
			"route add default via 10.0.N.1\nroute add default via fd0N::1\n"
		netnstest.Feed(t, path, numbered.Replace(pod), "ip", "-batch", "-")
	}
	netnstest.Set(t, string(l.node), "net/ipv4/ip_forward", "1")
	netnstest.Set(t, string(l.node), "net/ipv6/conf/all/forwarding", "1")
	return l
}

// serve answers, in the pod, each connection with the address of the client that it sees.
func (l lab) serve(t *testing.T) {
	t.Helper()
	listener, err := netns.In(netnstest.At(l.pod), func() (net.Listener, error) {
		return new(net.ListenConfig).Listen(t.Context(), "tcp", ":8080")
	})
	check.OK(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			host, _, _ := net.SplitHostPort(conn.RemoteAddr().String())
			_, _ = conn.Write([]byte(host))
			_ = conn.Close()
		}
	}()
}

// source returns the source address that the pod sees when a process of a user connects to an address of it.
func source(t *testing.T, from, to string, uid uint32) (seen string) {
	t.Helper()
	err := netns.Do(from, func() error {
		cmd := exec.CommandContext(t.Context(), "bash", "-c", "cat < /dev/tcp/"+to+"/8080")
		cmd.Dir, cmd.SysProcAttr = "/", &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		out, err := cmd.CombinedOutput()
		seen = string(out)
		return err
	})
	check.OK(t, err, seen)
	return seen
}

// sources checks, for both families, the addresses from which the node and a forwarded client reach the pod.
func (l lab) sources(t *testing.T, v4, v6, forwarded4, forwarded6 string) {
	t.Helper()
	for _, uid := range []uint32{0, 4711} {
		check.Equal(t, source(t, string(l.node), pod4, uid), v4, "IPv4, the node's user", uid)
		check.Equal(t, source(t, string(l.node), pod6, uid), v6, "IPv6, the node's user", uid)
	}
	check.Equal(t, source(t, l.client, pod4, 0), forwarded4, "IPv4, forwarded")
	check.Equal(t, source(t, l.client, pod6, 0), forwarded6, "IPv6, forwarded")
}

func TestApply_Packets(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.serve(t)
	const node4, node6, client4, client6 = "10.0.0.1", "fd00::1", "10.0.1.2", "fd01::2"
	l.sources(t, node4, node6, client4, client6)
	l.apply(t, want(pod4+"=uid-1", pod6+"=uid-1"), true)
	l.sources(t, probe4, probe6, client4, client6)
	// Another program registers its masquerade later, which takes the probes from the reference's chain of the same priority.
	l.nft(t, "table inet other { chain c { type nat hook postrouting priority 100; masquerade; }; }")
	l.sources(t, probe4, probe6, node4, node6)
	l.apply(t, want("10.0.0.9=uid-1"), true)
	l.sources(t, node4, node6, node4, node6)
}

// ipsets makes the reference's ipsets with an entry each.
func (n node) ipsets(t *testing.T) {
	t.Helper()
	check.OK(t, netnstest.At(string(n)).Do(func() error {
		for i, f := range shape(Want{IPv6: true}) {
			family := []uint8{unix.AF_INET, unix.AF_INET6}[i]
			if err := netlink.IpsetCreate(f.set, "hash:ip", netlink.IpsetCreateOptions{Comments: true, Family: family}); err != nil {
				return err
			}
			address := net.ParseIP([]string{pod4, pod6}[i])
			if err := netlink.IpsetAdd(f.set, &netlink.IPSetEntry{IP: address, Comment: "uid-1"}); err != nil {
				return err
			}
		}
		return nil
	}))
}

// entries returns the number of entries of each ipset.
func (n node) ipsetEntries(t *testing.T) (entries map[string]int) {
	t.Helper()
	check.OK(t, netnstest.At(string(n)).Do(func() error {
		all, err := netlink.IpsetListAll()
		entries = map[string]int{}
		for _, one := range all {
			entries[one.SetName] = len(one.Entries)
		}
		return err
	}))
	return entries
}

// TestReadAny: the entries of both modes of the reference; none where it has neither.
func TestReadAny(t *testing.T) {
	t.Parallel()
	n := node(netnstest.New(t))
	read := func() map[netip.Addr]string {
		entries, err := ReadAny(netnstest.At(string(n)))
		check.OK(t, err)
		return entries
	}
	check.Equal(t, len(read()), 0, "entries without a set")
	n.ipsets(t)
	want := map[netip.Addr]string{netip.MustParseAddr(pod4): "uid-1", netip.MustParseAddr(pod6): "uid-1"}
	check.Diff(t, "of the ipsets", want, read())
	n.nft(t, reference("add element inet istio-ambient-nat istio-inpod-probes-v4 { 10.0.0.9 comment \"uid-9\" }\n"))
	want[netip.MustParseAddr("10.0.0.9")] = "uid-9"
	check.Diff(t, "of both", want, read())
}

// postrouting writes the reference's rules on the host by the programs of a variant.
func (n node) postrouting(t *testing.T, variant string) {
	t.Helper()
	for program, set := range map[string][2]string{
		"iptables": {"istio-inpod-probes-v4", probe4}, "ip6tables": {"istio-inpod-probes-v6", probe6},
	} {
		for _, rule := range []string{
			"-N ISTIO_POSTRT", "-I POSTROUTING 1 -j ISTIO_POSTRT",
			"-A ISTIO_POSTRT -m owner --socket-exists -p tcp -m set --match-set " + set[0] + " dst -j SNAT --to-source " + set[1],
		} {
			netnstest.Run(t, string(n), "env", append([]string{"XTABLES_LOCKFILE=/dev/null", program + "-" + variant, "-t", "nat"}, strings.Fields(rule)...)...)
		}
	}
}

func TestRemoveReference(t *testing.T) {
	t.Parallel()
	n := node(netnstest.New(t))
	check.OK(t, RemoveReference(netnstest.At(string(n))))
	for _, program := range []string{"iptables-nft", "ip6tables-nft"} {
		for _, rule := range []string{"-A POSTROUTING -o lo -j MASQUERADE", "-N KUBE-POSTROUTING", "-A POSTROUTING -j KUBE-POSTROUTING"} {
			netnstest.Run(t, string(n), program, append([]string{"-t", "nat"}, strings.Fields(rule)...)...)
		}
	}
	before := n.list(t)
	n.ipsets(t)
	n.postrouting(t, "nft")
	check.Equal(t, n.list(t) != before, true, "the reference's rules are there")
	check.OK(t, RemoveReference(netnstest.At(string(n))))
	check.Diff(t, "other programs' rules", before, n.list(t))
	check.Diff(t, "ipsets", map[string]int{}, n.ipsetEntries(t))
	generation := n.generation(t)
	check.OK(t, RemoveReference(netnstest.At(string(n))))
	check.Equal(t, n.generation(t), generation, "generation after it was done already")
}

// TestRemoveReference_LegacyTables: netlink does not reach the chain, but it matches nothing any more.
func TestRemoveReference_LegacyTables(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.serve(t)
	l.ipsets(t)
	l.postrouting(t, "legacy")
	l.sources(t, probe4, probe6, "10.0.1.2", "fd01::2")
	check.OK(t, RemoveReference(netnstest.At(string(l.node))))
	check.Diff(t, "ipsets", map[string]int{"istio-inpod-probes-v4": 0, "istio-inpod-probes-v6": 0}, l.ipsetEntries(t))
	l.sources(t, "10.0.0.1", "fd00::1", "10.0.1.2", "fd01::2")
}

// TestRemoveReference_ProbesGoOn: between Apply and RemoveReference both are there.
func TestRemoveReference_ProbesGoOn(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.serve(t)
	l.ipsets(t)
	l.postrouting(t, "nft")
	for _, step := range []func() error{
		func() error { return nil },
		func() error {
			_, err := Apply(netnstest.At(string(l.node)), want(pod4+"=uid-1", pod6+"=uid-1"))
			return err
		},
		func() error { return RemoveReference(netnstest.At(string(l.node))) },
	} {
		check.OK(t, step())
		l.sources(t, probe4, probe6, "10.0.1.2", "fd01::2")
	}
}
