// Package page tests the node agent's page in headless Chromium as a person uses it.
//
// The agent is a real process; its pods have real network namespaces, the plugin redirects them, and each fault is made in the
// namespace. The API server is a few lines: a name with markup, which no API server accepts, and 5,000 pods are parts of the test.
// A message on the console or a request to another origin fails a test, see browser.listen.
//
//	PAGE_SCREENSHOTS=$PWD/docs/images PKG=./page hack/e2e.sh     writes the screenshots of the manual
//
// Start reading at TestThePage.
package page

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
)

// hostile is a text that is markup and script, as a pod's author may write it.
const hostile = `<img src=x onerror=alert(1)><script>alert(2)</script>`

// pods are the cases of the page: one as wanted, one without rules, one with a rule less, one whose rules are not reached, one with
// a rule of others ahead, one whose proxy does not listen, and one with markup.
type pods struct{ web, flushed, drifted, unreached, foreign, silent, hostile core.Pod }

func newPods() pods {
	return pods{
		web:       injected("shop", "web", "10.88.0.2", true, map[string]string{"excludeOutboundPorts": "5432"}),
		flushed:   injected("shop", "flushed", "10.88.0.3", false, nil),
		drifted:   injected("shop", "drifted", "10.88.0.4", false, nil),
		unreached: injected("shop", "unreached", "10.88.0.7", false, nil),
		foreign:   injected("shop", "foreign", "10.88.0.8", false, nil),
		silent:    injected("shop", "silent", "10.88.0.5", true, nil),
		hostile:   injected("zoo", hostile, "10.88.0.6", false, map[string]string{"excludeInboundPorts": hostile}),
	}
}

// start starts an agent with these pods and so many of an excluded namespace.
func start(t *testing.T, p pods, more int, env ...string) *node {
	t.Helper()
	all := []core.Pod{p.web, p.flushed, p.drifted, p.unreached, p.foreign, p.silent, p.hostile}
	for i := range more {
		all = append(all, injected("batch", fmt.Sprintf("job-%04d", i), "10.89.0.1", false, nil))
	}
	n := newNode(t, all...)
	n.start(env...)
	web := n.add(p.web)
	n.listen(web, "15001", "15006", "8080")
	for script, pod := range map[string]core.Pod{
		"nft flush ruleset": p.flushed, "iptables-nft -t nat -D ISTIO_OUTPUT 1": p.drifted, "iptables-nft -t nat -F OUTPUT": p.unreached,
		"iptables-nft -t nat -I OUTPUT -p tcp -j RETURN": p.foreign,
	} {
		path := n.add(pod)
		n.listen(path, "15001", "15006")
		n.inside(path, script)
	}
	n.add(p.silent)
	return n
}

