// Package redact takes credentials out of texts that leave the node.
//
// It promises that no given secret, token of the form of a JWT, bearer token, value of an Authorization or Cookie header, user or
// password of a URL, PEM block, or value of a name that speaks of a token, secret, password, private key or credential is left, in
// plain text and in JSON, also where the text was cut. A file's name is not a secret: names that end in file, path or dir keep their
// value. It may take out too much, but of no more than one line or PEM block: pods can write into a log.
//
// It reads nothing, so that it does not know the secrets of the node by itself.
//
// Start at New.
package redact

import (
	"bytes"
	"cmp"
	"encoding/json"
	"io"
	"regexp"
	"slices"
	"strings"
)

// Mark replaces a credential.
const Mark = "(redacted)"

// shortest is the least length of a given secret, in bytes: a shorter one would be found everywhere.
const shortest = 8

// The names of credentials, in any case.
const secretName = `(?:token|secret|passw(?:or)?d|passphrase|pwd|psk|bearer|credential|signature|auth(?:orization)?\b|cookie` +
	`|(?:api|private|access|client|encryption|signing|shared|session|tls)[_. -]?key|client[_-]?cert)`

// Redactor finds credentials. It is safe for concurrent use.
type Redactor struct {
	secrets [][]byte
	// block are credentials of several lines, whole are texts that are credentials, named a name with its value, isSecret a name.
	block, whole, named, isSecret, isPlace *regexp.Regexp
}

// New returns a redactor that also knows these secrets. It compiles expressions: the plugin's start must not call it.
func New(secrets ...string) *Redactor {
	r := &Redactor{
		// The body has base64, or headers of the block (RFC 1421), and its line ends may be escaped.
		block: regexp.MustCompile(pem + `[A-Z0-9 ]+-----(?:` + pemBody + `*?-----END [A-Z0-9 ]+-----|` + pemBody + `*)`),
		whole: regexp.MustCompile(`LS0tLS1CRUdJTi[A-Za-z0-9+/=]*|eyJ[A-Za-z0-9_-]{6,}\.[A-Za-z0-9._-]+|ZXlK[A-Za-z0-9+/=]{20,}` +
			`|(?i:\b(?:bearer|basic)[\s+]+)[A-Za-z0-9._~+/=-]{8,}|://[^/\s@"']+@|[?&]sig=[^&\s"']+` +
			`|(?i:\b(?:authorization|cookie|api-key):[ ]*)[^"'\\\n]+`),
		named: regexp.MustCompile(`(?i)([a-z0-9_.-]*` + secretName + `[a-z0-9_.-]*)(\\*["']?\s*[:=]+[\s\[]*)` +
			`(\\{3}".*?(?:\\{3}"|$)|\\"(?:[^"\\\n]|\\[^"])*(?:\\"|$)|"(?:[^"\\\n]|\\.)*(?:"|\\?$)|'[^'\n]*(?:'|$)` +
			`|[^\s,;{}\[\]()"'\\](?:[^\s"'\\]|\\[^"'])*)`),
		isSecret: regexp.MustCompile(`(?i)` + secretName),
		isPlace:  regexp.MustCompile(`(?i)(?:file|path|dir)s?$`),
	}
	for _, s := range secrets {
		if s = strings.TrimSpace(s); len(s) >= shortest {
			r.secrets = append(r.secrets, []byte(s))
		}
	}
	slices.SortFunc(r.secrets, func(a, b []byte) int { return cmp.Compare(len(b), len(a)) }) // one may be a part of another
	return r
}

// quotes are those around a value.
var quotes = []string{`\\\"`, `\"`, `"`, `'`} //nolint:gochecknoglobals // a constant table

// pem is the beginning of a block.
const pem = "-----BEGIN "

const pemBody = `[A-Za-z0-9+/=\s\\:,.()-]`

// hints are in each line, in lower case, in which an expression can find something: the expressions are slow.
var hints = []string{ //nolint:gochecknoglobals // a constant table
	"token", "secret", "passw", "passphrase", "pwd", "psk", "auth", "credential", "signature", "sig=", "cookie", "key", "cert",
	"ls0tls1crudjti", "eyj", "zxlk", "bearer", "basic", "://",
}

// Text returns a text without credentials. Its lines stay lines, except within a PEM block.
func (r *Redactor) Text(text []byte) []byte {
	for _, s := range r.secrets {
		text = bytes.ReplaceAll(text, s, []byte(Mark))
	}
	if bytes.Contains(text, []byte(pem)) {
		text = r.block.ReplaceAllLiteral(text, []byte(Mark))
	}
	clean := make([]byte, 0, len(text))
	for line := range bytes.Lines(text) {
		lower := bytes.ToLower(line)
		if slices.ContainsFunc(hints, func(hint string) bool { return bytes.Contains(lower, []byte(hint)) }) {
			line = r.line(line)
		}
		clean = append(clean, line...)
	}
	return clean
}

func (r *Redactor) line(text []byte) []byte {
	text = r.whole.ReplaceAllLiteral(text, []byte(Mark))
	return r.named.ReplaceAllFunc(text, func(found []byte) []byte {
		part := r.named.FindSubmatch(found)
		if len(part) != 4 || r.isPlace.Match(part[1]) {
			return found
		}
		var quote, rest []byte
		if at := slices.IndexFunc(quotes, func(q string) bool { return bytes.HasPrefix(part[3], []byte(q)) }); at >= 0 {
			quote = []byte(quotes[at])
		} else if end := bytes.IndexAny(part[2], `"'`); end >= 0 { // a member of an object, perhaps a number: others follow
			quote = part[2][:end+1]
			if next := bytes.IndexAny(part[3], ",;{}[]()"); next >= 0 {
				rest = part[3][next:]
			}
		}
		return slices.Concat(part[1], part[2], quote, []byte(Mark), quote, rest)
	})
}

// names reports whether a name is that of a credential.
func (r *Redactor) names(name string) bool {
	return r.isSecret.MatchString(name) && !r.isPlace.MatchString(name)
}

// JSON returns a JSON document without credentials, indented. The members of an object are in the order of their names.
func (r *Redactor) JSON(text []byte) ([]byte, error) {
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	var value any
	err := decoder.Decode(&value)
	if err == nil && decoder.More() {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	err = encoder.Encode(r.value(value))
	return out.Bytes(), err
}

func (r *Redactor) value(value any) any {
	switch v := value.(type) {
	case string:
		return string(r.Text([]byte(v)))
	case []any:
		for i := range v {
			v[i] = r.value(v[i])
		}
	case map[string]any:
		return r.object(v)
	}
	return value
}

// object redacts the members of an object. An object with a name, or key, and a value is a variable or a setting.
func (r *Redactor) object(v map[string]any) map[string]any {
	var named bool
	for key, member := range v {
		name, _ := member.(string)
		named = named || (strings.EqualFold(key, "name") || strings.EqualFold(key, "key")) && r.names(name)
	}
	clean := make(map[string]any, len(v))
	for key, member := range v {
		secret := r.names(key) || named && strings.EqualFold(key, "value")
		key = string(r.Text([]byte(key)))
		if secret && member != "" && member != nil {
			clean[key] = Mark
		} else {
			clean[key] = r.value(member)
		}
	}
	return clean
}
