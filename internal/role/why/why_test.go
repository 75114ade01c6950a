package why_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/redirect/walk"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
	"github.com/meshcni/istio-cni/internal/role/why"
	"github.com/meshcni/istio-cni/internal/test/check"
	"github.com/meshcni/istio-cni/internal/test/documenttest"
)

// why runs the command on a terminal with a number of columns, 0 without a terminal.
func explain(t *testing.T, width int, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = why.Run(applet.Call{
		Args: args, Stdout: &out, Stderr: &errs, Terminal: func() int { return width },
		Getenv: func(name string) (string, bool) { return "/usr/sbin:/usr/bin:/sbin:/bin", name == "PATH" },
	})
	return code, out.String(), errs.String()
}

// last returns the last paragraph as a line: the answer, and the remedy if there is one.
func last(text string) string {
	text = strings.TrimRight(text, "\n")
	return flat(text[strings.LastIndex(text, "\n\n")+1:])
}

// flat returns a text as one line.
func flat(text string) string { return strings.Join(strings.Fields(text), " ") }

// legacy is the backend of legacy tables.
const legacy redirect.Backend = "legacy"

// spec excludes a port, and captures DNS.
func spec() redirect.Spec {
	s := redirect.Default()
	s.DNS, s.OutboundPortsExclude, s.DualStack = redirect.DNSAll, ruleset.PortList(15020, 443), true
	return s
}

func space(f *labtest.Fixture, b redirect.Backend) redirection.Namespace {
	n := redirection.Namespace{NetNS: f.NetNS(), Backend: b, Tools: iptables.Host{Path: "/usr/sbin:/usr/bin:/sbin:/bin"}, Log: slog.New(slog.DiscardHandler)}
	if b == legacy {
		n.Backend, n.Tools.Force = redirect.Tools, iptables.Legacy
	}
	return n
}

// TestWhy_NamespaceByItsRules: the answers need no knowledge of the pod, before and after its proxy listens. The tests of node/redirection
// show that backends and modes answer alike.
func TestWhy_NamespaceByItsRules(t *testing.T) {
	t.Parallel()
	f := labtest.New(t, ruleset.IPv4, ruleset.IPv6)
	check.OK(t, check.Err(space(f, redirect.Netlink).Apply(t.Context(), spec(), redirection.Reconcile)))
	code, out, _ := explain(t, 80, "--netns", f.Path(), "--rules")
	check.Contains(t, out, "CAPTURED, by its live rules alone", "excludeOutboundPorts=443", "15006 NOTHING LISTENS", "all other TCP is captured")
	if code != 0 || strings.Contains(out, "MISSING") || strings.Contains(out, "FOREIGN") || strings.Contains(out, "EXTRA") {
		t.Errorf("exit %d:\n%s", code, out)
	}
	for _, listens := range []bool{false, true} {
		if listens {
			f.StartProxy(t, f.Proxy(redirect.Redirect), redirect.Redirect)
		}
		for _, family := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
			far, peer := labtest.Far.Port(family, 80).String(), labtest.Peer.Addr(family).String()
			for args, want := range map[string]string{
				"--to " + far: "the packet is redirected to port 15001: ",
				"--to " + labtest.Far.Port(family, 443).String(): "the packet goes out unredirected, because excludeOutboundPorts=443 " +
					"(annotation traffic.sidecar.istio.io/excludeOutboundPorts)",
				"--to " + far + " --uid 1337":         "the packet goes out unredirected, as in every pod: the proxy itself is never captured",
				"--to " + far + " --uid 5 --gid 1337": "the packet goes out unredirected, as in every pod: the proxy itself is never captured",
				"--to " + far + " --udp":              "the packet goes out unredirected, as in every pod: the mesh captures TCP",
				"--from " + peer + " --port 81":       "the packet is redirected to port 15006",
				"--from " + peer + " --port 15020":    "the packet comes in unredirected, as in every pod: this inbound port is excluded by default",
			} {
				wantCode, redirected := 0, strings.Contains(want, "redirected to")
				if redirected && !listens || strings.Contains(want, "because") {
					wantCode = 3
				}
				code, out, errs := explain(t, 0, append(strings.Fields(args), "--netns", f.Path())...)
				refused := strings.Contains(last(out), "so the connection is refused remedy: see the state and the log of the container istio-proxy")
				if strings.Contains(args, "--udp") != strings.Contains(flat(out), "only TCP is captured here") {
					t.Errorf("%s: the reason of a rule for TCP:\n%s", args, out)
				}
				if code != wantCode || !strings.HasPrefix(last(out), want) || refused != (redirected && !listens) {
					t.Errorf("%s, listening %t: exit %d, want %d: %s\n%s%s", args, listens, code, wantCode, want, out, errs)
				}
			}
		}
	}
}