// TestThePage looks for pods, looks at them and asks for the way of packets, until the agent ends.
func TestThePage(t *testing.T) {
	p := newPods()
	n := start(t, p, 5000)
	for pod, state := range map[string]string{"web": "captured", "flushed": "bypassed", "drifted": "drifted", "unreached": "drifted", "foreign": "foreign-rule", "silent": "no-listener"} {
		n.Until(state, func() bool { return strings.Contains(n.answer("/api/pods/shop/"+pod), `"state": "`+state+`"`) })
	}
	b := open(t, n.origin)
	b.look(wide)
	b.visit("")
	b.list()
	b.bypassed()

	b.visit("#shop/web") // as "kubectl istio-cni dashboard shop/web" opens it
	b.see("#state", "✓ captured", "is redirected as wanted", "1 exception")
	b.see("#summary.good", "Inbound and outbound TCP connections go through the proxy, except what the pod's settings exclude")
	b.see(`[data-lane="inbound"]`, "clients", "PREROUTING", "7 rules, as wanted", "TCP connections", "proxy :15006", "listens", "ports 15020, 15021, 15090", "application")
	b.see(`[data-lane="outbound"]`, "OUTPUT", "proxy :15001", "excludeOutboundPorts=5432", "DNS queries (UDP): past the proxy", "127.0.0.1", "stays in the pod", "other UDP", "servers")
	b.see("#sockets-title", "3 listening sockets")
	b.see("#rules > details:not([open])", "20 rules in 6 chains are as wanted")
	if good, red := b.count(`#path .wire.real.good`), b.count(`#path .bad, #path .missing`); good != 4 || red != 0 {
		t.Errorf("%d green wires, want 4, and %d red or missing ones of a pod that is captured", good, red)
	}
	b.walks()
	for _, width := range []int64{1280, 1010, 990, 768, 390} {
		b.look(window{width, wide.height, false})
		b.fits()
		if tall := evaluate[int](b, `[...document.querySelectorAll("#path .label")].filter(e => e.getBoundingClientRect().height > 40).length`); tall != 0 {
			t.Errorf("%d labels of the picture are squeezed in a window of %d pixels", tall, width)
		}
	}
	b.look(wide)

	b.visit("#shop/drifted")
	b.see("#state", "drifted", "missing")
	b.see(`#path .chain.bad`, "nat ISTIO_OUTPUT", "1 missing")
	b.see("#rules > details[open]", "chain ISTIO_OUTPUT: 11 rules, 1 not as wanted")
	b.see("#rules .op", "missing")

	b.visit("#shop/unreached")
	b.see(`[data-lane="outbound"] .chain.bad`, "nat OUTPUT", "1 missing")
	b.see(`[data-lane="outbound"]`, "no rule leads to 3 chains", "missing: TCP connections to the proxy", "✗ TCP connections: past the proxy")
	if red := b.count(`[data-lane="inbound"] .bad`); red != 0 {
		t.Errorf("%d red parts of the lane whose rules are as wanted", red)
	}
	b.keep("page-drifted.png", "#pod-title", 880)
	b.visit("#shop/foreign")
	b.see("#state", "foreign-rule", "-A OUTPUT -p tcp -j RETURN")
	b.see(`#state .box`, "What to do", "kubectl istio-cni why -n shop foreign")
	b.see(`[data-lane="outbound"] .chain.bad`, "nat OUTPUT", "1 foreign")
	b.ask("out", "to", "10.0.0.1:80")
	b.see("#verdict.bad", "goes out unredirected")

	b.visit("#shop/silent")
	b.see("#state", "no-listener", "nothing listens on 127.0.0.1:15001", "kubectl -n shop logs silent -c istio-proxy")
	b.see(`[data-lane="outbound"] .station.proxy.bad`, "proxy :15001", "nothing listens")
	b.see(`[data-lane="outbound"] .way`, "TCP connections: refused")
	b.visit("#batch/job-0001")
	b.see("#state", "– outside", "is not redirected by the plugin")
	b.see("#summary", "its packets pass no proxy")
	b.see(`[data-lane="outbound"]`, "all packets")
	if known := b.count(`#redirected:not([hidden]), #state dl time`); known != 0 {
		t.Errorf("%d parts of the page ask about rules or times that a pod outside does not have", known)
	}
	n.remove("silent")
	b.visit("#shop/silent")
	b.see("#pod-failure", "No such pod on this node", "kubectl get pods -A -o wide")
	b.visit("#shop/nobody")
	b.see("#pod-failure", "No such pod on this node")
	b.visit("#nonsense")
	b.see("#pod-failure", "want #NAMESPACE/NAME, got #nonsense")

	b.hostile()
	b.narrow()

	n.agent.Signal(killed)
	b.see("#failure", "The agent has not answered since", "kubectl port-forward")
	b.see("#state", "captured") // what was known stays
	if readiness := evaluate[string](b, `getComputedStyle(document.querySelector("#ready")).opacity`); readiness == "1" {
		t.Error("an agent that does not answer is shown as ready")
	}
	<-n.agent.Ended()
	n.start()
	b.Until("an end of the warning", func() bool { return b.count("#failure[hidden]") == 1 })
}

