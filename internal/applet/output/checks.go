package output

import (
	"cmp"
	"fmt"
	"io"
	"strings"
)

// Result is the outcome of a check.
type Result string

// The results.
const (
	OK   Result = "ok"
	Warn Result = "warn"
	Fail Result = "fail"
)

// Check is the finding of the command doctor about one subject.
type Check struct {
	Name   string `json:"name"`
	Result Result `json:"result"`
	Text   string `json:"text"`
	Remedy string `json:"remedy,omitempty"`
}

// Checks prints one line for each check, the remedy below a check that is not ok, and a last line with the number of each result.
// The texts must be printable.
func Checks(w io.Writer, all []Check) error {
	count := map[Result]int{}
	var b strings.Builder
	for _, c := range all {
		count[c.Result]++
		sign := cmp.Or(map[Result]string{OK: "✓", Warn: "!", Fail: "✗"}[c.Result], "?")
		fmt.Fprintf(&b, "%s %s: %s\n", sign, c.Name, c.Text)
		if c.Result != OK && c.Remedy != "" {
			fmt.Fprintf(&b, "    %s\n", c.Remedy)
		}
	}
	fmt.Fprintf(&b, "%d ok, %s, %s\n", count[OK], Plural(count[Warn], "warning"), Plural(count[Fail], "failure"))
	_, err := io.WriteString(w, b.String())
	return err
}

// Plural returns a number with its noun, in the plural unless n is 1.
func Plural(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
