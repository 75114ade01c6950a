// Package redact removes credentials from texts that leave the node.
//
// For another program's JSON document, [Redactor.Foreign] promises only the values of known keys; type and length replace all others.
// [Redactor.Object] does so for Kubernetes. Of a proxy's log, [Redactor.Records] shows records only, and [Redactor.Event] the messages of
// known reasons.
//
// In this program's texts, [Redactor.Text] and [Redactor.JSON] promise to remove every given secret, JWT, bearer token, value of an
// Authorization or Cookie header, user and password in a URL, PEM block, value of a name that suggests a token, secret, password,
// private key or credential, even if truncated, and every comment of a rule. File names are not secret: names that end in file, path
// or dir keep their value. They may remove too much, but never more than one line or PEM block because pods can write into a log.
// JSON looks at each text alone, without its member's name. They do not find secrets of other forms, so they are unfit for other
// programs' texts.
//
// It reads nothing: callers pass the node's secrets.
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

// shortest is the least length of a given secret, in bytes: a shorter secret would match everywhere.
const shortest = 8

// Names of credentials, in lower or upper case.
const secretName = `(?:token|secret|passw(?:or)?d|passphrase|(?:\b|_)pass\b|pwd|psk|bearer|credential|signature` +
	`|auth(?:orization)?\b|cookie|jwt\b|session[_-]?id\b` +
	`|(?:api|private|access|client|encryption|signing|shared|session|tls|account|etcd|ipsec|master)[_. -]?key|client[_-]?cert)`

// Redactor finds credentials. It is safe for concurrent use.
type Redactor struct {
	secrets [][]byte
	// block matches credentials of several lines, token and whole match bare credentials, named matches a name with its value, option
	// matches an option with its argument, comment matches a rule's in nft's text.
	block, token, whole, named, option, comment, isPlace *regexp.Regexp

	foreign, object *table
	reasons         map[string]bool
	patterns
}

// New returns a Redactor that also removes these secrets. It compiles expressions: the plugin must not call it at start.
func New(secrets ...string) *Redactor {
	r := &Redactor{
		// The body has base64 or the block's headers (RFC 1421); its line ends may be escaped.
		block: regexp.MustCompile(pem + `[A-Z0-9 ]+-----(?:` + pemBody + `*?-----END [A-Z0-9 ]+-----|` + pemBody + `*)`),
		whole: regexp.MustCompile(`LS0tLS1CRUdJTi[A-Za-z0-9+/=]*|eyJ[A-Za-z0-9_-]{6,}\.[A-Za-z0-9._-]+|ZXlK[A-Za-z0-9+/=]{20,}` +
			`|(?i:\b(?:bearer|basic)[\s+]+)[A-Za-z0-9._~+/=-]{8,}|://[^/\s@"']+@|[?&](?:sig|code)=[^&\s"']+` +
			`|(?i:\b(?:authorization|cookie|api-key):[ ]*)[^"'\\\n]+`),
		token:   regexp.MustCompile(`(?:\b(?:` + strings.Join(prefixes, "|") + `)|\$(?:[56y]|2[aby]|apr1)\$)[A-Za-z0-9/_.$-]{12,}`),
		named:   regexp.MustCompile(`(?i)([a-z0-9_.-]*` + secretName + `[a-z0-9_.-]*)(\\*["']?\s*[:=]+[\s\[]*)` + value),
		option:  regexp.MustCompile(`(--[a-z-]*(?:` + secretName + `|comment|prefix|string)[a-z-]*)(\s+)` + value),
		comment: regexp.MustCompile(`(\bcomment)(\s+)(` + quoted + `)`),
		isPlace: regexp.MustCompile(`(?i)(?:file|path|dir)s?$`),
	}
	r.foreign, r.object = newTables()
	r.patterns, r.reasons = newPatterns(), set(reasons)
	for _, s := range secrets {
		if s = strings.TrimSpace(s); len(s) >= shortest {
			r.secrets = append(r.secrets, []byte(s))
		}
	}
	slices.SortFunc(r.secrets, func(a, b []byte) int { return cmp.Compare(len(b), len(a)) }) // a secret may be a part of another
	return r
}

// quoted matches a value with up to three levels of quotes. A truncated value ends with the line, or with the quotes around it.
const quoted = `\\{3}"(?:[^"\\\n]|\\{7}"|\\[^"\n])*(?:\\")?` +
	`|\\"(?:[^"\\\n]|\\{3}"|\\[^"\n])*(?:\\")?|"(?:[^"\\\n]|\\.)*\\?"?|'[^'\n]*'?`

// value matches a name's value.
const value = `(` + quoted + `|[^\s,;{}\[\]()"'\\](?:[^\s"'\\]|\\[^"'])*)`

// prefixes begin the tokens of known services.
var prefixes = []string{ //nolint:gochecknoglobals // a constant table
	"ghp_", "gho_", "ghs_", "ghu_", "ghr_", "github_pat_", "glpat-", "xoxa-", "xoxb-", "xoxp-", "xapp-",
	"hooks.slack.com", "AIza", "sk_live_", "rk_live_", "hvs.", "npm_", "sk-", "AKIA",
}

// quotes can surround a value.
var quotes = []string{`\\\"`, `\"`, `"`, `'`} //nolint:gochecknoglobals // a constant table

// pem begins a PEM block.
const pem = "-----BEGIN "

const pemBody = `[A-Za-z0-9+/=\s\\:,.()-]`

// hints: whole and named can only match a line that contains one of these in lower case.
var hints = []string{ //nolint:gochecknoglobals // a constant table
	"token", "secret", "pass", "pwd", "jwt", "sessionid", "session_id", "session-id", "psk",
	"auth", "credential", "signature", "sig=", "cookie", "key", "cert",
	"ls0tls1crudjti", "eyj", "zxlk", "bearer", "basic", "://", "code=",
}

// Text returns a text without credentials. Line breaks stay, except within a PEM block.
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

// line runs only the expressions that can match a line, because they are slow.
func (r *Redactor) line(text []byte) []byte {
	has := func(hint string) bool { return bytes.Contains(text, []byte(hint)) }
	if has("$") || slices.ContainsFunc(prefixes, has) {
		text = r.token.ReplaceAllLiteral(text, []byte(Mark))
	}
	if has("--") {
		text = r.values(r.option, text)
	}
	if has("comment ") {
		text = r.values(r.comment, text)
	}
	lower := bytes.ToLower(text)
	if slices.ContainsFunc(hints, func(hint string) bool { return bytes.Contains(lower, []byte(hint)) }) {
		text = r.values(r.named, r.whole.ReplaceAllLiteral(text, []byte(Mark)))
	}
	return text
}

// values replaces the value in each match of name, separator and value.
func (r *Redactor) values(in *regexp.Regexp, text []byte) []byte {
	return in.ReplaceAllFunc(text, func(found []byte) []byte {
		part := in.FindSubmatch(found)
		if len(part) != 4 || r.isPlace.Match(part[1]) {
			return found
		}
		var quote, rest []byte
		if at := slices.IndexFunc(quotes, func(q string) bool { return bytes.HasPrefix(part[3], []byte(q)) }); at >= 0 {
			quote = []byte(quotes[at])
		} else if end := bytes.IndexAny(part[2], `"'`); end >= 0 { // a member of an object, perhaps a number: other members follow
			quote = part[2][:end+1]
			if next := bytes.IndexAny(part[3], ",;{}[]()"); next >= 0 {
				rest = part[3][next:]
			}
		}
		return slices.Concat(part[1], part[2], quote, []byte(Mark), quote, rest)
	})
}