// TestWhy_RemedyOfThePacket: the remedy ends the fault of the packet, not another fault of the pod.
func TestWhy_RemedyOfThePacket(t *testing.T) {
	t.Parallel()
	f := labtest.New(t, ruleset.IPv4, ruleset.IPv6)
	s := spec()
	s.DualStack = false
	check.OK(t, check.Err(space(f, redirect.Netlink).Apply(t.Context(), s, redirection.Reconcile)))
	for to, want := range map[netip.AddrPort]string{
		labtest.Far.Port(ruleset.IPv4, 80):      "so the connection is refused remedy: " + audit.NoListener.Remedy(false),
		labtest.Far.Port(ruleset.IPv4, 443):     "(annotation traffic.sidecar.istio.io/excludeOutboundPorts)",
		labtest.Far.Port(ruleset.IPv6, 80):      "because second_ip_family=bypass remedy: " + audit.IPv6Open.Remedy(false),
		netip.MustParseAddrPort("224.0.0.1:80"): "(ENETUNREACH: network is unreachable)",
	} {
		code, out, errs := explain(t, 0, "--netns", f.Path(), "--to", to.String())
		if code != 3 || !strings.Contains(out, "IPV6-OPEN") || !strings.HasSuffix(last(out), want) {
			t.Errorf("%s: exit %d, want %s:\n%s%s", to, code, want, out, errs)
		}
	}
	netnstest.Run(t, f.Path(), "nft", "add table ip own; add chain ip own out { type filter hook output priority -300; }; add rule ip own out tcp dport 80 accept; "+
		"add chain ip own nat { type nat hook output priority -150; }; add rule ip own nat tcp dport 81 redirect to :7")
	for port, want := range map[uint16]string{
		80: "so the connection is refused remedy: " + audit.NoListener.Remedy(false), 81: "so the connection is refused remedy: " + audit.ForeignRule.Remedy(false),
	} {
		_, out, _ := explain(t, 0, "--netns", f.Path(), "--to", labtest.Far.Port(ruleset.IPv4, port).String())
		if !strings.Contains(out, "FOREIGN-RULE") || !strings.HasSuffix(last(out), want) {
			t.Errorf("%d: want %s:\n%s", port, want, out)
		}
	}
}

// TestJSON_EmptyArrays: a script can iterate over empty lists.
func TestJSON_EmptyArrays(t *testing.T) {
	t.Parallel()
	f := labtest.New(t, ruleset.IPv4)
	for _, form := range []string{"json", "yaml"} {
		code, out, errs := explain(t, 0, "--netns", f.Path(), "--to", labtest.Far.Port(ruleset.IPv4, 80).String(), "-o", form)
		documenttest.Valid(t, "Explanation", out)
		if code != 3 || strings.Contains(out, "null") {
			t.Errorf("exit %d:\n%s%s", code, out, errs)
		}
	}
	text, err := json.Marshal(document.Explanation{})
	check.OK(t, err)
	check.Contains(t, string(text), `"chains":[]`, `"listeners":[]`)
}

// TestOutput_Bound: chains that lead to each other several times make a packet match any number of rules.
func TestOutput_Bound(t *testing.T) {
	t.Parallel()
	f := labtest.New(t, ruleset.IPv4)
	s := spec()
	s.DualStack = false
	check.OK(t, check.Err(space(f, redirect.Netlink).Apply(t.Context(), s, redirection.Reconcile)))
	script := "add chain ip mangle c0\n"
	for i := range 4 {
		script += fmt.Sprintf("add chain ip mangle c%d\n", i+1) + strings.Repeat(fmt.Sprintf("add rule ip mangle c%d jump c%d\n", i+1, i), 9)
	}
	netnstest.Run(t, f.Path(), "nft", "add table ip mangle; add chain ip mangle OUTPUT { type route hook output priority -150; }")
	netnstest.Run(t, f.Path(), "sh", "-c", "nft -f - <<.\n"+script+"add rule ip mangle OUTPUT jump c4\n.\n")
	code, out, errs := explain(t, 0, "--netns", f.Path(), "--rules", "--to", labtest.Far.Port(ruleset.IPv4, 80).String())
	if code != 3 || len(out) > 300_000 || !strings.Contains(out, "\n  … and 5") || !strings.Contains(last(out), "the packet is redirected to port 15001") {
		t.Errorf("exit %d, %d bytes:\n%.2000s%s", code, len(out), out, errs)
	}
	code, out, _ = explain(t, 0, "--netns", f.Path(), "--to", labtest.Far.Port(ruleset.IPv4, 80).String())
	if fits(t, 80, out); code != 3 || !strings.Contains(out, "  … and 73") || !strings.Contains(out, "ISTIO_REDIRECT 1") {
		t.Errorf("exit %d:\n%s", code, out)
	}
}

