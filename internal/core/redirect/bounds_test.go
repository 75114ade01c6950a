package redirect_test

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/redirect"
)

// lists are the fields that are lists, with the most entries of each, as in docs/parity.md.
var lists = []struct {
	field redirect.Field
	most  int
	entry func(int) string
}{
	{redirect.FieldOutbound, 1000, networkNumber},
	{redirect.FieldOutboundExclude, 1000, networkNumber},
	{redirect.FieldInbound, 1000, portNumber},
	{redirect.FieldInboundExclude, 1000, portNumber},
	{redirect.FieldOutboundPorts, 1000, portNumber},
	{redirect.FieldOutboundPortsExclude, 1000, portNumber},
	{redirect.FieldExcludeInterfaces, 100, interfaceNumber},
	{redirect.FieldRerouteInterfaces, 8, interfaceNumber},
	{redirect.FieldUIDs, 1000, portNumber},
	{redirect.FieldGIDs, 1000, portNumber},
	{redirect.FieldOwnerGroups, 49, portNumber},
	{redirect.FieldOwnerGroupsExclude, 1000, portNumber},
}

func networkNumber(i int) string   { return fmt.Sprintf("10.%d.%d.0/24", i/256%256, i%256) }
func portNumber(i int) string      { return fmt.Sprint(1 + i%60000) }
func interfaceNumber(i int) string { return fmt.Sprintf("x%d", i%100000) }
func sameEntry(entry func(int) string) func(int) string {
	return func(int) string { return entry(7) }
}

func listOf(n int, entry func(int) string) string {
	all := make([]string, n)
	for i := range all {
		all[i] = entry(i)
	}
	return strings.Join(all, ",")
}

// TestParse_LongLists takes each list up to its bound and refuses it above, whether entries repeat or not.
func TestParse_LongLists(t *testing.T) {
	for _, l := range lists {
		for what, entry := range map[string]func(int) string{"different": l.entry, "repeated": sameEntry(l.entry)} {
			for _, isStrict := range []bool{true, false} {
				d := redirect.Dialect{Strict: isStrict}
				parse := func(text string) error {
					_, err := redirect.Parse(redirect.Default(), redirect.Values{l.field: {Source: `annotation "some/key"`, Text: text}}, d)
					return err
				}
				if err := parse(listOf(l.most, entry)); err != nil {
					t.Errorf("field %d, %d %s entries: %v", l.field, l.most, what, err)
				}
				for _, n := range []int{l.most + 1, 12000, 45000} {
					err := parse(listOf(n, entry))
					want := fmt.Sprintf("lists %d entries, more than %d", n, l.most)
					if err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), `annotation "some/key": value "`) {
						t.Errorf("field %d, %d %s entries: error is %.300v, want … %s", l.field, n, what, err, want)
					}
				}
			}
		}
	}
}

// TestParse_ErrorLength writes texts as long as a pod's annotations may be into every field: the error is short, and reading
// the text takes memory in proportion to it at most.
func TestParse_ErrorLength(t *testing.T) {
	const size = 256 << 10
	for field := redirect.FieldMode; field <= redirect.FieldSecondFamily; field++ {
		for what, text := range map[string]string{
			"letters": strings.Repeat("x", size), "commas": strings.Repeat(",", size), "blanks": strings.Repeat(" ", size) + "x", "zeros": strings.Repeat("0", size),
			"bad entries": listOf(size/2, func(int) string { return "x" }), "some bad entries": listOf(900, func(int) string { return strings.Repeat("-", 290) }),
			"few bad entries": listOf(5, func(int) string { return strings.Repeat("\x1b", size/5) }), "ports": listOf(size/6, portNumber), "nulls": strings.Repeat("\x00", size),
			"networks": listOf(size/16, networkNumber), "quotes": strings.Repeat(`"`, size), "bytes": strings.Repeat("\xff", size), "a star": "*" + strings.Repeat(" ", size),
		} {
			for _, isStrict := range []bool{true, false} {
				values := redirect.Values{field: {Source: `annotation "some/key"`, Text: text}}
				unknown := func(name string) (uint32, error) { return 0, errors.New("unknown group " + name) }
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				_, err := redirect.Parse(redirect.Default(), values, redirect.Dialect{Strict: isStrict, GroupID: unknown})
				message := fmt.Sprint(err)
				runtime.ReadMemStats(&after)
				if len(message) > 2<<10 {
					t.Errorf("field %d, %s: an error of %d bytes: %.200s", field, what, len(message), message)
				}
				if got := after.TotalAlloc - before.TotalAlloc; got > 8*size {
					t.Errorf("field %d, %s: reading %d bytes allocates %d", field, what, len(text), got)
				}
			}
		}
	}
}
