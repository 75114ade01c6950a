package podcache

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// KeptName is the name of the ring's file in the agent's run directory.
const KeptName = "decisions.json"

const (
	// saveInterval is the least time between two writes of the file: a killed agent loses no more than that.
	saveInterval = 3 * time.Second
	// maxKept bounds the file, in bytes: the oldest reports are left out.
	maxKept  = 4 << 20
	keptMode = 0o600 // reports quote pods
	// keptVersion is that of the file's format: a line with kept, and one for each report, the latest first.
	keptVersion = 1
)

// kept is the first line of the file. Reports is the number of the other lines.
type kept struct {
	Version int `json:"version"`
	Reports int `json:"reports"`
}

// Restore reads the reports of the previous agent, before the ring is used. A file that cannot be used is logged and replaced.
func (r *Ring) Restore(file string, log *slog.Logger) {
	_, _ = hostfs.Disk{}.Sweep(filepath.Dir(file), filepath.Base(file)) // of a write that was killed; a next start tries again
	text, _, err := hostfs.ReadFile(file, maxKept)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var all []agentapi.Report
	if err == nil {
		all, err = readKept(text)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		r.changes++
		log.Warn("the saved decisions cannot be used, and are replaced", slog.String("file", file), slog.String("error", err.Error()))
		return
	}
	for _, one := range slices.Backward(all) {
		one.Trim()
		if one.Source == agentapi.SourceWatch {
			r.watch = r.push(r.watch, one)
		} else {
			r.plugin = r.push(r.plugin, one)
		}
	}
}

// readKept parses the file's text.
func readKept(text []byte) (all []agentapi.Report, err error) {
	decoder := json.NewDecoder(bytes.NewReader(text))
	var head kept
	if err := decoder.Decode(&head); err != nil {
		return nil, fmt.Errorf("line 1: %w", err)
	}
	if head.Version != keptVersion {
		return nil, fmt.Errorf("it has version %d of the format, and this agent reads version %d", head.Version, keptVersion)
	}
	for decoder.More() {
		var one agentapi.Report
		if err := decoder.Decode(&one); err != nil {
			return nil, fmt.Errorf("line %d: %w", len(all)+2, err)
		}
		all = append(all, one)
	}
	if len(all) != head.Reports {
		return nil, fmt.Errorf("it has %d reports, and its first line says %d", len(all), head.Reports)
	}
	return all, nil
}

// Keep writes the file after changes of the ring, and when it is gone, until ctx ends, and then once more.
func (r *Ring) Keep(ctx context.Context, file string, log *slog.Logger) {
	var saved uint64
	problem := ""
	interval := time.NewTicker(saveInterval)
	defer interval.Stop()
	for running := true; running; {
		select {
		case <-ctx.Done():
			running = false
		case <-interval.C:
		}
		changes, err := r.save(file, saved)
		if err == nil {
			saved, problem = changes, ""
		} else if text := err.Error(); text != problem {
			problem = text
			log.WarnContext(ctx, "the decisions cannot be saved: a restart of the agent loses them", slog.String("error", text))
		}
	}
}

// save writes the file if the ring has changed since the count of saved, and returns the count of what the file has.
func (r *Ring) save(file string, saved uint64) (uint64, error) {
	r.mu.Lock()
	changes := r.changes
	r.mu.Unlock()
	if _, err := os.Lstat(file); changes == 0 || changes == saved && err == nil {
		return saved, nil
	}
	text, err := printKept(r.Page(math.MaxUint64, 2*remembered))
	if err != nil {
		return saved, err
	}
	return changes, hostfs.Disk{}.WriteFile(file, text, keptMode)
}

// printKept returns the text of the file, with the latest reports that fit.
func printKept(all []agentapi.Report) ([]byte, error) {
	var lines bytes.Buffer
	encoder := json.NewEncoder(&lines)
	encoder.SetEscapeHTML(false)
	head := kept{Version: keptVersion}
	for _, one := range all {
		before := lines.Len()
		if err := encoder.Encode(one); err != nil {
			return nil, err
		}
		const first = 64 // of the first line, at most
		if lines.Len() > maxKept-first {
			lines.Truncate(before)
			break
		}
		head.Reports++
	}
	text, err := json.Marshal(head)
	return slices.Concat(text, []byte("\n"), lines.Bytes()), err
}