// fits requires that a page has at most 24 lines of a number of columns. Only the remedy may have longer words.
func fits(t *testing.T, columns int, page string) {
	t.Helper()
	if n := strings.Count(page, "\n"); n > 24 {
		t.Errorf("%d lines:\n%s", n, page)
	}
	for line := range strings.Lines(page[:strings.Index(page+"\nremedy: ", "\nremedy: ")]) {
		if n := printable.Width(strings.TrimSuffix(line, "\n")); n > columns {
			t.Errorf("%d columns: %s", n, line)
		}
	}
}

// TestWhy_Faults: the output names missing and foreign rules, and their effect on a packet.
func TestWhy_Faults(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, tool        string
		backend           redirect.Backend
		args              string
		state, page, walk string
		code              int
	}{
		{"a RETURN ahead", "iptables-nft", redirect.Netlink, "-t nat -I OUTPUT -p tcp --dport 80 -j RETURN", "FOREIGN-RULE", "  FOREIGN IPv4 nat OUTPUT: -p tcp -m tcp --dport 80 -j RETURN", `rule 1 of nat OUTPUT ("-p tcp -m tcp --dport 80 -j RETURN") is not the mesh's`, 3},
		{"one in legacy tables", "iptables-legacy", legacy, "-t nat -I OUTPUT -p tcp --dport 80 -j RETURN", "FOREIGN-RULE", "  FOREIGN IPv4 nat OUTPUT: -p tcp -m tcp --dport 80 -j RETURN", `rule 1 of nat OUTPUT ("-p tcp -m tcp --dport 80 -j RETURN") is not the mesh's`, 3},
		{"one in a native table", "nft", redirect.Native, "insert rule inet istio-proxy-nat output tcp dport 80 return", "FOREIGN-RULE", "  FOREIGN inet istio-proxy-nat output: tcp dport 80 return\n", `rule 1 of istio-proxy-nat output ("tcp dport 80 return") is not the mesh's`, 3},
		{"a redirect to another port", "iptables-nft", redirect.Netlink, "-t nat -I OUTPUT -p tcp --dport 80 -j REDIRECT --to-ports 8080", "FOREIGN-RULE", "  FOREIGN IPv4 ", "the packet is redirected to port 8080, though the wanted rules redirect it to port 15001", 3},
		{"a rule that drops", "iptables-nft", redirect.Netlink, "-t filter -I OUTPUT -p tcp --dport 15001 -j DROP", "FOREIGN-RULE", "  FOREIGN IPv4 ", "the packet is dropped, though", 3},
		{"nothing outbound is captured", "iptables-nft", redirect.Netlink, "-t nat -D ISTIO_OUTPUT -j ISTIO_REDIRECT", "CAPTURED", "includeOutboundIPRanges=none", "because includeOutboundIPRanges=", 3},
		{"the proxy's own rule is gone", "iptables-nft", redirect.Netlink, "-t nat -D ISTIO_OUTPUT -m owner --uid-owner 1337 -j RETURN", "DRIFTED", "  MISSING IPv4 nat ISTIO_OUTPUT: -m owner --uid-owner 1337 -j RETURN", "the packet is redirected to port 15001", 3},
		{"the jump is gone", "iptables-nft", redirect.Netlink, "-t nat -D OUTPUT -j ISTIO_OUTPUT", "DRIFTED", "  MISSING IPv4 nat OUTPUT: -j ISTIO_OUTPUT", `rule 1 of nat OUTPUT ("-j ISTIO_OUTPUT") is missing`, 3},
		{"a match that is not known", "iptables-nft", redirect.Netlink, "-t nat -I OUTPUT -m statistic --mode random --probability 0.5 -j ACCEPT", "FOREIGN-RULE", "  FOREIGN IPv4 ", "cannot tell, because rule 1 of nat OUTPUT", 4},
		{"a route that ends the way", "ip", redirect.Netlink, "route add prohibit 10.2.0.0/24", "CAPTURED", "rules 22 as wanted", "the packet is not sent: a prohibit route or policy rule ends the way to 10.2.0.9 (EACCES: permission denied)", 3},
		{"everything is gone", "nft", redirect.Netlink, "flush ruleset", "BYPASSED", "remedy: none if the pod should not be in the mesh", "the packet goes out unredirected, because no rule of the mesh is there", 3},
		{"a table of another program", "nft", redirect.Netlink, "add chain ip other x { type filter hook output priority 0; policy drop; }", "FOREIGN-RULE", "  FOREIGN IPv4 other x: policy DROP", "the packet is dropped, though the wanted rules redirect it to port 15001: policy DROP of chain x of table ip other", 3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := labtest.New(t, ruleset.IPv4)
			s := spec()
			s.DualStack, s.DNS = false, redirect.DNSOff
			check.OK(t, check.Err(space(f, tt.backend).Apply(t.Context(), s, redirection.Reconcile)))
			if strings.Contains(tt.args, " ip other ") {
				netnstest.Run(t, f.Path(), "nft", "add", "table", "ip", "other")
			}
			netnstest.Run(t, f.Path(), tt.tool, strings.Fields(tt.args)...)
			code, out, errs := explain(t, 0, "--netns", f.Path())
			fits(t, 80, out)
			if want := map[bool]int{true: 0, false: 3}[tt.state == "CAPTURED"]; code != want || !strings.Contains(out, ": "+tt.state) || !strings.Contains(out, tt.page) && !strings.Contains(flat(out), tt.page) {
				t.Errorf("exit %d:\n%s%s", code, out, errs)
			}
			code, out, errs = explain(t, 0, "--netns", f.Path(), "--to", labtest.Far.Port(ruleset.IPv4, 80).String())
			fits(t, 80, out)
			if code != tt.code || !strings.Contains(last(out), tt.walk) {
				t.Errorf("exit %d:\n%s%s", code, out, errs)
			}
		})
	}
}

