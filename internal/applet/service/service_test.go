package service_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"syscall"
	"testing"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func TestRun_Outcome(t *testing.T) {
	for _, c := range []struct {
		name           string
		read, work     error
		code           int
		stdout, stderr string
		begins         bool
	}{
		{name: "help", read: fmt.Errorf("reading: %w", settings.ErrHelp), code: applet.ExitOK, stdout: "exit codes 0 1 2\n"},
		{
			name: "problems", read: errors.Join(errors.New("no such flag"), errors.New("bad port")), code: applet.ExitUsage,
			stderr: "error: no such flag\nerror: bad port\nnothing was touched; see istio-cni dance --help\n",
		},
		{name: "done", begins: true, code: applet.ExitOK},
		{name: "failed", work: errors.New("no floor"), begins: true, code: applet.ExitError},
	} {
		t.Run(c.name, func(t *testing.T) {
			var stdout, stderr, log bytes.Buffer
			began := false
			code := service.Run(applet.Call{Stdout: &stdout, Stderr: &stderr}, "dance", "exit codes %d %d %d\n", nil, func() (service.Service, error) {
				return service.Service{
					Log: slog.New(slog.NewTextHandler(&log, nil)), Config: []settings.Line{{Name: "--speed", Value: "slow", Origin: "default"}}, Warnings: []string{"mind the step"},
					Work: func(context.Context) error { began = true; return c.work },
				}, c.read
			})
			if code != c.code || stdout.String() != c.stdout || stderr.String() != c.stderr || began != c.begins {
				t.Errorf("code %d, stdout %q, stderr %q, began %v", code, stdout.String(), stderr.String(), began)
			}
			logged := strings.Contains(log.String(), `configuration.speed="slow (default)"`) && strings.Contains(log.String(), `warning="mind the step"`)
			if failed := strings.Contains(log.String(), `msg=ending error="no floor"`); logged != c.begins || failed != (c.work != nil) {
				t.Errorf("the log is\n%s", log.String())
			}
		})
	}
}

func TestRun_Signal(t *testing.T) {
	code := service.Run(applet.Call{}, "dance", "", nil, func() (service.Service, error) {
		return service.Service{Log: slog.New(slog.DiscardHandler), Work: func(ctx context.Context) error {
			if err := syscall.Kill(syscall.Getpid(), syscall.SIGTERM); err != nil {
				return err
			}
			<-ctx.Done()
			return nil
		}}, nil
	})
	check.Equal(t, code, applet.ExitOK, "exit code")
}
