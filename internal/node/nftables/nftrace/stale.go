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
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/nftables/decode"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// maxObjects bounds the tables, chains and rules in which removeStale searches because the processes of a pod can make any number.
const maxObjects = 4096

// rulesOf is the number of rules in a trace's table.
const rulesOf = 4

// removeStale removes the tables that the traces of dead processes left behind, and the table of an earlier process with the same
// PID. A pod can give any table such a name, so the content must match too. A table with an owner goes with its process.
func (t *Tracer) removeStale() error {
	if _, err := t.conn.Generation(); err != nil {
		return err
	}
	t.conn.Budget = nfnetlink.Budget{Objects: maxObjects, Bytes: maxObjects << 10}
	stale, err := t.namedStale()
	if err != nil || len(stale) == 0 {
		return err
	}
	marks, err := t.countChains()
	for _, name := range stale {
		if err != nil {
			return err
		}
		err = t.countRules(name, marks)
	}
	stale = slices.DeleteFunc(stale, func(name string) bool { return marks[name] != len(chains())+rulesOf })
	if err != nil || len(stale) == 0 {
		return err
	}
	return t.remove(stale...)
}

// namedStale returns the names of the tables for which isStale is true.
func (t *Tracer) namedStale() (stale []string, err error) {
	err = t.dump(unix.NFT_MSG_GETTABLE, "", func(_ string, a nfnetlink.Attributes) {
		if isStale(a) {
			stale = append(stale, a.Get(unix.NFTA_TABLE_NAME).Text())
		}
	})
	return stale, err
}

// countChains counts a trace's chains by table.
func (t *Tracer) countChains() (map[string]int, error) {
	marks := map[string]int{}
	err := t.dump(unix.NFT_MSG_GETCHAIN, "", func(table string, a nfnetlink.Attributes) {
		if isMarkChain(a) {
			marks[table]++
		}
	})
	return marks, err
}

// countRules adds a table's trace rules to marks, and sets its count to 0 if the table does not have rulesOf rules.
func (t *Tracer) countRules(name string, marks map[string]int) error {
	rules := 0
	err := t.dump(unix.NFT_MSG_GETRULE, name, func(table string, a nfnetlink.Attributes) {
		if table != name {
			return
		}
		if rules++; isMark(a.Get(unix.NFTA_RULE_EXPRESSIONS).Value) {
			marks[name]++
		}
	})
	if rules != rulesOf {
		marks[name] = 0
	}
	return err
}

// isStale reports whether a table has no owner, the name of a trace whose process is gone, and as many objects as a trace's table.
func isStale(table nfnetlink.Attributes) bool {
	flags, _ := table.Get(unix.NFTA_TABLE_FLAGS).Uint32()
	holds, _ := table.Get(unix.NFTA_TABLE_USE).Uint32()
	number, found := strings.CutPrefix(table.Get(unix.NFTA_TABLE_NAME).Text(), redirect.TraceTable)
	number, _, _ = strings.Cut(number, "-")
	pid, err := strconv.Atoi(number)
	return found && err == nil && flags == 0 && int(holds) == len(chains()) && (pid == os.Getpid() || errors.Is(unix.Kill(pid, 0), unix.ESRCH))
}

// dump calls each with the tables of the family inet, or with chains or rules and their table. A table name limits the list of rules.
func (t *Tracer) dump(kind uint16, table string, each func(table string, a nfnetlink.Attributes)) error {
	narrow := func(b *nfnetlink.Buffer) {
		if table != "" {
			b.String(unix.NFTA_RULE_TABLE, table)
		}
	}
	return t.conn.Dump(context.Background(), kind, unix.NFPROTO_INET, narrow, func(m nfnetlink.Message) error {
		each(m.Attributes.Get(unix.NFTA_RULE_TABLE).Text(), m.Attributes) // chains and tables use the same number
		return nil
	})
}

// isMarkChain reports whether a chain equals one that mark makes.
func isMarkChain(a nfnetlink.Attributes) bool {
	hook := nfnetlink.Attributes(a.Get(unix.NFTA_CHAIN_HOOK).Value)
	number, hooked := hook.Get(unix.NFTA_HOOK_HOOKNUM).Uint32()
	priority, _ := hook.Get(unix.NFTA_HOOK_PRIORITY).Uint32()
	policy, _ := a.Get(unix.NFTA_CHAIN_POLICY).Uint32()
	return hooked && policy == nfnetlink.Accept &&
		slices.Contains(chains(), base{a.Get(unix.NFTA_CHAIN_NAME).Text(), number, int32(priority)}) //nolint:gosec // two's complement
}

// isMark reports whether a rule only marks packets for the trace, whatever packets it selects.
func isMark(expressions nfnetlink.Attributes) bool {
	r := decode.Table{}.Rule(0, expressions, nil)
	return r.Target == ruleset.Target(decode.Trace) && strings.HasSuffix(r.String(), decode.Trace.Text)
}
