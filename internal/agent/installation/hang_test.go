package installation_test

import (
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/installation"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// frozen is a disk on which no file can be made while it is frozen: as with fsfreeze(8), the call does not return.
type frozen struct {
	hostfs.Kernel

	disk sync.RWMutex
}

func (f *frozen) Create(path string) (*os.File, error) {
	f.disk.RLock()
	defer f.disk.RUnlock()
	return f.Kernel.Create(path)
}

// manual is a clock that stands until it is moved.
type manual struct {
	mu  sync.Mutex
	now time.Time
}

func (m *manual) Now() time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.now
}

func (m *manual) add(d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.now = m.now.Add(d)
}

// TestReadinessEndsWhenTheDiskHangs: the stanza is taken out while the disk is frozen. The agent says that it knows no more,
// answers both probes all the time, and is alive: a restart would not help.
func TestReadinessEndsWhenTheDiskHangs(t *testing.T) {
	t.Parallel()
	n := newNode(t, "10-bridge.conflist", conflist)
	disk, clock := &frozen{}, &manual{now: time.Now()}
	n.disk.Ops = disk
	n.health = health.NewState(health.Options{Now: clock.Now}, installation.PartBinaries, installation.PartKubeconfig, installation.PartConf)
	probe := func(path string) (int, string) {
		answer := httptest.NewRecorder()
		n.health.Handler().ServeHTTP(answer, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
		return answer.Code, answer.Body.String()
	}
	ready := func() bool { code, _ := probe("/readyz"); return code == http.StatusOK }
	n.running(n.agent())
	n.until(func() bool { return ready() && len(n.loaded()) == 3 })

	disk.disk.Lock()
	thaw := sync.OnceFunc(disk.disk.Unlock)
	defer thaw()
	n.put("net.d/10-bridge.conflist", conflist, 0o644)
	n.until(func() bool { // in small steps: a comparison that ends in time is no hang
		clock.add(100 * time.Millisecond)
		return !ready()
	})
	if _, body := probe("/readyz"); !strings.Contains(body, "no comparison with the node's files was completed in time") {
		t.Errorf("not ready: %s", body)
	}
	clock.add(time.Hour)
	if code, body := probe("/healthz"); code != http.StatusOK {
		t.Errorf("not alive: %s", body)
	}
	if got := n.loaded(); len(got) != 2 {
		t.Errorf("the runtime runs %q: the disk was not frozen", got)
	}
	thaw()
	n.until(func() bool { return ready() && len(n.loaded()) == 3 })
}
