package netns

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"
)

// errEnded is the error of a function that ended its goroutine instead of returning.
var errEnded = errors.New("running in a network namespace: the function called runtime.Goexit")

// onThread runs fn on a locked thread and waits for it. The thread ends with its goroutine unless fn returns
// reusable.
//
// fn never runs on the process's first thread. The Go runtime cannot end that thread, and /proc/self shows its namespaces for
// the whole process: any reader would mistake the pod's network for the node's.
func onThread(fn func() (reusable bool, err error)) error {
	done := make(chan error, 1)
	go func() {
		err := errEnded
		defer func() { done <- err }()

		runtime.LockOSThread() //nolint:forbidigo // the one place
		if unix.Gettid() == unix.Getpid() {
			// While this goroutine occupies the first thread, the next goroutine gets another thread.
			err = onThread(fn)
			runtime.UnlockOSThread() //nolint:forbidigo // the one place
			return
		}
		// Goexit in fn leaves both unchanged.
		var reusable bool
		if reusable, err = fn(); reusable {
			runtime.UnlockOSThread() //nolint:forbidigo // the one place
		}
	}()
	return <-done
}

// guard runs fn and turns a panic into an error.
func guard(fn func() error) (err error) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case error:
			err = fmt.Errorf("panic in a network namespace: %w\n%s", p, debug.Stack())
		default:
			err = fmt.Errorf("panic in a network namespace: %v\n%s", p, debug.Stack())
		}
	}()
	return fn()
}
