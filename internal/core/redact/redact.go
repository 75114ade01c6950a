// Package redact makes texts that leave the node free of credentials.
//
// Of a JSON document of another program, [Redactor.Foreign] promises values of known keys only: everything else is its type and length.
//
// In texts of this program, [Redactor.Text] and [Redactor.JSON] promise that no given secret, token of the form of a JWT, bearer token,
// value of an Authorization or Cookie header, user or password of a URL, PEM block, or value of a name that speaks of a token, secret,
// password, private key or credential is left, also where the text was cut, and no comment of a rule. A file's name is not a secret:
// names that end in file, path or dir keep their value. They may take out too much, but of no more than one line or PEM block: pods can
// write into a log. They do not find a secret of another form, so that texts of other programs are not for them.
//
// It reads nothing, so that it does not know the secrets of the node by itself.
//
// Start at New.
package redact

import (
	"bytes"
	"cmp"
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
	`|(?:api|private|access|client|encryption|signing|shared|session|tls|account|etcd|ipsec)[_. -]?key|client[_-]?cert)`

// Redactor finds credentials. It is safe for concurrent use.
type Redactor struct {
	secrets [][]byte
	// block are credentials of several lines, token and whole are texts that are credentials, named a name with its value, option an
	// option with its argument.
	block, token, whole, named, option, isPlace *regexp.Regexp
	// keys are known, and others are shown if they have this form.
	keys  map[string]bool
	other *regexp.Regexp
}

// New returns a redactor that also knows these secrets. It compiles expressions: the plugin's start must not call it.
func New(secrets ...string) *Redactor {
	r := &Redactor{
		// The body has base64, or headers of the block (RFC 1421), and its line ends may be escaped.
		block: regexp.MustCompile(pem + `[A-Z0-9 ]+-----(?:` + pemBody + `*?-----END [A-Z0-9 ]+-----|` + pemBody + `*)`),
		whole: regexp.MustCompile(`LS0tLS1CRUdJTi[A-Za-z0-9+/=]*|eyJ[A-Za-z0-9_-]{6,}\.[A-Za-z0-9._-]+|ZXlK[A-Za-z0-9+/=]{20,}` +
			`|(?i:\b(?:bearer|basic)[\s+]+)[A-Za-z0-9._~+/=-]{8,}|://[^/\s@"']+@|[?&](?:sig|code)=[^&\s"']+` +
			`|(?i:\b(?:authorization|cookie|api-key):[ ]*)[^"'\\\n]+`),
		token:   regexp.MustCompile(`(?:\b(?:` + strings.Join(prefixes, "|") + `)|\$(?:[56y]|2[aby]|apr1)\$)[A-Za-z0-9/_.$-]{12,}`),
		named:   regexp.MustCompile(`(?i)([a-z0-9_.-]*` + secretName + `[a-z0-9_.-]*)(\\*["']?\s*[:=]+[\s\[]*)` + value),
		option:  regexp.MustCompile(`(--[a-z-]*(?:` + secretName + `|comment|prefix|string)[a-z-]*)(\s+)` + value),
		isPlace: regexp.MustCompile(`(?i)(?:file|path|dir)s?$`),
	}
	r.keys, r.other = newForeign()
	for _, s := range secrets {
		if s = strings.TrimSpace(s); len(s) >= shortest {
			r.secrets = append(r.secrets, []byte(s))
		}
	}
	slices.SortFunc(r.secrets, func(a, b []byte) int { return cmp.Compare(len(b), len(a)) }) // one may be a part of another
	return r
}

// value is that of a name, quoted at most three times, and perhaps cut.
const value = `(\\{3}".*?(?:\\{3}"|$)|\\"(?:[^"\\\n]|\\[^"])*(?:\\"|$)|"(?:[^"\\\n]|\\.)*(?:"|\\?$)|'[^'\n]*(?:'|$)` +
	`|[^\s,;{}\[\]()"'\\](?:[^\s"'\\]|\\[^"'])*)`

// prefixes begin tokens of services.
var prefixes = []string{ //nolint:gochecknoglobals // a constant table
	"ghp_", "gho_", "ghs_", "github_pat_", "glpat-", "xoxb-", "xoxp-", "hooks.slack.com", "AIza", "sk_live_", "rk_live_", "hvs.", "npm_", "sk-", "AKIA",
}

// quotes are those around a value.
var quotes = []string{`\\\"`, `\"`, `"`, `'`} //nolint:gochecknoglobals // a constant table

// pem is the beginning of a block.
const pem = "-----BEGIN "

const pemBody = `[A-Za-z0-9+/=\s\\:,.()-]`

// hints are in each line, in lower case, in which whole and named can find something.
var hints = []string{ //nolint:gochecknoglobals // a constant table
	"token", "secret", "passw", "passphrase", "pwd", "psk", "auth", "credential", "signature", "sig=", "cookie", "key", "cert",
	"ls0tls1crudjti", "eyj", "zxlk", "bearer", "basic", "://", "code=",
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
		clean = append(clean, r.line(line)...)
	}
	return clean
}

// line runs the expressions that can find something in a line: they are slow.
func (r *Redactor) line(text []byte) []byte {
	has := func(hint string) bool { return bytes.Contains(text, []byte(hint)) }
	if has("$") || slices.ContainsFunc(prefixes, has) {
		text = r.token.ReplaceAllLiteral(text, []byte(Mark))
	}
	if has("--") {
		text = r.values(r.option, text)
	}
	lower := bytes.ToLower(text)
	if slices.ContainsFunc(hints, func(hint string) bool { return bytes.Contains(lower, []byte(hint)) }) {
		text = r.values(r.named, r.whole.ReplaceAllLiteral(text, []byte(Mark)))
	}
	return text
}

// values replaces the value in each match: a name, what is between, and the value.
func (r *Redactor) values(in *regexp.Regexp, text []byte) []byte {
	return in.ReplaceAllFunc(text, func(found []byte) []byte {
		part := in.FindSubmatch(found)
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
