package decisions

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
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
	// saveInterval is the minimum time between two writes of the file: a killed agent loses at most the reports of this time.
	saveInterval = 3 * time.Second
	// maxKept bounds the file, in bytes. A full file is rewritten with the ring's reports; the oldest are dropped if they do not fit.
	maxKept  = 4 << 20
	keptMode = 0o600 // reports quote pods
	// keptVersion is the version of the file's format: a line with kept, then a line for each report in order; later reports are
	// appended.
	keptVersion = 2
)

// kept is the first line of the file.
type kept struct {
	Version int `json:"version"`
}

// Restore reads the previous agent's reports. Call it before the ring is used. An unusable file is logged and replaced.
func (r *Ring) Restore(file string, log *slog.Logger) {
	_, _ = hostfs.Disk{}.Sweep(filepath.Dir(file), filepath.Base(file)) // remains of a killed write; the next start tries again
	text, _, err := hostfs.ReadFile(file, maxKept)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var all []agentapi.Report
	if err == nil {
		all, err = readKept(text)
	}
	if err != nil {
		log.Warn("the saved decisions cannot be used, and are replaced", slog.String("file", file), slog.String("error", err.Error()))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.unusable = err != nil
	for _, one := range all {
		one.Trim()
		r.add(one)
	}
}

// readKept parses the file's text. A killed agent may have left an incomplete last line, which is ignored.
func readKept(text []byte) (all []agentapi.Report, err error) {
	first, lines, _ := bytes.Cut(text, []byte("\n"))
	var head kept
	if err := json.Unmarshal(first, &head); err != nil {
		return nil, fmt.Errorf("line 1: %w", err)
	}
	if head.Version != keptVersion {
		return nil, fmt.Errorf("its format has version %d, and this agent reads version %d", head.Version, keptVersion)
	}
	for line := range bytes.Lines(lines) {
		var one agentapi.Report
		if err := json.Unmarshal(line, &one); err != nil && bytes.HasSuffix(line, []byte("\n")) {
			return nil, fmt.Errorf("line %d: %w", len(all)+2, err)
		} else if err == nil {
			all = append(all, one)
		}
	}
	return all, nil
}

// keeper writes the file of a ring.
type keeper struct {
	ring *Ring
	file string
	// saved is the number of the file's latest report, size the file's size after the keeper's last write, 0 before the first.
	saved uint64
	size  int
}

// Keep writes the file after changes of the ring or a removal of the file, until ctx ends, and then once more.
func (r *Ring) Keep(ctx context.Context, file string, log *slog.Logger) {
	k := keeper{ring: r, file: file}
	problem := ""
	interval := time.NewTicker(saveInterval)
	defer interval.Stop()
	for running := true; running; {
		select {
		case <-ctx.Done():
			running = false
		case <-interval.C:
		}
		err := k.save()
		if err == nil {
			problem = ""
		} else if text := err.Error(); text != problem {
			problem = text
			log.WarnContext(ctx, "the decisions cannot be saved: a restart of the agent loses them", slog.String("error", text))
		}
	}
}

// since returns the reports with numbers above after, in order, and the latest number.
func (r *Ring) since(after uint64) (all []agentapi.Report, last uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, part := range [][]agentapi.Report{r.plugin, r.watch} {
		from, _ := slices.BinarySearchFunc(part, after+1, func(one agentapi.Report, n uint64) int { return cmp.Compare(one.Number, n) })
		all = append(all, part[from:]...)
	}
	slices.SortFunc(all, func(a, b agentapi.Report) int { return cmp.Compare(a.Number, b.Number) })
	return all, r.last
}

// save appends the reports that the file lacks. It rewrites the file the first time, after another process has changed it, and when it is
// full.
func (k *keeper) save() error {
	added, last := k.ring.since(k.saved)
	info, err := os.Lstat(k.file)
	ours := err == nil && k.size > 0 && info.Mode().IsRegular() && info.Size() == int64(k.size)
	if ours && last == k.saved || last == 0 && !k.ring.unusable {
		return nil
	}
	lines, err := printLines(added)
	if err != nil {
		return err
	}
	if ours && k.size+len(lines) <= maxKept {
		if err = (hostfs.Disk{}).Append(k.file, lines); err != nil {
			k.size = 0
			return err
		}
		k.saved, k.size = last, k.size+len(lines)
		return nil
	}
	all, last := k.ring.since(0)
	text, err := printKept(all)
	if err == nil {
		err = hostfs.Disk{}.WriteFile(k.file, text, keptMode)
	}
	if err == nil {
		k.saved, k.size = last, len(text)
	}
	return err
}

func printLines(all []agentapi.Report) ([]byte, error) {
	var lines bytes.Buffer
	encoder := json.NewEncoder(&lines)
	encoder.SetEscapeHTML(false)
	for _, one := range all {
		if err := encoder.Encode(one); err != nil {
			return nil, err
		}
	}
	return lines.Bytes(), nil
}

// printKept returns the text of a new file, with as many of the latest reports as fit.
func printKept(all []agentapi.Report) ([]byte, error) {
	head, err := json.Marshal(kept{Version: keptVersion})
	if err != nil {
		return nil, err
	}
	lines, err := printLines(all)
	for err == nil && len(head)+1+len(lines) > maxKept {
		_, lines, _ = bytes.Cut(lines, []byte("\n"))
	}
	return slices.Concat(head, []byte("\n"), lines), err
}