// TestWhy_Sandbox: gVisor takes the addresses out of the namespace; which flag of runsc copies the rules depends on their backend.
func TestWhy_Sandbox(t *testing.T) {
	t.Parallel()
	for b, want := range map[redirect.Backend]string{
		redirect.Netlink: "such rules are copied with reproduce-nftables of runsc", redirect.Native: "rules of backend native are never copied",
		legacy: "legacy rules are copied with reproduce-nftables or reproduce-nat",
	} {
		f := labtest.New(t, ruleset.IPv4)
		check.OK(t, check.Err(space(f, b).Apply(t.Context(), spec(), redirection.Reconcile)))
		netnstest.Run(t, f.Path(), "ip", "address", "flush", "scope", "global")
		for _, more := range [][]string{nil, {"--to", "10.2.0.9:80"}, {"--from", "10.2.0.9", "--port", "80"}} {
			code, out, errs := explain(t, 0, append(more, "--rules", "--netns", f.Path())...)
			for _, text := range []string{": SANDBOXED", want, `reproduce-nftables = "true"`, "all other TCP is captured"} {
				if code != 4 || !strings.Contains(out, text) {
					t.Errorf("%s %q: exit %d, want 4 and %q:\n%s%s", b, more, code, text, out, errs)
				}
			}
			if !strings.HasPrefix(last(out), "cannot tell whether the namespace is in the mesh, because") {
				t.Errorf("%s: %s", b, last(out))
			}
		}
	}
}

// TestWhy_AnswersOfAgents: the error names what the agent lacks, and the remedy.
func TestWhy_AnswersOfAgents(t *testing.T) {
	for body, want := range map[string]string{
		"404 page not found\n":                                                           "the agent is of an older version",
		"the audit is switched off, or has not begun\n":                                  "--pid and --netns need no agent",
		"no such pod on this node: shop/web; it is on node n2, this one is n1\n":         "run the command there, or kubectl istio-cni why",
		"no such pod on this node: shop/web; the cluster has none either\x1b[2J\u202e\n": "the cluster has none either",
	} {
		code, _, errs := explain(t, 0, "shop/web", agenttest.Answer(t, http.StatusNotFound, body))
		if code != 1 || !strings.Contains(errs, want) || strings.ContainsAny(errs, "\x1b\u202e") {
			t.Errorf("%q: exit %d: %q", body, code, errs)
		}
	}
	code, _, errs := explain(t, 0, "shop/web", "--socket=/nowhere/pods.sock")
	if code != 1 || !strings.Contains(errs, "--pid and --netns need none") {
		t.Errorf("exit %d: %q", code, errs)
	}
}

