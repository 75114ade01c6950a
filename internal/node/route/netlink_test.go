package route

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

func TestComplete(t *testing.T) {
	t.Parallel()
	interrupted := fmt.Errorf("listing: %w", netlink.ErrDumpInterrupted)
	for _, tt := range []struct {
		name  string
		fails []error // of the first calls; then it succeeds
		calls int
		want  error
	}{
		{"a complete list is taken at once", nil, 1, nil},
		{"an interrupted list is requested again", []error{interrupted, unix.EINTR, interrupted, unix.EINTR}, 5, nil},
		{
			"an ever interrupted list is given up",
			[]error{interrupted, interrupted, interrupted, interrupted, interrupted},
			5, netlink.ErrDumpInterrupted,
		},
		{"another error is final", []error{interrupted, unix.EPERM}, 2, unix.EPERM},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			calls := 0
			err := complete(func() error {
				calls++
				if calls <= len(tt.fails) {
					return tt.fails[calls-1]
				}
				return nil
			})
			if calls != tt.calls || !errors.Is(err, tt.want) {
				t.Errorf("got %v in %d calls, want %v in %d", err, calls, tt.want, tt.calls)
			}
		})
	}
}

func TestV6Off(t *testing.T) {
	t.Parallel()
	setting := func(value string) fs.FS {
		return fstest.MapFS{"conf/lo/disable_ipv6": {Data: []byte(value)}}
	}
	for name, tt := range map[string]struct {
		settings fs.FS
		part     string
	}{
		"IPv6 is on":             {setting("0\n"), ""},
		"it is disabled on lo":   {setting("1\n"), "net.ipv6.conf.lo.disable_ipv6=0"},
		"the setting is missing": {fstest.MapFS{}, ""},
		"the kernel has no IPv6": {os.DirFS(filepath.Join(t.TempDir(), "absent")), "ipv6.disable=1"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := v6Off(tt.settings)
			if (got == "") != (tt.part == "") || !strings.Contains(got, tt.part) {
				t.Errorf("got %q, want %q", got, tt.part)
			}
		})
	}
}

func TestExplain_KeepsTheCause(t *testing.T) {
	t.Parallel()
	for _, cause := range []error{unix.EPERM, unix.ENETDOWN, unix.EEXIST, unix.EACCES} {
		for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
			if got := explain(f, cause); !errors.Is(got, cause) {
				t.Errorf("%s, %v: got %v", f, cause, got)
			}
		}
	}
	if got := explain(ruleset.IPv4, unix.EPERM).Error(); !strings.Contains(got, "CAP_NET_ADMIN") {
		t.Errorf("got %q", got)
	}
}

func TestParseHead_NoHeader(t *testing.T) {
	t.Parallel()
	if head, _, err := parseHead(make([]byte, unix.SizeofRtMsg-1)); err == nil {
		t.Errorf("got %+v", head)
	}
}