// list looks at the pods of the node: the sentence, the rows, the search and the folds.
func (b *browser) list() {
	b.Helper()
	b.see("#headline.bad", "✗ 5 of 7 mesh pods on "+nodeName+" are not redirected as wanted, 1 not inspected")
	b.see("#audit", "Audit: reports only (audit.mode=report), each pod at least every 5 min · as of")
	b.see("#ready-state.good", "✓ agent ready")
	b.see("#states", "all: 7", "bypassed: 1", "captured: 1", "drifted: 2", "foreign-rule: 1", "no-listener: 1", "not-inspected: 1")
	b.see("#outside:not([open]) > summary", "5,000 pods outside of the mesh: batch 5,000")
	b.see("#pods .chip", "1 exception")
	if rows := b.count(`#pods tr`); rows != 7 {
		b.Errorf("%d rows", rows)
	}
	if wrapped := evaluate[int](b, `[...document.querySelectorAll("#pods .name a")].filter(e => e.getBoundingClientRect().height > 30).length`); wrapped != 0 {
		b.Errorf("%d names wrap", wrapped)
	}
	b.write("#search", "shop/")
	b.see("#found", "6 pods of 5,007")
	b.keep("page-pods.png", "body", 510)
	b.write("#search", " ")
	b.click("#calls-title")
	b.see("#decisions", "shop/flushed", "captured", "ms")
	if bars := b.count(`#decisions rect`); bars < 8 {
		b.Errorf("%d bars", bars)
	}
	b.survives("#pods a")
	b.click("#outside-title")
	b.see("#outside-pods .name", "5,000 pods of batch")
	b.click(`#states [data-state="drifted"]`)
	b.see("#found", "2 pods of 7")
	b.click(`#states [data-state="all"]`)
	b.write("#search", "batch/job-49")
	b.see("#found", "100 pods of 5,007")
	b.write("#search", "no rule of the mesh")
	b.see("#found", "1 pod of 5,007")
	b.see("#pods", "shop/flushed", "✗ bypassed")
}

// bypassed looks at the pod that the list shows: the real way is solid, the missing one thin, and the remedy can be copied.
func (b *browser) bypassed() {
	b.Helper()
	b.click("#pods a")
	b.see("#pod-title", "shop/flushed")
	b.see("#state .bad", "✗ bypassed")
	b.see("#state", "has no rules of the mesh", "What to do: restart the pod", "kubectl -n shop delete pod flushed", "The plugin decides")
	b.see("#summary.bad", "inbound TCP connections: past the proxy; outbound TCP connections: past the proxy")
	b.see(`#path .station.hook.bad`, "PREROUTING", "all 7 rules missing")
	b.see("#legend", "Thin grey dashes")
	b.see("#rules > details:not([open])", "all 20 rules are missing")
	style := func(selector string) string {
		return evaluate[string](b, `(s => s.borderTopStyle + " " + parseFloat(s.borderTopWidth))(getComputedStyle(document.querySelector(%q)))`, selector)
	}
	if solid, dashed := style(`#path .wire.real.bad`), style(`#path .wire.missing`); solid != "solid 3" || dashed != "dashed 1" {
		b.Errorf("the way that packets take is %s, the missing one %s", solid, dashed)
	}
	b.click("#state [data-copy]")
	b.see("#state [data-copy]", "ed") // copied, or selected where the browser forbids it
	b.ask("out", "to", "10.0.0.1:80")
	b.see("#verdict.bad", "The packet goes out unredirected, though the wanted rules redirect it to port 15001")
	b.see(`[data-lane="outbound"] .track.lit`, "the packet below: passed")
}

// ask fills the form: pairs of fields and texts.
func (b *browser) ask(direction string, pairs ...string) {
	b.Helper()
	b.click(`#walk [type="reset"]`)
	b.click(fmt.Sprintf(`#walk [value=%q]`, direction))
	for i := 0; i < len(pairs); i += 2 {
		b.fill(pairs[i], pairs[i+1])
	}
	b.press(enter) // in the last field
}