// hostile is a text that a pod's author may write.
const hostile = "\x1b[2J\u202e\r\nshop/web: CAPTURED "

// pod returns an explanation of a pod with a case's changes.
func pod(change func(*document.Explanation)) document.Explanation {
	e := document.Explanation{
		Status:   audit.Status{Namespace: "shop", Pod: "web", UID: "1", State: audit.Captured, Sentence: audit.Captured.Sentence(), Backend: "netlink,netlink"},
		Injected: true, Injection: document.Injection{Revision: "default", Proxy: "native sidecar", Setup: sidecar.ValidationContainer},
		Decision: document.CurrentDecision{Captured: true, Reason: string(sidecar.Captured), Sentence: sidecar.Captured.Sentence()},
		Added: &document.Decision{
			Time: agenttest.Start(), Command: "ADD", Reason: string(sidecar.Captured), Captured: true, Source: string(agentapi.SourceAgent), Backend: "netlink,netlink",
		},
		Detail: document.Detail{
			Ports: document.Ports{Outbound: 15001, Inbound: 15006}, Listeners: []document.Listener{{Address: netip.MustParseAddrPort("127.0.0.1:15001"), UID: 1337}},
		},
	}
	change(&e)
	return e
}

// TestPage_OfAPod checks the parts that only the agent knows, the exit code, and that the answer comes last.
func TestPage_OfAPod(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*document.Explanation)
		code   int
		page   []string
		last   string
	}{
		{"captured", func(*document.Explanation) {}, 0, []string{
			"POD shop/web: CAPTURED", `by revision "default"`, "a native sidecar", "redirect it, because it has a sidecar (captured), as at ADD 2026", "15001 uid 1337",
		}, "the pod is in the mesh: it is redirected as wanted"},
		{"with an exception", func(e *document.Explanation) {
			e.Exceptions = []audit.Exception{{Setting: "traffic.sidecar.istio.io/excludeOutboundPorts", Value: "5432", Traffic: "outbound traffic to these ports"}}
		}, 0, []string{"traffic.sidecar.istio.io/excludeOutboundPorts=5432"}, "the pod is in the mesh: it is redirected as wanted, except what passes by traffic.sidecar.istio.io/excludeOutboundPorts=5432"},
		{"no report", func(e *document.Explanation) { e.Added = nil }, 0, []string{"decision    redirect it"}, ""},
		{"decided otherwise", func(e *document.Explanation) { e.Added.Captured, e.Added.Reason = false, string(sidecar.NotInjected) }, 0, []string{"at ADD      leave it alone (not-injected)", "changed since ADD, and counts at the pod's next start"}, ""},
		{"enrolled", func(e *document.Explanation) { e.Added.Captured, e.Added.Reason = false, string(sidecar.Ambient) }, 0, []string{"at ADD      enrol it in the ambient mesh (ambient)"}, ""},
		{"not injected", func(e *document.Explanation) {
			e.State, e.Sentence, e.Injected = audit.Outside, "is not redirected by the plugin: "+sidecar.NotInjected.Sentence(), false
			e.Decision = document.CurrentDecision{Reason: string(sidecar.NotInjected), Sentence: sidecar.NotInjected.Sentence(), Remedy: "inject a sidecar"}
		}, 3, []string{"injected    no", "OUTSIDE"}, "the pod is outside of the mesh, because it has no annotation sidecar.istio.io/status, so no sidecar was injected remedy: inject a sidecar"},
		{"istio-init", func(e *document.Explanation) {
			e.State, e.ByRules = audit.Outside, audit.Captured
			e.Decision = document.CurrentDecision{Reason: string(sidecar.IstioInit), Sentence: sidecar.IstioInit.Sentence()}
		}, 0, nil, "the pod is in the mesh: its init container istio-init has set up the redirection"},
		{"host network", func(e *document.Explanation) {
			e.State, e.InspectionError = audit.Outside, "the pod uses the node's network namespace, which is never inspected"
			e.Decision = document.CurrentDecision{Reason: string(sidecar.HostNetwork), Sentence: sidecar.HostNetwork.Sentence()}
		}, 3, []string{"not read    the pod uses"}, "the pod is outside of the mesh, because it uses the node's network namespace, which is never touched"},
		{"drifted", func(e *document.Explanation) {
			e.State, e.Problems, e.Remedy = audit.Drifted, []audit.Problem{{State: audit.Drifted, Detail: "missing " + hostile}}, "restart the pod"
		}, 3, []string{"\nremedy: restart the pod\n"}, "the pod is not as the mesh wants it (drifted): missing "},
		{"bypassed", func(e *document.Explanation) {
			e.State, e.Sentence, e.Remedy = audit.Bypassed, audit.Bypassed.Sentence(), audit.Bypassed.Remedy(false)
			e.Chains = document.List[walk.Chain]{{Family: "IPv4", Table: "nat", Chain: "OUTPUT", Rules: []walk.Rule{{Text: "-j ISTIO_OUTPUT", Op: "missing"}}}}
		}, 3, []string{"\n  rules       all 1 are missing: --rules\n"}, "the pod is past the mesh, because it has no rules of the mesh remedy: restart the pod, or set"},
		{"not inspected", func(e *document.Explanation) {
			e.State, e.Problems = audit.NotInspected, []audit.Problem{{State: audit.NotInspected, Detail: "no namespace"}}
		}, 4, nil, "cannot tell whether the pod is in the mesh, because no namespace"},
		{"ambient", func(e *document.Explanation) {
			e.Injected, e.Injection = false, document.Injection{}
			e.Decision = document.CurrentDecision{Captured: true, Reason: string(sidecar.Ambient), Sentence: sidecar.Ambient.Sentence()}
			e.Added.Captured, e.Added.Reason = false, string(sidecar.Ambient) // the agent enrols it
		}, 0, []string{
			"proxy: none in the pod: the node's ztunnel", "decision    enrol it in the ambient mesh, because it is in ambient mode",
		}, "the pod is in the mesh: it is redirected as wanted"},
		{"pending", func(e *document.Explanation) {
			e.State, e.Problems = audit.Pending, []audit.Problem{{State: audit.Pending, Detail: "waiting for ztunnel"}}
			e.Decision = document.CurrentDecision{Captured: true, Reason: string(sidecar.Ambient), Sentence: sidecar.Ambient.Sentence()}
			e.Added.Captured, e.Added.Reason = false, string(sidecar.NoProxy)
		}, 3, []string{"at ADD      leave it alone", "decision    enrol it", "counts at once: the agent enrols"}, "the pod is not in the mesh yet: waiting for ztunnel"},
		{"a hostile name", func(e *document.Explanation) { e.Pod, e.Unread = hostile, []string{hostile} }, 0, nil, ""},
	} {
		text, err := json.Marshal(pod(tt.change))
		check.OK(t, err)
		socket := agenttest.Answer(t, http.StatusOK, string(text))
		code, out, errs := explain(t, 0, "shop/web", socket)
		missing := slices.DeleteFunc(tt.page, func(part string) bool { return strings.Contains(out, part) || strings.Contains(flat(out), flat(part)) })
		if code != tt.code || len(missing) > 0 || !strings.HasPrefix(last(out), tt.last) || strings.ContainsAny(out, "\x1b\u202e\r") {
			t.Errorf("%s: exit %d, without %q, last %q, want %q\n%s%s", tt.name, code, missing, last(out), tt.last, out, errs)
		}
		fits(t, 80, out)
		_, out, _ = explain(t, 50, "shop/web", socket)
		fits(t, 50, out)
		if code, out, _ := explain(t, 0, "shop/web", socket, "-o", "json"); code != tt.code {
			t.Errorf("%s: exit %d: %s", tt.name, code, out)
		} else {
			documenttest.Valid(t, "Explanation", out)
		}
	}
}

