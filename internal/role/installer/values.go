package installer

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net/netip"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
)

// value is a typed place of the configuration with its spelling.
type value[T any] struct {
	into *T
	read func(string) (T, error)
	show func(T) string
}

// Set reads a text. The error says what is wanted and leaves naming the text to the caller.
func (v value[T]) Set(text string) error {
	got, err := v.read(text)
	if err != nil {
		return err
	}
	*v.into = got
	return nil
}

// String spells what is in force, the same for equal values.
func (v value[T]) String() string { return v.show(*v.into) }

func text(into *string, read func(string) (string, error)) flag.Value {
	return value[string]{into, read, func(s string) string { return s }}
}

func toggle(into *bool) flag.Value {
	return value[bool]{into, func(s string) (bool, error) {
		on, err := strconv.ParseBool(s)
		if err != nil {
			return false, errors.New("want true or false")
		}
		return on, nil
	}, strconv.FormatBool}
}

func choice[T ~string](into *T, of ...T) flag.Value {
	return value[T]{into, func(s string) (T, error) {
		if slices.Contains(of, T(s)) {
			return T(s), nil
		}
		words := make([]string, len(of))
		for i, o := range of {
			words[i] = string(o)
		}
		return "", fmt.Errorf("want one of %s", strings.Join(words, ", "))
	}, func(v T) string { return string(v) }}
}

// permissions reads what chmod(1) does: octal digits, whatever the prefix. A decimal mode is never meant.
func permissions(into *fs.FileMode) flag.Value {
	return value[fs.FileMode]{into, func(s string) (fs.FileMode, error) {
		digits := strings.TrimPrefix(strings.TrimPrefix(s, "0o"), "0O")
		n, err := strconv.ParseUint(digits, 8, 32)
		if err != nil || n > uint64(fs.ModePerm) {
			return 0, errors.New("want permissions in octal digits, like 0600")
		}
		return fs.FileMode(n), nil
	}, func(m fs.FileMode) string { return fmt.Sprintf("%04o", uint32(m)) }}
}

func port(into *uint16, lowest uint16) flag.Value {
	return value[uint16]{into, func(s string) (uint16, error) {
		if n, err := strconv.ParseInt(s, 10, 32); err == nil && n < 0 && lowest == 0 {
			return 0, nil // off, as the reference reads it
		}
		n, err := strconv.ParseUint(s, 10, 16)
		if err != nil || uint16(n) < lowest {
			return 0, fmt.Errorf("want a decimal port from %d to 65535", lowest)
		}
		return uint16(n), nil
	}, func(n uint16) string { return strconv.Itoa(int(n)) }}
}

// list reads items between separators; blank ones do not count and one that was there already is left out.
func list(into *[]string, separator func(rune) bool, read func(string) (string, error)) value[[]string] {
	return value[[]string]{into, func(s string) ([]string, error) {
		var out []string
		var errs []error
		for field := range strings.FieldsFuncSeq(s, separator) {
			if field = strings.TrimSpace(field); field == "" {
				continue
			}
			item, err := read(field)
			if err != nil {
				errs = append(errs, fmt.Errorf("item %q: %w", field, err))
			} else if !slices.Contains(out, item) {
				out = append(out, item)
			}
		}
		if len(errs) > 0 {
			return nil, sentence(errs)
		}
		return out, nil
	}, func(items []string) string { return strings.Join(items, ",") }}
}

// full is a list that must not be empty.
func full(v value[[]string]) flag.Value {
	read := v.read
	v.read = func(s string) ([]string, error) {
		items, err := read(s)
		if err == nil && len(items) == 0 {
			return nil, errors.New("want at least one item")
		}
		return items, err
	}
	return v
}

func comma(r rune) bool        { return r == ',' }
func commaOrBlank(r rune) bool { return r == ',' || r == ' ' || r == '\t' || r == '\n' || r == '\r' }

// sentence puts several problems of one value on one line.
func sentence(errs []error) error {
	words := make([]string, len(errs))
	for i, err := range errs {
		words[i] = err.Error()
	}
	return errors.New(strings.Join(words, "; "))
}

func anyText(s string) (string, error) { return s, nil }

func optional(read func(string) (string, error)) func(string) (string, error) {
	return func(s string) (string, error) {
		if s == "" {
			return "", nil
		}
		return read(s)
	}
}

func baseName(s string) (string, error) {
	if s == "" || s == "." || s == ".." || strings.ContainsAny(s, "/\x00") || strings.TrimSpace(s) != s {
		return "", errors.New("want the name of a file without a directory")
	}
	return s, nil
}

func absolute(s string) (string, error) {
	if !path.IsAbs(s) || strings.ContainsRune(s, 0) {
		return "", errors.New("want an absolute path")
	}
	return path.Clean(s), nil
}

// A unix socket's path has 108 bytes with its final zero, unix(7).
const longestSocket = 107

func socket(s string) (string, error) {
	s, err := absolute(s)
	if err == nil && len(s) > longestSocket {
		return "", fmt.Errorf("want a path of at most %d bytes: the kernel takes no longer one for a socket", longestSocket)
	}
	return s, err
}

// label is a name as Kubernetes gives to namespaces (RFC 1123 label).
func label(s string) (string, error) {
	const longest = 63
	if s == "" || len(s) > longest || strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" ||
		s[0] == '-' || s[len(s)-1] == '-' {
		return "", fmt.Errorf("want a name of at most %d lower case letters, digits and inner dashes", longest)
	}
	return s, nil
}

// object is a name as Kubernetes gives to most objects (RFC 1123 subdomain).
func object(s string) (string, error) {
	const longest = 253
	for part := range strings.SplitSeq(s, ".") {
		if _, err := label(part); err != nil || len(s) > longest {
			return "", fmt.Errorf("want a name of at most %d lower case letters, digits, inner dashes and dots", longest)
		}
	}
	return s, nil
}

func serverHost(s string) (string, error) {
	s = strings.TrimSuffix(strings.TrimPrefix(s, "["), "]")
	if s == "" || strings.ContainsAny(s, " \t\r\n/[]@?#\"") {
		return "", errors.New("want a host name or an IP address")
	}
	return s, nil
}

func loopback(s string) (string, error) {
	if addr, err := netip.ParseAddr(s); s != "localhost" && (err != nil || !addr.IsLoopback()) {
		return "", errors.New("want localhost, ::1 or an address in 127.0.0.0/8: what it serves is not for others")
	}
	return s, nil
}

// stanzaKey reads a setting with the plugin's own parser.
func stanzaKey[T any](into *T, key string, of func(cniconf.NetConf) T, show func(T) string) flag.Value {
	return value[T]{into, func(s string) (none T, err error) {
		stanza, err := json.Marshal(map[string]string{key: s})
		if err != nil {
			return none, fmt.Errorf("encoding key %q: %w", key, err)
		}
		conf, err := cniconf.Parse(stanza)
		if err == nil {
			err = conf.Problems
		}
		if err != nil {
			return none, err
		}
		return of(conf), nil
	}, show}
}
