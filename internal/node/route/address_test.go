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

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestList_WithoutEnd: root in a namespace can add any number of addresses, routes and rules.
func TestList_WithoutEnd(t *testing.T) {
	// Not parallel because it changes a global bound.
	bound := maxObjects
	maxObjects = 100
	t.Cleanup(func() { maxObjects = bound })
	addresses := func(ruleset.Family) error {
		list, err := Addresses()
		if err == nil && len(list) != maxObjects {
			t.Errorf("%d addresses are read, want %d", len(list), maxObjects)
		}
		return err
	}
	attachments := func(ruleset.Family) error { _, err := Attachments(nil, -1); return err }
	passthrough := func(ruleset.Family) error { _, err := findPassthrough(); return err }
	routes := func(f ruleset.Family) error { _, err := listRoutes(f, allTables); return err }
	rules := func(f ruleset.Family) error { _, err := listRules(f); return err }
	const address, rule = "address add 10.99.0.%d/32 dev lo\n", "rule add fwmark %d lookup 133\n"
	const address6 = "address add fd00::%x/128 dev lo\n"
	const route = "route add local default dev lo table %d\n"
	for _, test := range []struct {
		what, line string
		family     ruleset.Family
		fit, more  int // number of readable objects beside 127.0.0.1 and ::1, and of additional ones that exceed the bound
		read       func(ruleset.Family) error
		want       error
	}{
		{"addresses", address, ruleset.IPv4, 98, 1, addresses, nfnetlink.ErrUninspectable},
		{"attachments", address, ruleset.IPv4, 98, 1, attachments, nfnetlink.ErrUninspectable},
		{"IPv6 addresses", address6, ruleset.IPv6, 98, 1, addresses, nfnetlink.ErrUninspectable},
		{"::6, which lists IPv6 only", address, ruleset.IPv4, 98, 1, passthrough, nil},
		{"routes", route, ruleset.IPv4, 80, 20, routes, nfnetlink.ErrUninspectable},
		{"routes", route, ruleset.IPv6, 80, 20, routes, nfnetlink.ErrUninspectable},
		{"rules", rule, ruleset.IPv4, 80, 20, rules, nfnetlink.ErrUninspectable},
		{"rules", rule, ruleset.IPv6, 80, 20, rules, nfnetlink.ErrUninspectable},
	} {
		path := netnstest.New(t)
		netnstest.Run(t, path, "ip", "link", "set", "lo", "up")
		add := func(from, to int) error {
			var batch strings.Builder
			for i := from; i < to; i++ {
				fmt.Fprintf(&batch, test.line, i)
			}
			netnstest.Feed(t, path, batch.String(), "ip", fmt.Sprintf("-%d", test.family), "-batch", "-")
			return netnstest.At(path).Do(func() error { return test.read(test.family) })
		}
		check.OK(t, add(1, 1+test.fit), test.what, test.family)
		if err := add(1+test.fit, 1+test.fit+test.more); !errors.Is(err, test.want) || (err == nil) != (test.want == nil) {
			t.Errorf("more %s of %s: %v", test.what, test.family, err)
		}
	}
}

func TestParseAddress6(t *testing.T) {
	t.Parallel()
	const line = "fd000000000000000000000000000001 02 40 00 80     eth0"
	if got, err := parseAddress6(line); err != nil || got.link != 2 || got.prefix.String() != "fd00::1/64" {
		t.Errorf("%q: %v, %v", line, got, err)
	}
	const mapped = "00000000000000000000ffffc0000209 1f 80 00 80     a-name-of-15-ch"
	if got, err := parseAddress6(mapped); err != nil || got.link != 31 || got.prefix.String() != "192.0.2.9/32" {
		t.Errorf("%q: %v, %v", mapped, got, err)
	}
	for _, broken := range []string{
		"", "fd00", strings.Replace(line, "fd", "xx", 1), strings.Replace(line, "fd", "", 1), strings.Replace(line, "fd", "0000fd", 1),
		strings.Replace(line, " 40 ", " 81 ", 1), strings.Replace(line, " 40 ", " 140 ", 1), strings.Replace(line, " 02 ", " -2 ", 1),
		strings.Replace(line, " 02 ", " 80000000 ", 1), line + " more",
	} {
		if got, err := parseAddress6(broken); err == nil {
			t.Errorf("%q: %v, want an error", broken, got)
		}
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
			check.Is(t, explain(f, cause), cause, f)
		}
	}
	check.Contains(t, explain(ruleset.IPv4, unix.EPERM).Error(), "CAP_NET_ADMIN")
}

func TestParseHead_NoHeader(t *testing.T) {
	t.Parallel()
	if head, _, err := parseHead(make([]byte, unix.SizeofRtMsg-1)); err == nil {
		t.Errorf("got %+v", head)
	}
}
