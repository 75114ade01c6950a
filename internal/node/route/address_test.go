package route

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// TestAddressesWithoutEndAreNotRead: a process that is root in a namespace can add any number of them.
func TestAddressesWithoutEndAreNotRead(t *testing.T) {
	// Not parallel: it changes the bound for all.
	bound := maxObjects
	maxObjects = 100
	t.Cleanup(func() { maxObjects = bound })
	path := netnstest.New(t)
	add := func(from, to int) {
		var batch strings.Builder
		for i := from; i < to; i++ {
			fmt.Fprintf(&batch, "address add 10.99.%d.%d/32 dev lo\n", i/250, i%250)
		}
		netnstest.Run(t, path, "sh", "-c", `echo "$0" | ip -batch -`, batch.String())
	}
	add(0, maxObjects)
	err := netnstest.At(path).Do(func() error {
		list, err := Addresses()
		if len(list) != maxObjects {
			t.Errorf("%d addresses are read, want %d", len(list), maxObjects)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	add(maxObjects, maxObjects+1)
	for what, read := range map[string]func() error{
		"Addresses":   func() error { _, err := Addresses(); return err },
		"Attachments": func() error { _, err := Attachments(nil, -1); return err },
		"Leftovers":   func() error { _, err := findPassthrough(); return err },
	} {
		err := netnstest.At(path).Do(read)
		bounded := err != nil && strings.Contains(err.Error(), "it holds more than 100 of them")
		if wanted := what != "Leftovers"; bounded != wanted { // that one asks for IPv6 only
			t.Errorf("%s: %v", what, err)
		}
	}
}

// TestRoutesAndRulesWithoutEndAreNotRead: nor are those, in any family.
func TestRoutesAndRulesWithoutEndAreNotRead(t *testing.T) {
	bound := maxObjects
	maxObjects = 100
	t.Cleanup(func() { maxObjects = bound })
	for what, test := range map[string]struct {
		line string
		read func(ruleset.Family) error
	}{
		"routes": {"route add local default dev lo table %d\n", func(f ruleset.Family) error { _, err := listRoutes(f, allTables); return err }},
		"rules":  {"rule add fwmark %d lookup 133\n", func(f ruleset.Family) error { _, err := listRules(f); return err }},
	} {
		for _, f := range []ruleset.Family{ruleset.IPv4, ruleset.IPv6} {
			path := netnstest.New(t)
			netnstest.Run(t, path, "ip", "link", "set", "lo", "up")
			for _, n := range []int{80, 20} {
				var batch strings.Builder
				for i := range n {
					fmt.Fprintf(&batch, test.line, 1000+n*10+i)
				}
				netnstest.Run(t, path, "sh", "-c", fmt.Sprintf(`echo "$0" | ip -%d -batch -`, f), batch.String())
				err := netnstest.At(path).Do(func() error { return test.read(f) })
				if over := n == 20; errors.Is(err, nfnetlink.ErrUninspectable) != over || err != nil && !over {
					t.Errorf("%s of %s: %v", what, f, err)
				}
			}
		}
	}
}