// walks asks for packets of shop/web.
func (b *browser) walks() {
	b.Helper()
	b.ask("out", "to", "10.0.0.1:5432", "uid", "1000")
	b.see("#verdict.warn", "The packet goes out unredirected, because excludeOutboundPorts=5432")
	b.see(`[data-lane="outbound"] .way .track.lit`, "the packet below: passed")
	b.see("#hops", "nat/ISTIO_OUTPUT rule", "--dport 5432", "matched")
	b.Until("the rules that match", func() bool { return b.count("#rules details[open] details[open] li.lit") >= 2 })
	b.keep("page-walk.png", "#path", 740)

	b.ask("out", "to", "10.0.0.1:80", "uid", "1000")
	b.see("#verdict.good", "The packet is redirected to", "15001")
	b.see(`[data-lane="outbound"] .way:has(.lit) .proxy`, "proxy :15001")

	b.ask("in", "from", "10.88.9.9", "port", "8080")
	b.see("#verdict.good", "15006")
	b.see(`[data-lane="inbound"] .way:has(.lit) .proxy`, "proxy :15006")

	b.ask("out", "to", "example.com:80")
	b.see("#verdict.bad", `to: value "example.com:80": want ADDRESS:PORT`, "Give an IP address, not a name")
}

// hostile looks at the pod with markup in its name and in its annotation: both are text.
func (b *browser) hostile() {
	b.Helper()
	b.visit("#")
	b.write("#search", "onerror")
	b.see("#pods a", "zoo/"+hostile)
	b.click("#pods a")
	b.see("#pod-title", "zoo/"+hostile)
	b.see("#state", "not-inspected", "excludeInboundPorts", "<script>alert(2)</script>")
	if forms := b.count("#redirected:not([hidden])"); forms != 0 {
		b.Error("the form asks for packets where no rule could be read")
	}
	if commands := b.count("#state [data-copy]"); commands != 0 {
		b.Errorf("%d commands have a name that a shell would run", commands)
	}
	if markup := b.count(`main img, main script`); markup != 0 {
		b.Errorf("%v elements come from a pod", markup)
	}
}

// narrow uses the page by the keyboard, on a telephone in the dark.
func (b *browser) narrow() {
	b.Helper()
	b.look(narrow)
	b.visit("#")
	b.write("#search", "shop/web")
	b.see("#found", "1 pod of 5,006")
	if row := evaluate[string](b, `getComputedStyle(document.querySelector("#pods tr")).display`); row != "block" {
		b.Errorf("a row is %s, not a card", row)
	}
	b.fits()
	b.do(focus("#pods a"))
	b.press(enter)
	b.see("#pod-title", "shop/web")
	b.see("#path", "proxy :15001")
	if color := evaluate[string](b, `getComputedStyle(document.body).backgroundColor`); color != "rgb(23, 24, 27)" {
		b.Errorf("the background is %s in the dark", color)
	}
	if focused := evaluate[string](b, `document.activeElement.id`); focused != "pod-title" {
		b.Errorf("%q has the focus, not the pod's name, which a screen reader reads then", focused)
	}
	b.fits()
	b.keep("page-narrow.png", "#pod-title", 1300)
}

// TestEmptyNode says how to bring pods into the mesh.
func TestEmptyNode(t *testing.T) {
	n := newNode(t)
	n.start("AUDIT_MODE=repair")
	b := open(t, n.origin)
	b.visit("")
	b.see("#headline", "No pod on "+nodeName+" is in the mesh")
	b.see("#audit", "restores lost rules (audit.mode=repair)")
	b.see("#pods-failure", "give each a sidecar", "kubectl label namespace NAMESPACE istio-injection=enabled")
	b.click("#calls-title")
	b.see("#no-decisions", "has not called the plugin")
	if tables := b.count("#listed[hidden]"); tables != 1 {
		t.Error("a table without rows is shown")
	}
	n.Must(os.Remove(filepath.Join(n.dir, "net.d/10-net.conflist")))
	b.see("#ready-state.bad", "✗ agent not ready: cni-config")
	b.see("#unready", "new pods of this node may not start", "cni-config: ", "kubectl istio-cni doctor")
}

