package labtest_test

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/redirection/labtest"
)

func by(names ...string) []labtest.Hop {
	var hops []labtest.Hop
	for _, name := range names {
		hops = append(hops, labtest.Hop{By: name})
	}
	return hops
}

func TestCompare(t *testing.T) {
	t.Parallel()
	addr := netip.MustParseAddrPort
	to, own := addr("10.0.0.1:80"), addr("10.0.0.2:4000")
	good := labtest.Hop{By: "outbound", Dst: to, From: own}
	with := func(change func(*labtest.Hop)) []labtest.Hop {
		h := good
		change(&h)
		return []labtest.Hop{h}
	}
	second := labtest.Hop{By: "peer", Dst: to, From: addr("10.0.0.3:5000")}
	from := func(second string) []labtest.Hop {
		return []labtest.Hop{{By: "outbound"}, {By: "peer", From: addr(second)}}
	}
	elsewhere := with(func(h *labtest.Hop) { h.Dst = addr("10.0.0.7:80") })
	tests := []struct {
		name    string
		want    []labtest.Hop
		wantErr error
		got     []labtest.Hop
		gotErr  error
		right   bool
	}{
		{name: "as wanted", want: by("outbound"), got: []labtest.Hop{good}, right: true},
		{name: "another listener", want: by("peer"), got: []labtest.Hop{good}},
		{name: "another destination", want: by("outbound"), got: elsewhere},
		{name: "another source port", want: by("outbound"), got: with(func(h *labtest.Hop) { h.From = addr("10.0.0.2:4001") })},
		{name: "another source", want: by("outbound"), got: with(func(h *labtest.Hop) { h.From = addr("10.0.0.9:4000") })},
		{name: "no destination", want: by("outbound"), got: with(func(h *labtest.Hop) { h.Dst = netip.AddrPort{} }), right: true},
		{name: "a wanted destination", want: elsewhere, got: elsewhere, right: true},
		{name: "silence", want: by("outbound"), gotErr: labtest.ErrSilent},
		{name: "refused", want: by("outbound"), gotErr: labtest.ErrRefused},
		{name: "refused as wanted", wantErr: labtest.ErrRefused, gotErr: labtest.ErrRefused, right: true},
		{name: "silence instead of a refusal", wantErr: labtest.ErrRefused, gotErr: labtest.ErrSilent},
		{name: "an answer instead of a refusal", wantErr: labtest.ErrRefused, got: []labtest.Hop{good}},
		{name: "an answer and then a failure", want: by("outbound"), got: []labtest.Hop{good}, gotErr: errors.New("reset")},
		{name: "one more", want: by("outbound"), got: []labtest.Hop{good, second}},
		{name: "one less", want: by("outbound", "peer"), got: []labtest.Hop{good}},
		{name: "two from anywhere", want: by("outbound", "peer"), got: []labtest.Hop{good, second}, right: true},
		{name: "two from an address", want: from("10.0.0.3:0"), got: []labtest.Hop{good, second}, right: true},
		{name: "two from another address", want: from("10.0.0.4:0"), got: []labtest.Hop{good, second}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			q := labtest.Expectation{Request: labtest.Request{Via: labtest.TCP, To: to}, Want: tt.want, WantErr: tt.wantErr}
			got := labtest.Answer{Hops: tt.got, Own: own, Err: tt.gotErr}
			err := q.Compare(got)
			if (err == nil) != tt.right {
				t.Errorf("right: want %v, got: %v", tt.right, err)
			}
			if err != nil && (!strings.Contains(err.Error(), q.String()) || !strings.Contains(err.Error(), got.String())) {
				t.Errorf("the error does not have request and answer: %v", err)
			}
		})
	}
}

// TestActor_ThreadsDropItsIDs looks for threads that kept the IDs of an actor.
func TestActor_ThreadsDropItsIDs(t *testing.T) {
	t.Run("actors", func(t *testing.T) {
		l := labtest.New(t, ruleset.IPv4)
		for range 20 {
			labtest.Request{From: l.App(), Via: labtest.TCP, To: labtest.Peer.Port(ruleset.IPv4, 80)}.Send(t.Context())
		}
	})
	threads, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil || len(threads) == 0 {
		t.Fatalf("listing the threads: %v, %d found", err, len(threads))
	}
	for _, thread := range threads {
		status, err := os.ReadFile(thread)
		if err != nil {
			continue // it has ended
		}
		for line := range strings.Lines(string(status)) {
			// Real, effective, saved, file system.
			if (strings.HasPrefix(line, "Uid:") || strings.HasPrefix(line, "Gid:")) && strings.Join(strings.Fields(line)[1:], "") != "0000" {
				t.Errorf("%s: %s", thread, line)
			}
		}
	}
}
