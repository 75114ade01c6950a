package settings

import (
	"slices"
	"strconv"
	"strings"
)

// Candidate is a text that can complete a word of a command line, with a description or "".
type Candidate struct{ Text, Use string }

// Completion is what can complete an argument.
type Completion struct {
	Found []Candidate
	// Open is set for a value of Flag or, where that is "", an operand: Word is the part that is there, Lead what stands before it.
	Open             bool
	Flag, Lead, Word string
}

// Complete returns what can complete the last argument: flags, the words of a flag's value, or an open end.
func Complete(rows []Setting, args []string) Completion {
	last := len(args) - 1
	c := Completion{Word: args[last]}
	name, value, attached := strings.Cut(c.Word, "=")
	switch before := args[max(0, last-1)]; {
	case attached && strings.HasPrefix(name, "-"):
		c.Lead, c.Word = name+"=", value
	case last > 0 && strings.HasPrefix(before, "-") && !strings.Contains(before, "="):
		name = before
	default:
		name = ""
	}
	switch s := find(rows, name); {
	case s != nil && (s.Arg != "" || attached):
		c.Open, c.Flag, c.Found = true, s.Name, s.words(c.Lead, c.Word)
	case strings.HasPrefix(c.Word, "-"):
		c.Found = flagsFrom(rows, c.Word)
	default:
		c.Open = true
	}
	return c
}

// words returns the words of a choice that begin with a prefix, behind lead.
func (s *Setting) words(lead, prefix string) (found []Candidate) {
	choice, is := s.Value.(interface{ choices() []string })
	if !is {
		return nil
	}
	for _, w := range choice.choices() {
		if w != "" && strings.HasPrefix(w, prefix) {
			found = append(found, Candidate{Text: lead + w})
		}
	}
	return found
}

// flagsFrom returns the flags that begin with a prefix. One letter is offered only when it is complete.
func flagsFrom(rows []Setting, prefix string) (found []Candidate) {
	for _, s := range slices.Concat(rows, []Setting{{Name: "help", Use: "prints the help"}}) {
		for _, flag := range s.flags() {
			if text := dashed(flag); strings.HasPrefix(text, prefix) && (len(flag) > 1 || text == prefix) {
				found = append(found, Candidate{text, s.Use})
			}
		}
	}
	return found
}

// find returns the setting of a flag that is written with its dashes.
func find(rows []Setting, flag string) *Setting {
	name := strings.TrimPrefix(strings.TrimPrefix(flag, "-"), "-")
	at := slices.IndexFunc(rows, func(s Setting) bool { return name != flag && slices.Contains(s.flags(), name) })
	if at < 0 {
		return nil
	}
	return &rows[at]
}

// Suggestion returns the end of an error about an unknown name, which names the nearest known one, or "" if none is near.
func Suggestion(name string, known []string) string {
	const (
		most    = 64 // bytes of a name that was meant to be a known one
		letters = 3  // of which one may be wrong
	)
	bare := strings.TrimLeft(name, "-")
	best, least := "", (len(bare)+1)/letters
	for _, k := range known {
		d := distance(bare, strings.TrimLeft(k, "-"))
		if len(bare) > 1 && strings.HasPrefix(k, name) {
			d = min(d, 1) // a beginning
		}
		if len(name) <= most && d <= least && (best == "" || d < least) {
			best, least = k, d
		}
	}
	if best == "" {
		return ""
	}
	return ": did you mean " + strconv.Quote(best) + "?"
}

// distance is the number of letters to insert, remove, replace or swap with their neighbour.
func distance(a, b string) int {
	before, row := make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		older := before
		before, row = row, make([]int, len(b)+1)
		row[0] = i + 1
		for j := range len(b) {
			change := 1
			if a[i] == b[j] {
				change = 0
			}
			row[j+1] = min(before[j+1]+1, row[j]+1, before[j]+change)
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				row[j+1] = min(row[j+1], older[j-1]+1)
			}
		}
	}
	return row[len(b)]
}
