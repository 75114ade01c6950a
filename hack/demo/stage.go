package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// stage implements testing.TB, so that test helpers work in a program: a failure is a panic, cleanups run at the end.
type stage struct {
	testing.TB // never called: embedded for its unexported method

	ctx      context.Context //nolint:containedctx // as in testing.TB
	cancel   context.CancelFunc
	cleanups []func()
}

func newStage() *stage {
	s := &stage{}
	s.ctx, s.cancel = signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	return s
}

func (s *stage) close() {
	for _, f := range slices.Backward(s.cleanups) {
		f()
	}
	s.cancel()
}

func (s *stage) Context() context.Context     { return s.ctx }
func (s *stage) Helper()                      {}
func (s *stage) Failed() bool                 { return false }
func (s *stage) Cleanup(f func())             { s.cleanups = append(s.cleanups, f) }
func (s *stage) Fatal(args ...any)            { panic(fmt.Sprint(args...)) }
func (s *stage) Fatalf(f string, args ...any) { panic(fmt.Sprintf(f, args...)) }
func (s *stage) Errorf(f string, args ...any) { panic(fmt.Sprintf(f, args...)) }
func (s *stage) Skip(args ...any)             { panic(fmt.Sprint(args...)) }
func (s *stage) Logf(string, ...any)          {}

func (s *stage) TempDir() string {
	dir, err := os.MkdirTemp("", "istio-cni-demo")
	if err != nil {
		panic(err)
	}
	s.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// printer prints in colour to a terminal and plain text elsewhere.
type printer struct {
	out    io.Writer
	colour bool
}

func newPrinter(f *os.File) printer {
	info, err := f.Stat()
	_, off := os.LookupEnv("NO_COLOR") //nolint:forbidigo // the whole configuration of this program
	return printer{out: f, colour: err == nil && info.Mode()&os.ModeCharDevice != 0 && !off}
}

func (p printer) paint(code, text string) string {
	if !p.colour {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

func (p printer) bold(s string) string  { return p.paint("1", s) }
func (p printer) dim(s string) string   { return p.paint("2", s) }
func (p printer) red(s string) string   { return p.paint("31", s) }
func (p printer) green(s string) string { return p.paint("32", s) }

func (p printer) text(s string)                   { _, _ = io.WriteString(p.out, s) }
func (p printer) line(format string, args ...any) { p.text(fmt.Sprintf(format, args...) + "\n") }
