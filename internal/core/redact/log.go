package redact

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/meshcni/istio-cni/internal/core/printable"
)

// Bounds of a proxy's log in bytes, except lastRecords.
const (
	maxLine     = 64 << 10
	maxMessage  = 1 << 10
	lastRecords = 200
)

// reasons are the reasons of events with shown messages. Others can quote arguments, or what a probe of a tenant's container printed.
const reasons = `
	Scheduled FailedScheduling Preempted TaintManagerEviction Killing Pulling Pulled Created Started BackOff SandboxChanged FailedCreatePodSandBox
	FailedPodSandBoxStatus FailedKillPod NetworkNotReady NodeNotReady FailedMount SuccessfulCreate SuccessfulDelete FailedCreate
	FailedDaemonPod FailedPlacement DNSConfigForming MissingClusterDNS

	MeshCNINotReady MeshCNIReady InvalidTaintRequirements CNIConfigRefused CNISelfTestFailed CNILookupSocketFailed CNIConfigFight
	DeleteBrokenPod LabelBrokenPod RepairBrokenPod BrokenPod DriftedPod UnverifiedPod ForeignRule ForeignListener ProxyNotListening
	PendingPod ProxyUIDCollision SandboxedPod IPv6Open VerifiedPod`

// Event returns what may be shown of an event's message.
func (r *Redactor) Event(reason, message string) string {
	if r.reasons[reason] {
		return r.Message(message)
	}
	return length("message", message)
}

// patterns are the expressions of [Redactor.Message].
type patterns struct{ escape, query, user, word, config *regexp.Regexp }

func newPatterns() patterns {
	return patterns{
		escape: regexp.MustCompile(`(?i)%[0-9a-f]{2}|\\u00[0-7][0-9a-f]`),
		query:  regexp.MustCompile(`\?[^\s"'<>]*=[^\s"'<>]*`),
		user:   regexp.MustCompile(`[^\s"'@/]*:[^\s"'@]*@(?:sha256:)?`),
		word:   regexp.MustCompile(`[A-Za-z0-9+/=_-]{16,}`),
		config: regexp.MustCompile(`( config from (?:env|environment|annotation|file)\s+)\S.*`), // pilot-agent's: it has the proxy's environment
	}
}

// Message returns a message that another program wrote, as one printable line of at most 1 KiB. Besides what [Redactor.Text] replaces, it
// replaces a proxy's configuration, the queries of URLs, users with their passwords, and words that look random, also where characters are escaped.
func (r *Redactor) Message(text string) string {
	text = r.escape.ReplaceAllStringFunc(text, func(found string) string {
		code, _ := strconv.ParseUint(strings.TrimLeft(found, `%\uU`), 16, 8) // the expression has hexadecimal digits only
		return string(rune(code))
	})
	text = r.config.ReplaceAllString(text, "${1}"+Mark)
	text = string(r.Text([]byte(printable.Text(text, maxLine))))
	text = r.query.ReplaceAllLiteralString(text, "?"+Mark)
	text = r.user.ReplaceAllStringFunc(text, func(found string) string {
		if strings.HasSuffix(found, ":") { // an image with its digest
			return found
		}
		return Mark + "@"
	})
	text = r.word.ReplaceAllStringFunc(text, func(found string) string {
		if isRandom(found) {
			return Mark
		}
		return found
	})
	return printable.Text(text, maxMessage)
}

// isRandom reports whether a word of at least 16 characters looks like a key: with upper case, lower case and digits, or with digits and
// letters and a part of at least 20 characters. The names of pods are neither.
func isRandom(word string) bool {
	const long = 20
	digits, lower, upper := strings.ContainsAny(word, "0123456789"), word != strings.ToUpper(word), word != strings.ToLower(word)
	if digits && lower && upper {
		return true
	}
	for part := range strings.FieldsFuncSeq(word, func(r rune) bool { return strings.ContainsRune("-_/=+", r) }) {
		if len(part) >= long && digits && (lower || upper) && strings.ContainsAny(part, "0123456789") {
			return true
		}
	}
	return false
}

// levels are the shown levels of Istio's agent and of Envoy.
var levels = []string{"info", "warn", "warning", "error", "critical", "fatal"} //nolint:gochecknoglobals // a constant table

// Records keeps the last records of a proxy's log that are written to it, in bounded memory. A record is a line of Istio's agent or of
// Envoy with a time, a level from info on, and a message. Access logs, records of lower levels, which have headers, lines with control
// characters, and the further lines of a record are left out and counted.
type Records struct {
	clean *Redactor
	plain *regexp.Regexp
	line  []byte
	// long is whether the current line is too long.
	long bool
	// last are the heads and the messages of the records.
	last [][2]string
	left int
}

// Records returns an empty log.
func (r *Redactor) Records() *Records {
	return &Records{clean: r, plain: regexp.MustCompile(`^(\d{4}-\d\d-\d\dT[\d:.]{8,16}(?:Z|[+-]\d\d:?\d\d))\t([a-z]+)\t(.*)$`)}
}

// Write adds a part of the log.
func (l *Records) Write(text []byte) (int, error) {
	all := len(text)
	for {
		line, rest, ended := bytes.Cut(text, []byte("\n"))
		if l.long = l.long || len(l.line)+len(line) > maxLine; l.long {
			l.line = l.line[:0]
		} else {
			l.line = append(l.line, line...)
		}
		if !ended {
			return all, nil
		}
		l.end()
		text = rest
	}
}

// end ends a line.
func (l *Records) end() {
	head, message := "", ""
	if !l.long {
		head, message = l.record(bytes.TrimSuffix(l.line, []byte("\r")))
	}
	l.line, l.long = l.line[:0], false
	if message == "" {
		l.left++
		return
	}
	l.last = append(l.last[max(0, len(l.last)-lastRecords+1):], [2]string{head, message})
}

// record returns the time with the level and the message of a line, or nothing if it is no record.
func (l *Records) record(line []byte) (head, message string) {
	var r struct {
		Time              time.Time
		Level, Scope, Msg string
	}
	at := ""
	if found := l.plain.FindSubmatch(line); found != nil {
		at, r.Level, r.Msg = string(found[1]), string(found[2]), string(found[3])
	} else if json.Unmarshal(line, &r) == nil && !r.Time.IsZero() {
		at = r.Time.Format(time.RFC3339Nano)
	}
	message = strings.TrimSpace(strings.ReplaceAll(r.Scope+"\t"+r.Msg, "\t", " "))
	if at == "" || message == "" || !utf8.Valid(line) || !slices.Contains(levels, r.Level) ||
		strings.ContainsFunc(message, func(c rune) bool { return !printable.Is(c) }) {
		return "", ""
	}
	return at + "\t" + r.Level + "\t", message
}

// Text returns the records and the number of other lines. A line without an end is left out: its rest is unknown.
func (l *Records) Text() []byte {
	var text []byte
	for _, r := range l.last {
		text = append(text, r[0]+l.clean.Message(r[1])+"\n"...)
	}
	left := l.left
	if len(l.line) > 0 || l.long {
		left++
	}
	if left > 0 {
		text = fmt.Appendf(text, "left out: %d lines that are no records of the proxy from level info on\n", left)
	}
	return text
}