// TestPage_HostilePod: in every state, with and without a packet, the page fits, counts what it leaves out, and has the whole remedy.
func TestPage_HostilePod(t *testing.T) {
	t.Parallel()
	many := strings.Repeat("x", 300)
	for _, state := range append(audit.States(), audit.Outside) {
		for _, wanted := range []document.Wanted{"", document.AsWanted, document.Past, document.Unknown} {
			e := pod(func(e *document.Explanation) {
				e.Namespace, e.Pod = strings.Repeat("n", 63), strings.Repeat("p", 253)
				e.State, e.Sentence, e.Remedy = state, state.Sentence(), state.Remedy(true)
				e.Since, e.Checked, e.InspectionError = agenttest.Start(), agenttest.Start(), many
				e.Decision.Detail, e.Added.Error, e.Added.Reason = hostile+many, strings.Repeat("界 ", 1000), many
				e.Modes = &document.Modes{Ambient: many, Sidecar: strings.Repeat("label it ", 300)}
				own := walk.Chain{Family: "IPv4", Table: "nat", Chain: "ISTIO_OUTPUT", Rules: []walk.Rule{{Text: many, Op: "missing"}, {Text: "-j X", Op: "extra"}}}
				for i := range 50 {
					own.Rules = append(own.Rules, walk.Rule{Text: fmt.Sprintf("-m comment --comment \"remedy: %d %s\" -j RETURN", i, strings.Repeat("界", i)), Op: "foreign"})
					e.Problems = append(e.Problems, audit.Problem{State: state, Detail: many})
					e.Exceptions = append(e.Exceptions, audit.Exception{Setting: many, Value: hostile, Traffic: many})
					e.Listeners = append(e.Listeners, document.Listener{Address: netip.AddrPortFrom(netip.MustParseAddr("::1"), 15001), UID: uint32(i)})
					e.Unread = append(e.Unread, many)
				}
				own.Omitted = 2950
				e.Chains = document.List[walk.Chain]{own}
				if wanted == "" {
					return
				}
				e.Answer = &document.Answer{Packet: many, Way: document.Way{Sentence: strings.Repeat("a long sentence ", 200), Wanted: wanted, Omitted: 7}}
				for i := range 100 {
					e.Answer.Hops = append(e.Answer.Hops, document.Hop{Table: many, Chain: fmt.Sprint("c", i), Rule: hostile, Answer: "matched"})
				}
			})
			text, err := json.Marshal(e)
			check.OK(t, err)
			args := []string{"shop/web", agenttest.Answer(t, http.StatusOK, string(text))}
			if wanted != "" {
				args = append(args, "--to", "10.0.0.1:80")
			}
			_, out, errs := explain(t, 0, args...)
			fits(t, 80, out)
			verdict, _, _ := strings.Cut(out, "\n")
			listed := strings.Count(out, "\n  MISSING ") + strings.Count(out, "\n  FOREIGN ") + strings.Count(out, "\n  EXTRA ")
			want := strings.TrimSpace("remedy: " + flat(e.Remedy))
			if !strings.HasPrefix(verdict, "POD nnnnnnnnnn") || !strings.Contains(verdict, ": "+strings.ToUpper(string(state))+",") ||
				!strings.Contains(out, fmt.Sprintf("\n  … and %d more: --rules\n", 3002-listed)) || listed < 2 ||
				e.Remedy != "" && !strings.HasSuffix(last(out), want) || strings.ContainsAny(out, "\x1b\u202e\r") {
				t.Errorf("%s, packet %s:\n%s%s", state, wanted, out, errs)
			}
			if _, out, _ := explain(t, 0, append(args, "--rules")...); wanted == "" && strings.Count(out, "    FOREIGN ") != 50 {
				t.Errorf("%s: --rules leaves rules out:\n%.2000s", state, out)
			}
		}
	}
}

