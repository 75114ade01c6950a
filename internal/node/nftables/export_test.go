package nftables

import (
	"context"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// OnSend shows every request to the kernel before it goes out.
func (s *Session) OnSend(show func([]byte)) { s.conn.Sent = show }

// Read gives all rules of the family in the current namespace, as iptables-nft-save prints them.
func Read(ctx context.Context, f ruleset.Family) (ruleset.Set, error) {
	var set ruleset.Set
	err := session(func(s *Session) error {
		v, err := s.Read(ctx)
		if err == nil {
			set = v.Set(f)
		}
		return err
	})
	return set, err
}

// Change is what is wanted of one family.
type Change struct {
	Want ruleset.Set
	// Owned says which rules that are there may be replaced or removed: redirect.Owned, or one that ignores want.
	Owned func(want, have ruleset.Set) ruleset.Ownership
}

// Apply brings the families to what is wanted, in one transaction.
func Apply(ctx context.Context, changes ...Change) error {
	return session(func(s *Session) error {
		return s.Update(ctx, func(v *View) (Plan, error) {
			var p Plan
			for _, c := range changes {
				have := v.Set(c.Want.Family)
				p.Programs = append(p.Programs, ruleset.Reconcile(c.Want, have, c.Owned(c.Want, have)))
			}
			return p, nil
		})
	})
}

// Update reads the namespace and carries out the Plan that is made of it, in one transaction.
func (s *Session) Update(ctx context.Context, plan func(*View) (Plan, error)) error {
	v, err := s.Read(ctx)
	if err != nil {
		return err
	}
	p, err := plan(v)
	if err != nil {
		return err
	}
	return v.Apply(p)
}

// ApplyNative brings the native tables of the current namespace to what is wanted, in one transaction. What is as wanted
// stays, counters and all; a table that is not is made anew, and one that is not wanted removed.
func ApplyNative(ctx context.Context, want ruleset.Set) error {
	return session(func(s *Session) error {
		return s.Update(ctx, func(*View) (Plan, error) { return Plan{Native: &want}, nil })
	})
}

// CleanNative removes the native tables.
func CleanNative(ctx context.Context) error {
	return ApplyNative(ctx, ruleset.Set{Family: ruleset.Inet})
}

// VerifyNative compares the native tables of the current namespace with the wanted ones, and writes nothing.
func VerifyNative(ctx context.Context, want ruleset.Set) (ruleset.Diff, error) {
	var diff ruleset.Diff
	err := session(func(s *Session) error {
		v, err := s.Read(ctx)
		if err != nil {
			return err
		}
		have := v.Native(want)
		diff = ruleset.Compare(want, have, redirect.OwnedNative(have))
		return nil
	})
	return diff, err
}
