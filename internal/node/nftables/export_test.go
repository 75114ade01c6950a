package nftables

import (
	"context"
	"errors"
	"fmt"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
)

// OnSend shows every request to the kernel before it goes out.
func (s *Session) OnSend(show func([]byte)) { s.conn.Sent = show }

// attempts bounds how often a namespace that somebody else is changing is read again.
const attempts = 10

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

// Update reads the namespace and carries out the Plan that is made of it, all in one transaction. When somebody
// else changed any rules in between, nothing of it was done, and it begins again: plan may be called several times. An
// error that the kernel gives names the table, the chain and the rule.
func (s *Session) Update(ctx context.Context, plan func(*View) (Plan, error)) error {
	return again(func() error {
		v, err := s.Read(ctx)
		if err != nil {
			return err
		}
		p, err := plan(v)
		if err != nil {
			return err
		}
		return v.Apply(p)
	})
}

// again repeats what found the namespace changing under it.
func again(do func() error) error {
	var err error
	for range attempts {
		if err = do(); !errors.Is(err, ErrChanged) {
			return err
		}
	}
	return fmt.Errorf("trying %d times: %w", attempts, err)
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

// VerifyNative tells how the native tables of the current namespace depart from what is wanted, and writes nothing.
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