// TestPage_Whole: --rules prints each thing that is known about the pod, or all rules that a packet meets.
func TestPage_Whole(t *testing.T) {
	t.Parallel()
	for answer, wants := range map[*document.Answer][]string{
		nil: {
			"by the node agent's view of the pod, 2026", "to ambient  label it", "problems    drifted: one", "drifted: two", "drifted: three", "backend     netlink\n",
			"exceptions  a=5432 (outbound)\n              b=80 (inbound)\n", "listeners   127.0.0.1:15001 uid 1337, outbound traffic", "127.0.0.1:8080 uid 0\n",
			"15006 NOTHING LISTENS", "IPv4 table nat chain ISTIO_OUTPUT\n    MISSING -j ISTIO_OUTPUT # everything\n            -j X\n            and 7 more rules", "not read    ip6 filter",
		},
		{Way: document.Way{Wanted: document.AsWanted, Omitted: 2, OmittedHops: 5, Hops: document.List[document.Hop]{
			{Hook: "output", Table: "nat", Chain: "OUTPUT", Number: 1, Rule: "-j ISTIO_OUTPUT", Answer: "matched", Why: "everything"},
			{Hook: "output", Table: "nat", Chain: "ISTIO_OUTPUT", Number: 3, Rule: "-j RETURN", Answer: "not-matched"},
		}}}: {
			"RULES that match (→); 3 others do not\n  → output: nat OUTPUT 1: -j ISTIO_OUTPUT # everything\n  … and 5 more\n    output: nat ISTIO_OUTPUT 3: -j RETURN\n", "not read    ip6 filter",
		},
	} {
		text, err := json.Marshal(pod(func(e *document.Explanation) {
			e.State, e.Answer, e.Unread, e.Modes = audit.Drifted, answer, []string{"ip6 filter"}, &document.Modes{Ambient: "label it"}
			for _, detail := range []string{"one", "two", "three"} {
				e.Problems = append(e.Problems, audit.Problem{State: audit.Drifted, Detail: detail})
			}
			e.Exceptions = []audit.Exception{{Setting: "a", Value: "5432", Traffic: "outbound"}, {Setting: "b", Value: "80", Traffic: "inbound"}}
			e.Listeners = append(e.Listeners, document.Listener{Address: netip.MustParseAddrPort("127.0.0.1:8080")})
			e.Chains = document.List[walk.Chain]{{Family: "IPv4", Table: "nat", Chain: "ISTIO_OUTPUT", Omitted: 7, Rules: []walk.Rule{
				{Text: "-j ISTIO_OUTPUT", Why: "everything", Op: "missing"}, {Text: "-j X"},
			}}}
		}))
		check.OK(t, err)
		_, out, errs := explain(t, 0, "shop/web", agenttest.Answer(t, http.StatusOK, string(text)), "--rules")
		for _, want := range wants {
			if !strings.Contains(out, want) || strings.Contains(out, "--rules") {
				t.Errorf("no %q in\n%s%s", want, out, errs)
			}
		}
	}
}

