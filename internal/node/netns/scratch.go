package netns

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Scratch is a network namespace that nobody else uses: it has nothing but a loopback interface that is down, no name,
// and ends with Close or with the process.
type Scratch struct{ fd int }

// NewScratch makes one. It takes CAP_SYS_ADMIN.
func NewScratch() (*Scratch, error) {
	s := &Scratch{}
	err := Do("", func() (err error) {
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("making a network namespace: %w", err)
		}
		s.fd, err = unix.Open(threadPath, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, err
	}
	return s, nil
}

// Path names the namespace for this process and those that it starts.
func (s *Scratch) Path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), s.fd) }

// FD is the open file of the namespace.
func (s *Scratch) FD() int { return s.fd }

// Close lets go of the namespace, which ends it unless something is left in it.
func (s *Scratch) Close() { _ = unix.Close(s.fd) }
