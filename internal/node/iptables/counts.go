package iptables

import (
	"context"
	"fmt"
	"strconv"
	"strings"
)

// Count is the number of packets that matched a rule. Number is the rule's position in its chain, from 1.
type Count struct {
	Table, Chain string
	Number       int
	Rule         string
	Packets      uint64
}

// Counts returns the counters of all rules of the namespace that the tool lists.
func (t Tool) Counts(ctx context.Context) ([]Count, error) {
	if !t.inUse(ctx) {
		return nil, nil
	}
	text, err := t.run(ctx, t.save, "", "-c")
	if err != nil {
		return nil, fmt.Errorf("reading the counters of %s rules: %w", t.Family, err)
	}
	return parseCounts(text), nil
}

// parseCounts reads the output of iptables-save -c: "*TABLE", and "[PACKETS:BYTES] -A CHAIN RULE" for each rule.
func parseCounts(text string) (all []Count) {
	table, numbers := "", map[string]int{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if name, begins := strings.CutPrefix(line, "*"); begins {
			table = name
			clear(numbers)
			continue
		}
		counters, rule, _ := strings.Cut(line, " -A ")
		packets, _, is := strings.Cut(strings.TrimPrefix(counters, "["), ":")
		n, err := strconv.ParseUint(packets, 10, 64)
		if !is || err != nil || len(all) == maxRules {
			continue
		}
		chain, spec, _ := strings.Cut(rule, " ")
		numbers[chain]++
		all = append(all, Count{table, chain, numbers[chain], strings.TrimLeft(spec, " "), n})
	}
	return all
}