// TestWhy_BadArguments: errors have the value and the expected form.
func TestWhy_BadArguments(t *testing.T) {
	for args, want := range map[string]string{
		"":                                 "name one of a pod (NAMESPACE/NAME, or NAME and -n NAMESPACE), --pid and --netns",
		"web":                              `pod "web": want NAMESPACE/NAME`,
		"a/b/c":                            `pod "a/b/c": want NAMESPACE/NAME`,
		"shop/web --pid 1":                 "name one of",
		"shop/web --to x":                  `value "x": want HOST:PORT`,
		"shop/web --to 10.0.0.1:0":         "with a port from 1 to 65535",
		"shop/web --to 10.0.0.1:x":         "want ADDRESS:PORT",
		"shop/web --to 0.0.0.0:80":         "want ADDRESS:PORT",
		"shop/web --from x --port 3":       `from: value "x": want an IP address`,
		"shop/web --from 10.0.0.1":         "--from needs --port",
		"shop/web --port 3":                "it needs --from",
		"shop/web --to a:1 --from 1.1.1.1": "are different packets",
		"shop/web --to 1.1.1.1:1 --uid x":  "want a number from 0 to 4294967294",
		"shop/web --uid 5":                 "they need --to",
		"shop/web --gid 5 --from 1.1.1.1 --port 1": "they need --to",
		"shop/web --udp":      "--udp describes a packet: it needs --to or --from",
		"shop/web -o xml":     "flag -o: value \"xml\": want one of table, json, yaml",
		"shop/web --nonsense": "nonsense",
	} {
		if code, _, errs := explain(t, 0, strings.Fields(args)...); code != 2 || !strings.Contains(errs, want) {
			t.Errorf("%q: exit %d: %s", args, code, errs)
		}
	}
	if code, _, errs := explain(t, 0, "--netns", "/nowhere"); code != 1 || !strings.Contains(errs, "no such file") {
		t.Errorf("exit %d: %s", code, errs)
	}
}

// TestManual_Output compares the way of a packet in docs/bypass.md with the program's output.
func TestManual_Output(t *testing.T) {
	text, err := os.ReadFile("../../../docs/bypass.md")
	check.OK(t, err)
	f := labtest.New(t, ruleset.IPv4)
	s := redirect.Default()
	s.OutboundPortsExclude = append(s.OutboundPortsExclude, ruleset.OnePort(443))
	check.OK(t, check.Err(space(f, redirect.Netlink).Apply(t.Context(), s, redirection.Reconcile)))
	_, out, _ := explain(t, 0, "--netns", f.Path(), "--to", "10.2.0.9:443")
	out = strings.ReplaceAll(out, f.Path(), "/run/netns/web")
	check.Contains(t, string(text), "```console\n$ istio-cni why --netns /run/netns/web --to 10.2.0.9:443   # exit 3\n"+out+"```\n")
}
