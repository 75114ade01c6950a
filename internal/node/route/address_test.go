package route

import (
	"fmt"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/node/netns/netnstest"
)

// TestAddressesWithoutEndAreNotRead: whoever is root in a namespace can add any number of them.
func TestAddressesWithoutEndAreNotRead(t *testing.T) {
	// Not parallel: it changes the bound for all.
	bound := maxAddresses
	maxAddresses = 100
	t.Cleanup(func() { maxAddresses = bound })
	path := netnstest.New(t)
	add := func(from, to int) {
		var batch strings.Builder
		for i := from; i < to; i++ {
			fmt.Fprintf(&batch, "address add 10.99.%d.%d/32 dev lo\n", i/250, i%250)
		}
		netnstest.Run(t, path, "sh", "-c", `echo "$0" | ip -batch -`, batch.String())
	}
	add(0, maxAddresses)
	err := netnstest.At(path).Do(func() error {
		list, err := Addresses()
		if len(list) != maxAddresses {
			t.Errorf("%d addresses are read, want %d", len(list), maxAddresses)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	add(maxAddresses, maxAddresses+1)
	for what, read := range map[string]func() error{
		"Addresses":   func() error { _, err := Addresses(); return err },
		"Attachments": func() error { _, err := Attachments(nil, -1); return err },
		"Leftovers":   func() error { _, err := loopback{}.findPassthrough(); return err },
	} {
		err := netnstest.At(path).Do(read)
		bounded := err != nil && strings.Contains(err.Error(), "the namespace has more than 100")
		if wanted := what != "Leftovers"; bounded != wanted { // that one asks for IPv6 only
			t.Errorf("%s: %v", what, err)
		}
	}
}
