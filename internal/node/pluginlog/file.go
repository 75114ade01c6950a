package pluginlog

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// The rolling file, its limits and the names of its backups are those of the reference, so that whatever collects the
// one collects the other, and backups that the reference left behind are cleared away as our own.
const (
	fileName     = "istio-cni.log"
	backupStart  = "istio-cni-"
	backupLayout = "2006-01-02T15-04-05.000"
	backupEnd    = ".log"

	maxFile      = 10 << 20
	maxBackupAge = 48 * time.Hour
)

// rollingFile appends to the log file of a run directory, which several plugin processes do at the same time.
//
// All lines of an invocation are one write in append mode, which the kernel does not mix with another. Nobody waits for
// anybody: the process that finds the file too large and gets the lock of the directory renames the file; the others
// write to whatever file they have open, which is then the last of the backup.
type rollingFile struct {
	limit int64
	now   func() time.Time
}

// write appends the lines. A run directory that does not exist is no error and is not made.
func (f rollingFile) write(dir string, lines []byte) (err error) {
	path := filepath.Join(dir, fileName)
	file, err := openLog(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("opening log file: %w", err)
	}
	defer func() { err = errors.Join(err, file.Close()) }()

	info, err := file.Stat()
	if err != nil {
		return fmt.Errorf("examining log file: %w", err)
	}
	if size := info.Size(); size > 0 && size+int64(len(lines)) > f.limit {
		f.rotate(dir, info)
		if fresh, err := openLog(path); err == nil {
			_ = file.Close()
			file = fresh
		}
	}
	f.removeBackups(dir, func(_ string, made time.Time) bool { return f.now().Sub(made) > maxBackupAge })
	if endTornLine(file) {
		lines = append([]byte("\n"), lines...)
	}
	if _, err := file.Write(lines); err != nil {
		return fmt.Errorf("writing log file: %w", err)
	}
	return nil
}

func openLog(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDWR|os.O_APPEND|os.O_CREATE, 0o600) //nolint:gosec // the path is the stanza's
}

// rotate makes the file the only backup, unless another process is at it, has done it, or it cannot be done, in which
// case the file grows on.
func (f rollingFile) rotate(dir string, full fs.FileInfo) {
	lock, err := os.Open(dir) //nolint:gosec // the path is the stanza's
	if err != nil {
		return
	}
	defer func() { _ = lock.Close() }() // which unlocks
	if !tryLock(lock, syscall.LOCK_EX) {
		return
	}
	path := filepath.Join(dir, fileName)
	if current, err := os.Stat(path); err != nil || !os.SameFile(current, full) {
		return
	}
	backup := backupStart + f.now().UTC().Format(backupLayout) + backupEnd
	if os.Rename(path, filepath.Join(dir, backup)) != nil {
		return
	}
	// Still under the lock: later, the newest backup could be another process's.
	f.removeBackups(dir, func(name string, _ time.Time) bool { return name != backup })
}

// removeBackups removes the backups that are chosen by their name and the time in it.
func (f rollingFile) removeBackups(dir string, chosen func(name string, made time.Time) bool) {
	entries, _ := os.ReadDir(dir) // what cannot be listed stays
	for _, e := range entries {
		if made, ok := backupTime(e.Name()); ok && chosen(e.Name(), made) {
			_ = os.Remove(filepath.Join(dir, e.Name())) // another process may have been first
		}
	}
}

// backupTime returns when the backup was made, or false if the name is not one of a backup.
func backupTime(name string) (time.Time, bool) {
	stamp, isOurs := strings.CutPrefix(name, backupStart)
	stamp, isLog := strings.CutSuffix(stamp, backupEnd)
	at, err := time.Parse(backupLayout, stamp)
	return at, isOurs && isLog && err == nil
}

// endTornLine reports whether the file ends within a line that nobody will finish, as a process leaves that was killed
// or found the disk full. The next writer then ends it, so that only the torn record is lost.
//
// A file may also look so because another process is writing at this moment. All who write hold the shared lock, so the
// exclusive one shows that nobody is. Either is held until the file is closed; who gets none writes all the same.
func endTornLine(file *os.File) bool {
	if endsWithinLine(file) && tryLock(file, syscall.LOCK_EX) {
		return endsWithinLine(file)
	}
	tryLock(file, syscall.LOCK_SH)
	return false
}

func endsWithinLine(file *os.File) bool {
	info, err := file.Stat()
	if err != nil || info.Size() == 0 {
		return false
	}
	last := make([]byte, 1)
	_, err = file.ReadAt(last, info.Size()-1)
	return (err == nil || errors.Is(err, io.EOF)) && !bytes.Equal(last, []byte("\n"))
}

// tryLock takes the lock without waiting for it. Closing the file gives it back.
func tryLock(file *os.File, how int) bool {
	return syscall.Flock(int(file.Fd()), how|syscall.LOCK_NB) == nil
}
