package nodepods

import (
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/podwork"
	"github.com/meshcni/istio-cni/internal/node/nftables/nftablestest"
)

// TestPodsThatCannotBeInspectedDelayNoOtherPod: as many pods as workers fill their namespaces with rules, one after its
// validation failed.
func TestPodsThatCannotBeInspectedDelayNoOtherPod(t *testing.T) {
	t.Parallel()
	l := newFixture(t, inPlace, func(o *Options) { o.Workers = 0 })
	var hostile []podSpec
	for i := range 4 {
		p := podSpec{name: fmt.Sprintf("hostile-%d", i), uid: fmt.Sprint(i)}
		if i == 3 {
			p = crashing("hostile-3")
		}
		p = p.at(fmt.Sprintf("10.88.0.%d", 10+i))
		path := l.Sandbox(p.ips[0] + "/24")
		nftablestest.Fill(t, path, unix.NFPROTO_IPV4, "nat", "OUTPUT", 1, 100_000)
		l.cache(p, path)
		l.set(p)
		hostile = append(hostile, p)
	}
	l.run()
	agenttest.Run(t, l.clock)
	for _, p := range hostile[:3] {
		l.waitForEvent(p, "Warning", podwork.ReasonUnverified, "unknown whether the traffic is redirected", "cannot be inspected", "more than 50000", "NET_ADMIN")
	}
	l.waitForEvent(hostile[3], "Warning", podwork.ReasonRepaired, "cannot be redirected in place", "cannot be inspected", "more than 50000", "NET_ADMIN")
	web := crashing("web").at("10.88.0.2/24")
	path := l.place(web)
	l.waitForEvent(web, "Normal", podwork.ReasonRepaired)
	l.redirected(path)
	l.waitForStates(1, 1, 0, 3)
	l.waitForCount(metrics.RepairPod, metrics.RepairSuccess, 1)
	for _, p := range hostile[:3] {
		l.oneEvent(p)
	}
	if log := l.log.String(); !strings.Contains(log, "the pod has a problem") {
		t.Errorf("the log lacks the problem:\n%s", log)
	}
}
