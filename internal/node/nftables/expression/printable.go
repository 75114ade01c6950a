package expression

import "strings"

// Printable reports whether a rule's text has nothing but what is printed of one: a name with a zero in it, say, would end
// there for the kernel.
func Printable(spec string) bool {
	return !strings.ContainsFunc(spec, func(c rune) bool { return c < ' ' || c > '~' })
}