// TestContrast: texts have a contrast of 4.5 with each background, in light and dark (WCAG 2, AA).
func TestContrast(t *testing.T) {
	n := newNode(t)
	n.start()
	b := open(t, n.origin)
	for _, dark := range []bool{false, true} {
		b.look(window{wide.width, wide.height, dark})
		b.visit("")
		pale := evaluate[[]string](b, `(() => {
			const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
			const light = name => {
				const hex = color(name).slice(1).replace(/^(.)(.)(.)$/, "$1$1$2$2$3$3");
				const [r, g, b] = [0, 2, 4].map(i => parseInt(hex.slice(i, i + 2), 16) / 255).map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4);
				return .2126 * r + .7152 * g + .0722 * b;
			};
			const ratio = (a, b) => (Math.max(light(a), light(b)) + .05) / (Math.min(light(a), light(b)) + .05);
			return ["--text", "--quiet", "--good", "--bad", "--warn", "--lit"].flatMap(text => ["--back", "--card", "--mark"].map(back => [text, back, ratio(text, back)]))
				.filter(([, , r]) => !(r >= 4.5)).map(String);
		})()`)
		if len(pale) > 0 {
			t.Errorf("dark %t: %s", dark, pale)
		}
	}
}

// TestManyPods groups pods whose cause is equal.
func TestManyPods(t *testing.T) {
	var all []core.Pod
	for i := range 3000 {
		all = append(all, injected("shop", fmt.Sprintf("web-%04d", i), fmt.Sprintf("10.90.%d.%d", i/250, i%250+1), false, nil))
	}
	n := newNode(t, all...)
	n.start()
	b := open(t, n.origin)
	b.look(wide)
	b.visit("")
	b.see("#headline.warn", "3,000 of 3,000 mesh pods on "+nodeName+" are not inspected")
	b.see("#pods .name", "3,000 pods of shop")
	b.click("#pods summary")
	b.see("#pods details", "shop/web-0000", "and 2,800 more: search for a name")
	b.write("#search", "web-2999")
	b.see("#pods a", "shop/web-2999")
}

// TestWithoutTheAudit says what to do, and has the decisions.
func TestWithoutTheAudit(t *testing.T) {
	n := start(t, newPods(), 0, "AUDIT_INTERVAL=0")
	b := open(t, n.origin)
	b.look(wide)
	b.visit("")
	b.see("#headline.warn", "The audit on "+nodeName+" is off: no pod is verified")
	b.see("#pods-failure", "The audit is off: it is switched off", "--set audit.interval=5m")
	b.click("#calls-title")
	b.see("#decisions", "shop/web")
	b.visit("#shop/web")
	b.see("#pod-failure", "The audit is off: it is switched off", "--set audit.interval=5m")

	// As a site that resolves to this address, and a page of another site, would ask.
	for name, value := range map[string]string{"Host": "evil.example:9876", "Sec-Fetch-Site": "cross-site"} {
		for _, path := range []string{"/", "/api/pods", "/decisions", "/debug/pprof/cmdline"} {
			r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, n.origin+path, nil)
			n.Must(err)
			r.Header.Set(name, value)
			if name == "Host" {
				r.Host = value
			}
			response, err := http.DefaultClient.Do(r)
			n.Must(err)
			_ = response.Body.Close()
			if response.StatusCode != http.StatusForbidden {
				t.Errorf("%s with %s: %s is answered with %d", path, name, value, response.StatusCode)
			}
		}
	}
}
