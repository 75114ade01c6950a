package nftrace

import (
	"context"
	"errors"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// maxObjects bounds the tables, chains and rules of a namespace among which stale tables are searched: the processes of a pod can make
// any number.
const maxObjects = 4096

// rulesOf is the number of rules in the table of a trace.
const rulesOf = 4

// removeStale removes the tables that traces of processes left behind which are gone, and of an earlier process with the number of
// this one. A pod can give any table such a name: what is in it tells. A table with an owner goes with its process.
func (t *Tracer) removeStale() error {
	if _, err := t.conn.Generation(); err != nil {
		return err
	}
	t.conn.Budget = nfnetlink.Budget{Objects: maxObjects, Bytes: maxObjects << 10}
	var stale []string
	err := t.dump(unix.NFT_MSG_GETTABLE, "", func(_ string, a nfnetlink.Attributes) {
		flags, _ := a.Get(unix.NFTA_TABLE_FLAGS).Uint32()
		holds, _ := a.Get(unix.NFTA_TABLE_USE).Uint32()
		name := a.Get(unix.NFTA_TABLE_NAME).Text()
		number, found := strings.CutPrefix(name, redirect.TraceTable)
		number, _, _ = strings.Cut(number, "-")
		pid, err := strconv.Atoi(number)
		if found && err == nil && flags == 0 && int(holds) == len(chains()) && (pid == os.Getpid() || errors.Is(unix.Kill(pid, 0), unix.ESRCH)) {
			stale = append(stale, name)
		}
	})
	if err != nil || len(stale) == 0 {
		return err
	}
	parts := map[string]int{} // chains and rules of a trace by table
	err = t.dump(unix.NFT_MSG_GETCHAIN, "", func(table string, a nfnetlink.Attributes) {
		if isMarkChain(a) {
			parts[table]++
		}
	})
	for i := 0; i < len(stale) && err == nil; i++ {
		err = t.dump(unix.NFT_MSG_GETRULE, stale[i], func(table string, a nfnetlink.Attributes) {
			if table == stale[i] && isMark(a.Get(unix.NFTA_RULE_EXPRESSIONS).Value) {
				parts[table]++
			} else if table == stale[i] {
				parts[table] = -len(chains()) - rulesOf // also with as many rules as it needs
			}
		})
	}
	if stale = slices.DeleteFunc(stale, func(name string) bool { return parts[name] != len(chains())+rulesOf }); err != nil || len(stale) == 0 {
		return err
	}
	return t.remove(stale...)
}

// dump calls each with the tables of the family inet, or with the chains or rules and their tables. A table narrows the list of rules.
func (t *Tracer) dump(kind uint16, table string, each func(table string, a nfnetlink.Attributes)) error {
	narrow := func(b *nfnetlink.Buffer) {
		if table != "" {
			b.String(unix.NFTA_RULE_TABLE, table)
		}
	}
	return t.conn.Dump(context.Background(), kind, unix.NFPROTO_INET, narrow, func(m nfnetlink.Message) error {
		each(m.Attributes.Get(unix.NFTA_RULE_TABLE).Text(), m.Attributes) // of chains and tables it has the same number
		return nil
	})
}

// isMarkChain reports whether a chain is as mark makes it.
func isMarkChain(a nfnetlink.Attributes) bool {
	hook := nfnetlink.Attributes(a.Get(unix.NFTA_CHAIN_HOOK).Value)
	number, hooked := hook.Get(unix.NFTA_HOOK_HOOKNUM).Uint32()
	priority, _ := hook.Get(unix.NFTA_HOOK_PRIORITY).Uint32()
	policy, _ := a.Get(unix.NFTA_CHAIN_POLICY).Uint32()
	return hooked && policy == nfnetlink.Accept &&
		slices.Contains(chains(), base{a.Get(unix.NFTA_CHAIN_NAME).Text(), number, int32(priority)}) //nolint:gosec // two's complement
}

// isMark reports whether a rule does nothing but to mark packets for the trace, whatever packets these are.
func isMark(expressions nfnetlink.Attributes) bool {
	marks := false
	for e := range expressions.All() {
		name, data, ok := nfnetlink.SplitExpression(e)
		number := func(kind uint16) uint32 { n, _ := data.Number(kind); return n }
		switch nfnetlink.Label(name, data) {
		case "meta", "cmp", "payload", "bitwise", "limit":
		case "immediate":
			ok = ok && number(unix.NFTA_IMMEDIATE_DREG) != unix.NFT_REG_VERDICT
		case "meta=":
			marks = number(unix.NFTA_META_KEY) == unix.NFT_META_NFTRACE
			ok = ok && marks
		default:
			ok = false
		}
		if !ok {
			return false
		}
	}
	return marks
}
