package settings

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"
)

// value is a typed field with its reader and its spelling.
type value[T any] struct {
	into *T
	read func(string) (T, error)
	show func(T) string
	// words are all texts of a value with a choice.
	words []string
}

func (v value[T]) Set(text string) error {
	got, err := v.read(text)
	if err == nil {
		*v.into = got
	}
	return err
}

func (v value[T]) String() string { return v.show(*v.into) }

// Of returns a Value of any type.
func Of[T any](into *T, read func(string) (T, error), show func(T) string) Value {
	return value[T]{into: into, read: read, show: show}
}

// Text returns a text that read normalizes; a nil read accepts any text unchanged.
func Text(into *string, read func(string) (string, error)) Value {
	if read == nil {
		read = func(s string) (string, error) { return s, nil }
	}
	return Of(into, read, func(s string) string { return s })
}

// Checked returns a text that must pass a check.
func Checked(into *string, check func(string) error) Value {
	return Text(into, Check(check))
}

// Check returns a reader that checks a text and returns it unchanged.
func Check(check func(string) error) func(string) (string, error) {
	return func(s string) (string, error) { return s, check(s) }
}

// Optional returns a reader that accepts the empty text as well.
func Optional(read func(string) (string, error)) func(string) (string, error) {
	return func(s string) (string, error) {
		if s == "" {
			return "", nil
		}
		return read(s)
	}
}

// Bool returns a switch.
func Bool(into *bool) Value {
	return Of(into, func(s string) (bool, error) {
		on, err := strconv.ParseBool(s)
		if err != nil {
			return false, errors.New("want true or false")
		}
		return on, nil
	}, strconv.FormatBool)
}

// Choice returns a choice among several words.
func Choice[T ~string](into *T, of ...T) Value {
	words := make([]string, len(of))
	for i, o := range of {
		words[i] = string(o)
	}
	return value[T]{into, func(s string) (T, error) {
		if slices.Contains(of, T(s)) {
			return T(s), nil
		}
		return "", fmt.Errorf("want one of %s", strings.TrimPrefix(strings.Join(words, ", "), ", ")) // without an empty one
	}, func(v T) string { return string(v) }, words}
}

// Choices returns a list of words of a choice, between commas.
func Choices[T ~string](into *[]string, of ...T) Value {
	one := Choice(new(T), of...).(value[T])
	list := List(into, ",", 0, func(s string) (string, error) {
		_, err := one.read(s)
		return s, err
	}).(value[[]string])
	list.words = one.words
	return list
}

func (v value[T]) choices() []string { return v.words }

// Permissions parses a mode as chmod(1) does: octal digits with any prefix, never decimal.
func Permissions(into *fs.FileMode) Value {
	return Of(into, func(s string) (fs.FileMode, error) {
		digits := strings.TrimPrefix(strings.TrimPrefix(s, "0o"), "0O")
		n, err := strconv.ParseUint(digits, 8, 32)
		if err != nil || n > uint64(fs.ModePerm) {
			return 0, errors.New("want permissions in octal digits, like 0600")
		}
		return fs.FileMode(n), nil
	}, func(m fs.FileMode) string { return fmt.Sprintf("%04o", uint32(m)) })
}

// Port returns a TCP port. If lowest is 0, 0 means off, and so does a negative number, as in the reference.
func Port(into *uint16, lowest uint16) Value {
	return Of(into, func(s string) (uint16, error) {
		if n, err := strconv.ParseInt(s, 10, 32); err == nil && n < 0 && lowest == 0 {
			return 0, nil
		}
		n, err := strconv.ParseUint(s, 10, 16)
		if err != nil || uint16(n) < lowest {
			return 0, fmt.Errorf("want a decimal port from %d to 65535", lowest)
		}
		return uint16(n), nil
	}, func(n uint16) string { return strconv.Itoa(int(n)) })
}

// Number returns a decimal integer from 0 to most.
func Number(into *int, most int) Value {
	return Of(into, func(s string) (int, error) {
		n, err := strconv.ParseUint(s, 10, 31)
		if err != nil || int(n) > most {
			return 0, fmt.Errorf("want a number from 0 to %d", most)
		}
		return int(n), nil
	}, strconv.Itoa)
}

// Duration returns a duration from least to most; a most of 0 is no upper bound.
func Duration(into *time.Duration, least, most time.Duration) Value {
	return Of(into, func(s string) (time.Duration, error) {
		d, err := time.ParseDuration(s)
		switch {
		case err != nil || d < least:
			return 0, fmt.Errorf("want a duration such as 90s or 2m, of %s or more", least)
		case most > 0 && d > most:
			return 0, fmt.Errorf("want a duration of %s or less", most)
		}
		return d, nil
	}, time.Duration.String)
}

// List returns a list of items between separators, without blank items and duplicates.
func List(into *[]string, separators string, least int, read func(string) (string, error)) Value {
	return Of(into, func(s string) ([]string, error) {
		var items, problems []string
		for field := range strings.FieldsFuncSeq(s, func(r rune) bool { return strings.ContainsRune(separators, r) }) {
			if field = strings.TrimSpace(field); field == "" {
				continue
			}
			item, err := read(field)
			if err != nil {
				problems = append(problems, fmt.Sprintf("item %q: %s", field, err))
			} else if !slices.Contains(items, item) {
				items = append(items, item)
			}
		}
		switch {
		case len(problems) > 0:
			return nil, errors.New(strings.Join(problems, "; "))
		case len(items) < least:
			return nil, errors.New("want at least one item")
		}
		return items, nil
	}, func(items []string) string { return strings.Join(items, ",") })
}

// FileName accepts the name of a file without a directory.
func FileName(s string) (string, error) {
	if s == "" || s == "." || s == ".." || strings.ContainsAny(s, "/\x00") || strings.TrimSpace(s) != s {
		return "", errors.New("want the name of a file without a directory")
	}
	return s, nil
}

// AbsolutePath accepts an absolute path and cleans it.
func AbsolutePath(s string) (string, error) {
	if !path.IsAbs(s) || strings.ContainsRune(s, 0) {
		return "", errors.New("want an absolute path")
	}
	return path.Clean(s), nil
}
