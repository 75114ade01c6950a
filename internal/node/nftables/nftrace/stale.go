package nftrace

import (
	"context"
	"errors"
	"os"
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
	var named, stale []string
	err := t.dump(unix.NFT_MSG_GETTABLE, "", func(table nfnetlink.Attributes) {
		if isStale(table) {
			named = append(named, table.Get(unix.NFTA_TABLE_NAME).Text())
		}
	})
	for _, name := range named {
		traces, failed := t.isTrace(name)
		if failed != nil {
			return failed
		}
		if traces {
			stale = append(stale, name)
		}
	}
	if err != nil || len(stale) == 0 {
		return err
	}
	return t.remove(stale...)
}

// isTrace reports whether a table has the chains and the rules of a trace, and no others.
func (t *Tracer) isTrace(name string) (bool, error) {
	marks, rules := 0, 0
	err := t.dump(unix.NFT_MSG_GETCHAIN, name, func(chain nfnetlink.Attributes) {
		if isMarkChain(chain) {
			marks++
		}
	})
	if err == nil {
		err = t.dump(unix.NFT_MSG_GETRULE, name, func(rule nfnetlink.Attributes) {
			if rules++; isMark(rule.Get(unix.NFTA_RULE_EXPRESSIONS).Value) {
				marks++
			}
		})
	}
	return rules == rulesOf && marks == len(chains())+rulesOf, err
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

// dump calls each with the tables of the family inet, or with the chains or rules of a table.
func (t *Tracer) dump(kind uint16, table string, each func(nfnetlink.Attributes)) error {
	narrow := func(b *nfnetlink.Buffer) {
		if table != "" {
			b.String(unix.NFTA_RULE_TABLE, table)
		}
	}
	return t.conn.Dump(context.Background(), kind, unix.NFPROTO_INET, narrow, func(m nfnetlink.Message) error {
		if table == "" || m.Attributes.Get(unix.NFTA_RULE_TABLE).Text() == table { // chains have the same number for it
			each(m.Attributes)
		}
		return nil
	})
}

// isMarkChain reports whether a chain equals one that mark makes.
func isMarkChain(a nfnetlink.Attributes) bool {
	hook, drops, base := nfnetlink.ReadHook(a)
	want, known := chains()[a.Get(unix.NFTA_CHAIN_NAME).Text()]
	return base && !drops && known && hook == want
}

// isMark reports whether a rule only marks packets for the trace, whatever packets it selects.
func isMark(expressions nfnetlink.Attributes) bool {
	r := decode.Table{}.Rule(0, expressions, nil)
	return r.Target == ruleset.Target(decode.Trace) && strings.HasSuffix(r.String(), decode.Trace.Text)
}
