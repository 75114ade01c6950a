package nfnetlink

import "golang.org/x/sys/unix"

// In names a table in a message about its rules, a set or the elements of a set, and their chain or the set: these attributes have the
// same numbers in all three.
func (b *Buffer) In(table, name string) {
	b.String(unix.NFTA_RULE_TABLE, table)
	b.String(unix.NFTA_RULE_CHAIN, name)
}

// Chain names a chain in a message about it.
func (b *Buffer) Chain(table, name string) {
	b.String(unix.NFTA_CHAIN_TABLE, table)
	b.String(unix.NFTA_CHAIN_NAME, name)
}

// Hook is what makes a chain a base chain.
type Hook struct {
	Number   uint32
	Priority int32
	Type     string
}

// Base makes a chain with the policy accept a base chain.
func (b *Buffer) Base(h Hook) {
	b.Nested(unix.NFTA_CHAIN_HOOK, func() {
		b.Uint32(unix.NFTA_HOOK_HOOKNUM, h.Number)
		b.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(h.Priority)) //nolint:gosec // two's complement
	})
	b.Uint32(unix.NFTA_CHAIN_POLICY, Accept)
	b.String(unix.NFTA_CHAIN_TYPE, h.Type)
}

// ReadHook returns the hook of a chain, whether the policy is drop, and whether it is a base chain.
func ReadHook(chain Attributes) (h Hook, drops, base bool) {
	nested := Attributes(chain.Get(unix.NFTA_CHAIN_HOOK).Value)
	h.Number, base = nested.Get(unix.NFTA_HOOK_HOOKNUM).Uint32()
	priority, _ := nested.Get(unix.NFTA_HOOK_PRIORITY).Uint32()
	policy, named := chain.Get(unix.NFTA_CHAIN_POLICY).Uint32()
	h.Priority, h.Type = int32(priority), chain.Get(unix.NFTA_CHAIN_TYPE).Text() //nolint:gosec // two's complement
	return h, named && policy == Drop, base
}
