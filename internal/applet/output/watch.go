package output

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/core/document"
)

// Watch prints rows, and then each row that changes.
type Watch[T any] struct {
	// Every is the time between two requests, Err is for failed ones.
	Every time.Duration
	Err   io.Writer
	// Request returns all rows. A row that the answer lacks has gone, unless hidden says that it can be there; hidden can be nil.
	Request func(context.Context) (all []T, hidden func(T) bool, err error)
	// Key returns a row's identity, and a text that differs if the row has changed.
	Key func(T) (id, text string)
	// Print prints rows: all of the beginning, then those that are new or different, and those that have gone.
	Print func(rows, gone []T) error
}

// Run works until ctx ends. A failed request ends it only at the beginning.
func (w Watch[T]) Run(ctx context.Context) error {
	next := time.NewTicker(w.Every)
	defer next.Stop()
	var known map[string]T
	problem := ""
	for {
		all, hidden, err := w.Request(ctx)
		switch {
		case ctx.Err() != nil:
			return nil // the user ended it
		case err != nil && known == nil:
			return err
		case err != nil && err.Error() != problem:
			_, _ = fmt.Fprintf(w.Err, "error: %v; trying again\n", err)
		}
		if problem = fmt.Sprint(err); err == nil {
			if known, err = w.compare(all, known, hidden); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-next.C:
		}
	}
}

// compare prints what differs from the known rows, and returns the rows that are known now.
func (w Watch[T]) compare(all []T, known map[string]T, hidden func(T) bool) (now map[string]T, err error) {
	now = map[string]T{}
	var changed, gone []T
	for _, row := range all {
		id, text := w.Key(row)
		before, is := known[id]
		if _, last := w.Key(before); !is || last != text {
			changed = append(changed, row)
		}
		now[id] = row
	}
	for id, row := range known {
		switch _, is := now[id]; {
		case is:
		case hidden != nil && hidden(row):
			now[id] = row
		default:
			gone = append(gone, row)
		}
	}
	if len(changed)+len(gone) > 0 {
		err = w.Print(changed, gone)
	}
	return now, err
}

// WatchPods returns a Watch of pods without Request. Selected is a parameter of Pods.
func WatchPods(c applet.Call, every time.Duration, selected bool) Watch[audit.Status] {
	begun, ended := false, "has ended"
	if selected {
		ended = "has ended, or is in another state"
	}
	return Watch[audit.Status]{
		Every: every, Err: c.Stderr,
		Key: func(s audit.Status) (id, text string) {
			return strings.Join([]string{s.Node, s.Namespace, s.Pod}, "/"), fmt.Sprint(s.UID, s.State, s.Why(), s.Backend)
		},
		Print: func(rows, gone []audit.Status) error {
			for _, s := range gone {
				s.State, s.Sentence, s.Problems = "gone", ended, nil
				rows = append(rows, s)
			}
			audit.Sort(rows)
			lines := strings.SplitAfter(pods(c.Columns(), rows, selected), "\n")
			if begun { // without head and count
				lines = lines[1 : len(lines)-2]
			}
			begun = true
			return Show(c, strings.Join(lines, ""))
		},
	}
}

// WatchDecisions returns a Watch of decisions without Request.
func WatchDecisions(c applet.Call, every time.Duration) Watch[document.Decision] {
	begun := false
	return Watch[document.Decision]{
		Every: every, Err: c.Stderr,
		Key: func(d document.Decision) (id, text string) {
			return fmt.Sprint(d.Node, d.Time, d.Namespace, d.Pod, d.Reason, d.Error), ""
		},
		Print: func(rows, _ []document.Decision) error {
			head := !begun
			begun = true
			return Decisions(c, rows, head)
		},
	}
}
