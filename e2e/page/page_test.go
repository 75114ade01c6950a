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
		hostile:   injected("shop", hostile, "10.88.0.6", false, map[string]string{"excludeInboundPorts": hostile}),
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
	n.inside(n.add(p.flushed), "nft flush ruleset")
	n.inside(n.add(p.drifted), "iptables-nft -t nat -D ISTIO_OUTPUT 1")
	n.inside(n.add(p.unreached), "iptables-nft -t nat -F OUTPUT")
	n.inside(n.add(p.foreign), "iptables-nft -t nat -I OUTPUT -p tcp -j RETURN")
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
	b.see("#agent", "on node "+nodeName)
	b.see("#ready", "selftest: ready")

	b.see("#states", "all: 5007", "bypassed: 1", "captured: 1", "drifted: 2", "foreign-rule: 1", "no-listener: 1", "outside: 5000")
	b.see("#page", "1 to 50 of 5007")
	b.see("#decisions", "shop/flushed", "captured", "ms")
	if rows, bars := b.count(`#pods tr`), b.count(`#decisions rect`); rows != 50 || bars < 8 {
		t.Errorf("%v rows, %v bars", rows, bars)
	}
	b.survives("#pods a")
	b.click("#next")
	b.see("#page", "51 to 100 of 5007")
	b.click(`#states [data-state="outside"]`)
	b.see("#page", "1 to 50 of 5000")
	b.click(`#states [data-state="all"]`)
	b.write("#search", "shop/")
	b.see("#found", "7 pods of 5007")
	b.keep("page-pods.png", "body")
	b.write("#search", "no rule of the mesh")
	b.see("#found", "1 pod of 5007")
	b.see("#pods", "shop/flushed", "bypassed")

	b.click("#pods a")
	b.see("#pod-title", "shop/flushed")
	b.see("#state .bad", "bypassed")
	b.see("#state", "has no rules of the mesh", "What to do: restart the pod")
	b.see(`#path [data-kind="hook"].bad`, "PREROUTING")
	if red := b.count(`#path .wire.bad`); red < 2 {
		t.Errorf("%v red wires", red)
	}
	b.ask("out", "to", "10.0.0.1:80")
	b.see("#verdict.bad", "The packet goes out unredirected, though the wanted rules redirect it to port 15001")

	b.visit("#shop/web") // as "kubectl istio-cni dashboard shop/web" opens it
	b.see("#state", "captured", "is redirected as wanted", "excludeOutboundPorts=5432")
	b.see("#path", "inbound", "outbound", "outside", "PREROUTING", "OUTPUT", "nat ISTIO_OUTPUT", "nat ISTIO_INBOUND", "proxy :15001", "proxy :15006", "application", "listens")
	b.see("#rules", "nat, chain ISTIO_OUTPUT", "-j ISTIO_REDIRECT")
	b.see("#listeners", "0.0.0.0:15006")
	if red := b.count(`#path .bad`); red != 0 {
		t.Errorf("%v red parts of a pod that is captured", red)
	}
	b.walks()
	b.fits()

	b.visit("#shop/drifted")
	b.see("#state", "drifted", "missing")
	b.see(`#path .chain.bad`, "nat ISTIO_OUTPUT", "1 missing")
	b.see("#rules .op", "missing")
	b.keep("page-drifted.png", "#pod-title")

	b.visit("#shop/unreached")
	b.see(`#path [data-lane="outbound"] .chain.bad`, "nat OUTPUT", "1 missing")
	b.see("#path", "no rule leads here")
	if red := b.count(`#path [data-lane="inbound"] .bad`); red != 0 {
		t.Errorf("%d red parts of the lane whose rules are as wanted", red)
	}
	b.visit("#shop/foreign")
	b.see("#state", "foreign-rule", "-A OUTPUT -p tcp -j RETURN")
	b.see(`#path [data-lane="outbound"] .chain.bad`, "nat OUTPUT", "1 foreign")
	b.ask("out", "to", "10.0.0.1:80")
	b.see("#verdict.bad", "goes out unredirected")

	b.visit("#shop/silent")
	b.see("#state", "no-listener", "nothing listens on 127.0.0.1:15001")
	b.see(`#path [data-lane="outbound"] [data-kind="proxy"].bad`, "proxy :15001", "nothing listens")
	n.remove("silent")
	b.see("#pod-failure", "no such pod on this node", "kubectl get pod -o wide")
	b.visit("#shop/nobody")
	b.see("#pod-failure", "no such pod on this node")
	b.visit("#nonsense")
	b.see("#pod-failure", "want #NAMESPACE/NAME, got #nonsense")

	b.hostile()
	b.narrow()

	n.agent.Signal(killed)
	b.see("#failure", "The agent has not answered since", "kubectl port-forward")
	b.see("#state", "captured") // what was known stays
	<-n.agent.Ended()
	n.start()
	b.Until("an end of the warning", func() bool { return b.count("#failure[hidden]") == 1 })
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
	b.see("#verdict.bad", "The packet goes out unredirected, because excludeOutboundPorts=5432")
	b.see(`#path .chain.lit`, "nat")
	b.see("#hops", "nat/ISTIO_OUTPUT rule", "--dport 5432", "matched")
	if lit := b.count(`#path [data-lane="outbound"] .wire.lit.bad`); lit != 1 {
		b.Errorf("%v ways past the proxy are lit", lit)
	}
	b.keep("page-walk.png", "#pod-title")

	b.ask("out", "to", "10.0.0.1:80", "uid", "1000")
	b.see("#verdict.good", "The packet is redirected to", "15001")
	b.see(`#path [data-kind="proxy"].lit`, "proxy :15001")
	b.see("#rules li.lit", "")

	b.ask("in", "from", "10.88.9.9", "port", "8080")
	b.see("#verdict.good", "15006")
	b.see(`#path [data-lane="inbound"] [data-kind="proxy"].lit`, "proxy :15006")

	b.ask("out", "to", "example.com:80")
	b.see("#verdict.bad", `to: value "example.com:80": want ADDRESS:PORT`, "Give an IP address, not a name")
}

// hostile looks at the pod with markup in its name and in its annotation: both are text.
func (b *browser) hostile() {
	b.Helper()
	b.visit("#")
	b.write("#search", "onerror")
	b.see("#pods a", "shop/"+hostile)
	b.click("#pods a")
	b.see("#pod-title", "shop/"+hostile)
	b.see("#state", "not-inspected", "excludeInboundPorts", "<script>alert(2)</script>")
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
	b.see("#found", "1 pod of 5006")
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
	b.keep("page-narrow.png", "#pod-title")
}

// TestWithoutTheAudit says what to do, and has the decisions.
func TestWithoutTheAudit(t *testing.T) {
	n := start(t, newPods(), 0, "AUDIT_INTERVAL=0")
	b := open(t, n.origin)
	b.look(wide)
	b.visit("")
	b.see("#pods-failure", "the audit is off: it is switched off", "Set audit.interval")
	b.see("#decisions", "shop/web")
	b.visit("#shop/web")
	b.see("#pod-failure", "the audit is off: it is switched off", "Set audit.interval")

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
