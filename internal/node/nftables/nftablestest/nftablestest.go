// Package nftablestest fills network namespaces with objects of nf_tables, as a tenant with CAP_NET_ADMIN could.
//
// Start reading at Fill.
package nftablestest

import (
	"errors"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/nftables/nfnetlink"
)

// atOnce is the number of messages in one transaction.
const atOnce = 20_000

// Fill makes a table, the given number of chains in it and of empty rules in the last chain. The only or last chain
// has the given name; the others have a number after it.
func Fill(tb testing.TB, path string, family uint8, table, chain string, chains, rules int) {
	tb.Helper()
	err := netns.Do(path, func() error {
		conn, err := nfnetlink.Open()
		if err != nil {
			return err
		}
		return errors.Join(fill(conn, family, table, chain, chains, rules), conn.Close())
	})
	if err != nil {
		tb.Fatal(err)
	}
}

func fill(conn *nfnetlink.Conn, family uint8, table, chain string, chains, rules int) error {
	for made := 0; made < chains+rules; made += atOnce {
		err := conn.Transact(func(batch *nfnetlink.Batch) error {
			batch.Add(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, family, func(b *nfnetlink.Buffer) { b.String(unix.NFTA_TABLE_NAME, table) })
			for i := made; i < min(made+atOnce, chains+rules); i++ {
				add(batch, family, table, chain, i, chains)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// add adds the i-th object: a chain, or a rule in the last one.
func add(batch *nfnetlink.Batch, family uint8, table, chain string, i, chains int) {
	if i >= chains {
		batch.Add(unix.NFT_MSG_NEWRULE, unix.NLM_F_CREATE|unix.NLM_F_APPEND, family, func(b *nfnetlink.Buffer) {
			b.In(table, chain)
			b.Nested(unix.NFTA_RULE_EXPRESSIONS, func() {})
		})
		return
	}
	if left := chains - 1 - i; left > 0 {
		chain = fmt.Sprintf("%s-%d", chain, left)
	}
	batch.Add(unix.NFT_MSG_NEWCHAIN, unix.NLM_F_CREATE, family, func(b *nfnetlink.Buffer) { b.Chain(table, chain) })
}
