package installation

import (
	"slices"
	"time"
)

// remembered is the number of changes that History has at most.
const remembered = 256

// Change is one change of the node's files by this agent.
type Change struct {
	Time time.Time `json:"time"`
	// What is the change with its file.
	What string `json:"what"`
}

// History returns the last changes, the latest first.
func (i *Installation) History() []Change {
	i.historyMu.Lock()
	defer i.historyMu.Unlock()
	latest := slices.Clone(i.history)
	slices.Reverse(latest)
	return latest
}

// remember adds a change to the history. It has a lock of its own, as mu is held while a disk hangs.
func (i *Installation) remember(what string) {
	i.historyMu.Lock()
	defer i.historyMu.Unlock()
	i.history = append(i.history, Change{Time: i.now().UTC(), What: what})
	if len(i.history) > remembered {
		i.history = slices.Delete(i.history, 0, 1)
	}
}
