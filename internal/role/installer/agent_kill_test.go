package installer_test

import (
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestAgent_Killed kills agents with SIGKILL while they install, heal and uninstall: at random
// instants and right after a random change of the directory. After each kill, and in a loop all the time, a runtime must
// find the primary's plugins, with ours behind them or without.
func TestAgent_Killed(t *testing.T) {
	t.Parallel()
	list := primary{"10-bridge.conflist", nodetest.BridgeList, []string{"bridge", "tuning"}}
	single := primary{"10-bridge.conf", bridgeSingle, []string{"bridge"}}
	for name, tc := range map[string]struct {
		mode string
		primary
		// refused reports that the mode cannot serve the primary, which must stay unchanged.
		refused bool
	}{
		"inline conflist": {mode: "inline", primary: list},
		"inline conf":     {mode: "inline", primary: single},
		"dropin conflist": {mode: "dropin", primary: list},
		"dropin conf":     {mode: "dropin", primary: single, refused: true},
		"owned conflist":  {mode: "owned", primary: list},
		"owned conf":      {mode: "owned", primary: single},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := connected(t)
			n.Put(path.Join(nodetest.NetDir, tc.file), tc.text)
			k := &killer{t: t, n: n, mode: tc.mode, primary: tc.primary, before: n.Tree(nodetest.NetDir)}
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			k.random = rand.New(rand.NewPCG(seed, 1))
			stopReading := background(t, "what the runtime loads", k.loads)

			for range 4 {
				k.kill("install", k.start())
				k.kill("install", k.start())
				k.kill("heal", k.tampered(tc.refused))
				k.kill("uninstall", k.start("--uninstall"))
			}
			t.Logf("%d kills, %d of them right after a change", k.kills, k.aimed)

			k.installed(tc.refused)
			if code, a := n.Run("CNI_CONF_MODE="+tc.mode, "--uninstall"); code != 0 {
				t.Errorf("uninstall ends with %d: %s", code, a.Log())
			}
			stopReading()
			check.Diff(t, "uninstall left another configuration", k.before, n.Tree(nodetest.NetDir))
			if diff := cmp.Diff(map[string]string{}, n.Tree(nodetest.BinDir)); diff != "" {
				t.Errorf("programs are left: %s", diff)
			}
		})
	}
}

// bridgeSingle is a configuration of a single plugin.
const bridgeSingle = `{"cniVersion": "0.4.0", "name": "pods", "type": "bridge",
	"bridge": "cni0", "isGateway": true, "ipMasq": false,
	"ipam": {"type": "host-local", "subnet": "10.77.0.0/16", "routes": [{"dst": "0.0.0.0/0"}]}}
`

type primary struct {
	file, text string
	types      []string
}

type killer struct {
	t    *testing.T
	n    *nodetest.Node
	mode string
	primary
	before       map[string]string
	random       *rand.Rand
	kills, aimed int
}

// loads returns nil if the runtime loads the primary's plugins. A load during the rename of a file is repeated.
func (k *killer) loads() error {
	var list nodetest.Loaded
	var err error
	for range 3 {
		if list, err = k.n.Load(); !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	if err != nil {
		return err
	}
	if got := list.Types(); !slices.Equal(got, k.types) && !slices.Equal(got, append(slices.Clone(k.types), "istio-cni")) {
		return notYet("file %s has %q", list.File, got)
	}
	return nil
}

func (k *killer) start(args ...string) *nodetest.Agent {
	return k.n.Start(append([]string{"CNI_CONF_MODE=" + k.mode}, args...)...)
}

// tampered is an agent that has something to heal: the primary wrote its file again. If the mode is refused it has nothing
// to do.
func (k *killer) tampered(refused bool) *nodetest.Agent {
	a := k.start()
	if refused {
		return a
	}
	a.AwaitReady()
	for name := range k.n.Tree(nodetest.NetDir) {
		if name == "zzz-istio-cni.conf" || strings.HasSuffix(name, "/zzz-istio-cni.conf") {
			check.OK(k.t, os.Remove(k.n.Path(path.Join(nodetest.NetDir, name))))
			return a
		}
	}
	// With a field of its own, so that the stanza's absence is not the only difference.
	k.n.Put(path.Join(nodetest.NetDir, k.file), strings.Replace(k.text, `"mtu": 1400.0`, `"mtu": 1401`, 1))
	return a
}

// kill ends an agent at a random instant: after a while, or at once after a change of the directory.
func (k *killer) kill(doing string, a *nodetest.Agent) {
	k.t.Helper()
	watch, err := fsnotify.NewWatcher()
	check.OK(k.t, err)
	defer func() { _ = watch.Close() }()
	check.OK(k.t, errors.Join(watch.Add(k.n.Path(nodetest.NetDir)), watch.Add(k.n.Path(nodetest.BinDir))))
	events := make(chan fsnotify.Event)
	if k.random.IntN(3) > 0 {
		events = watch.Events
	}
	timer := time.NewTimer(time.Duration(k.random.IntN(150)) * time.Millisecond)
	if events == watch.Events {
		timer.Reset(300 * time.Millisecond)
	}
	defer timer.Stop()
	for changes := k.random.IntN(16); changes >= 0; changes-- {
		select {
		case <-events:
			if changes == 0 {
				k.aimed++
			}
			continue
		case <-timer.C:
		}
		break
	}
	a.Kill()
	k.kills++
	if err := k.loads(); err != nil {
		k.t.Errorf("killed during %s (kill %d): %v\n%v\n%s", doing, k.kills, err, k.n.Tree(nodetest.NetDir), a.Log())
	}
	file := path.Join(nodetest.NetDir, k.file)
	if _, err := os.Stat(k.n.Path(file)); doing == "heal" && err == nil { // the primary's daemon restores its file
		k.n.Put(file, k.text)
	}
}

// installed lets an agent do its work undisturbed.
func (k *killer) installed(refused bool) {
	k.t.Helper()
	a := k.start()
	if refused {
		nodetest.Await(k.t, "a refusal", func() error {
			if err := a.Ready(); err == nil || !strings.Contains(err.Error(), "use inline") {
				return notYet("the agent says: %w", err)
			}
			return nil
		})
	} else {
		a.AwaitReady()
		check.Diff(k.t, "after all the runtime loads", append(slices.Clone(k.types), "istio-cni"), types(k.t, k.n))
	}
	for _, dir := range []string{nodetest.NetDir, nodetest.BinDir} {
		for name := range k.n.Tree(dir) {
			if strings.Contains(name, ".tmp.") {
				k.t.Errorf("temporary file %s is left", name)
			}
		}
	}
	a.Kill()
}
