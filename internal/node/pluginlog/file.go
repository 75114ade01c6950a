package pluginlog

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// The rolling file, its limits and the names of its backups equal the reference's, so that a log collector for the
// reference's files collects ours, and rotation also removes the backups that the reference left behind.
const (
	fileName   = "istio-cni.log"
	backupName = "istio-cni-2006-01-02T15-04-05.000.log" // a layout for package time

	maxFile      = 10 << 20
	maxBackupAge = 48 * time.Hour
)

// appendFile appends lines to the log file of a run directory in one write, and rotates a file that would exceed the limit.
// Several plugin processes may do so at the same time: each holds the lock of the file (flock) while it writes or rotates.
// The error for a missing run directory is fs.ErrNotExist; appendFile does not create the directory.
func appendFile(path string, lines []byte, limit int64, now time.Time) error {
	file, size, err := openLocked(path)
	if err == nil && size > 0 && size+int64(len(lines)) > limit && rotate(path, now) == nil {
		_ = file.Close()
		file, size, err = openLocked(path)
	}
	if err != nil {
		return fmt.Errorf("opening log file: %w", err)
	}
	removeBackups(path, now.Add(-maxBackupAge))
	// A killed writer, or a full disk, may have left an incomplete line. The newline limits the loss to that line.
	last := []byte("\n")
	if _, err = file.ReadAt(last, size-1); size > 0 && err == nil && last[0] != '\n' {
		lines = append([]byte("\n"), lines...)
	}
	_, err = file.Write(lines)
	if err = errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("writing log file: %w", err)
	}
	return nil
}

// openLocked opens the file and waits for its lock. Closing the file releases the lock.
func openLocked(path string) (file *os.File, size int64, err error) {
	file, err = hostfs.OpenLocked(path, os.O_RDWR|os.O_APPEND, func(file *os.File) error {
		return unix.Flock(int(file.Fd()), unix.LOCK_EX)
	})
	if err != nil {
		return nil, 0, err
	}
	info, err := file.Stat()
	if err != nil {
		return nil, 0, errors.Join(err, file.Close())
	}
	return file, info.Size(), nil
}

// rotate renames the locked file to the only backup. If this fails the file keeps growing.
func rotate(path string, now time.Time) error {
	removeBackups(path, time.Unix(math.MaxInt32, 0))
	return os.Rename(path, filepath.Join(filepath.Dir(path), now.UTC().Format(backupName)))
}

// removeBackups removes the backups whose names have a time before the given one.
func removeBackups(path string, before time.Time) {
	dir := filepath.Dir(path)
	entries, _ := os.ReadDir(dir) // without a listing, the backups stay
	for _, e := range entries {
		if made, err := time.Parse(backupName, e.Name()); err == nil && made.Before(before) {
			_ = os.Remove(filepath.Join(dir, e.Name())) // another process may have removed it
		}
	}
}
