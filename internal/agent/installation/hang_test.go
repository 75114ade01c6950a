package installation_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/installation"
)

// TestReadiness_HangingDisk: the stanza is taken out while the disk is frozen. The agent is not ready then,
// answers both probes all the time, and is alive: a restart would not help.
func TestReadiness_HangingDisk(t *testing.T) {
	t.Parallel()
	n := newFixture(t, "10-bridge.conflist", conflist)
	clock := agenttest.NewClock()
	var disk sync.RWMutex // locked, no file can be made: as with fsfreeze(8), the call does not return
	n.disk.Ops = hooked{before: func(string, string) error {
		disk.RLock()
		defer disk.RUnlock()
		return nil
	}}
	n.health = health.NewState(health.Options{Now: clock.Now}, installation.PartBinaries, installation.PartKubeconfig, installation.PartConf)
	probe := func(path string) (int, string) {
		answer := httptest.NewRecorder()
		n.health.Handler().ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
		return answer.Code, answer.Body.String()
	}
	ready := func() bool { code, _ := probe("/readyz"); return code == http.StatusOK }
	n.running(n.agent())
	n.until(func() bool { return ready() && len(n.loaded()) == 3 })

	disk.Lock()
	thaw := sync.OnceFunc(disk.Unlock)
	defer thaw()
	n.put("net.d/10-bridge.conflist", conflist, 0o644)
	n.until(func() bool { // in small steps: a comparison that ends in time is no hang
		clock.Step(100 * time.Millisecond)
		return !ready()
	})
	if _, body := probe("/readyz"); !strings.Contains(body, "no comparison with the node's files was completed in time") {
		t.Errorf("not ready: %s", body)
	}
	clock.Step(time.Hour)
	if code, body := probe("/healthz"); code != http.StatusOK {
		t.Errorf("not alive: %s", body)
	}
	if got := n.loaded(); len(got) != 2 {
		t.Errorf("the runtime runs %q: the disk was not frozen", got)
	}
	thaw()
	n.until(func() bool { return ready() && len(n.loaded()) == 3 })
}
