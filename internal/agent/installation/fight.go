package installation

import (
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
)

// A fight is two programs that undo each other's work: more than so many rewrites within the period. From then on ours
// waits, longer each time, so that neither the node's disk nor its runtime is kept busy.
const (
	fightWrites  = 5
	fightPeriod  = time.Minute
	fightPause   = 5 * time.Second
	longestPause = time.Minute
)

// fight remembers the rewrites of one artifact.
type fight struct {
	writes []time.Time
	pause  time.Duration
	until  time.Time
	told   bool
}

// wrote counts a rewrite and begins a pause when there is a fight. A fight is over when all was quiet for a period beyond
// the pause.
func (f *fight) wrote(now time.Time) {
	if n := len(f.writes); n > 0 && now.Sub(f.writes[n-1]) > f.pause+fightPeriod {
		f.pause = 0
	}
	f.writes = slices.DeleteFunc(f.writes, func(w time.Time) bool { return now.Sub(w) > longestPause+fightPeriod })
	f.writes = append(f.writes, now)
	recent := 0
	for _, w := range f.writes {
		if now.Sub(w) < fightPeriod {
			recent++
		}
	}
	if recent > fightWrites || f.pause > 0 {
		f.pause = min(max(2*f.pause, fightPause), longestPause)
		f.until, f.told = now.Add(f.pause), false
	}
}

// fightError is a rewrite that waits.
type fightError struct {
	file string
	with metrics.Rival
}

func (e *fightError) Error() string {
	return fmt.Sprintf("%s is being rewritten again and again (rival: %s), and is left alone for a while; %s", e.file, e.with, remedy(e.with))
}

// remedy says what ends a fight.
func remedy(with metrics.Rival) string {
	switch with {
	case metrics.RivalCilium:
		return "set cni.exclusive=false in Cilium's chart"
	case metrics.RivalMultus:
		return "give multus a configuration file instead of multus-conf-file=auto, or install with chained=false and provider=multus"
	case metrics.RivalInstaller:
		return "another istio-cni node agent works on this node: remove one of the two"
	case metrics.RivalUnknown:
	}
	return "find the program that writes it, or use CNI_CONF_MODE=owned or dropin"
}

// contend refuses a rewrite during the pause of a fight.
func (i *Installation) contend(a metrics.Artifact, with metrics.Rival, file string) error {
	f := i.fights[a]
	if f == nil || !i.settled[a] {
		return nil
	}
	wait := f.until.Sub(i.now())
	if wait <= 0 {
		return nil
	}
	err := &fightError{file, with}
	if f.told {
		return err
	}
	f.told = true
	i.log.Warn("backing off", slog.Duration("for", wait), slog.String("error", err.Error()))
	if i.report.Metrics != nil {
		i.report.Metrics.Fought(with)
	}
	if i.report.Warn != nil {
		i.report.Warn("CNIConfigFight", err.Error())
	}
	return err
}

// contendOver is contend for a file that is there. One that is missing is put back at once: pods need it.
func (i *Installation) contendOver(a metrics.Artifact, file string) error {
	if _, err := os.Lstat(file); err != nil {
		return nil //nolint:nilerr // whatever keeps it from being looked at, writing will tell
	}
	return i.contend(a, metrics.RivalInstaller, file)
}

// wrote counts a rewrite of what was as wanted before.
func (i *Installation) wrote(a metrics.Artifact) {
	if !i.settled[a] {
		return
	}
	if i.fights[a] == nil {
		i.fights[a] = &fight{}
	}
	i.fights[a].wrote(i.now())
}

// again is when a fight's pause ends.
func (i *Installation) again(a metrics.Artifact) time.Duration {
	if f := i.fights[a]; f != nil {
		return max(0, f.until.Sub(i.now()))
	}
	return 0
}

// rivalOf looks for who else writes the configuration: by a stanza that is not ours, as whoever overwrites the file for
// other reasons leaves none, by the plugins, and by what Cilium renames.
func rivalOf(d cniconf.Dir, primary string, others []string) metrics.Rival {
	_, n, _ := d.Loaded()
	text := strings.ToLower(strings.Join(append(slices.Clone(n.Types), append(others, primary)...), " "))
	switch {
	case slices.Contains(n.Types, cniconf.PluginType):
		return metrics.RivalInstaller
	case strings.Contains(text, "cilium"):
		return metrics.RivalCilium
	case strings.Contains(text, "multus"):
		return metrics.RivalMultus
	}
	return metrics.RivalUnknown
}
