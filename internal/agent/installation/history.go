package installation

import (
	"log/slog"
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

// did logs and remembers a change of a file. The history has the object alone, the log also other attributes.
func (i *Installation) did(change string, object slog.Attr, others ...any) {
	i.log.With(object).Info(change, others...) //nolint:sloglint // the message is the caller's
	i.changes++
	i.remember(change + ": " + object.Value.String())
}

// remember adds a change to the history. It has a lock of its own because mu is held while a disk hangs.
func (i *Installation) remember(what string) {
	i.historyMu.Lock()
	defer i.historyMu.Unlock()
	i.history = append(i.history, Change{Time: i.now().UTC(), What: what})
	if len(i.history) > remembered {
		i.history = slices.Delete(i.history, 0, 1)
	}
}
