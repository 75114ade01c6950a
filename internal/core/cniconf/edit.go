package cniconf

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
)

// span is a part of a text: the offset of its first byte, and the offset behind its last byte.
type span struct{ start, end int }

func (s span) of(text []byte) []byte { return text[s.start:s.end] }

// member returns the position of a key's value in the object. Of duplicate keys it takes the last one, like encoding/json.
// Without the key it returns a zero span.
func member(object []byte, key string) (value span, err error) {
	if !json.Valid(object) {
		return value, unreadable(object, json.Unmarshal(object, new(any)))
	}
	d := json.NewDecoder(bytes.NewReader(object))
	if t, _ := d.Token(); t != json.Delim('{') {
		return value, errors.New("no JSON object")
	}
	for d.More() {
		name, _ := d.Token() // the text is valid
		if v := next(d); name == key {
			value = v
		}
	}
	return value, nil
}

// next reads one value of a valid text and returns its position.
func next(d *json.Decoder) span {
	var raw json.RawMessage
	_ = d.Decode(&raw)
	end := int(d.InputOffset())
	return span{end - len(raw), end}
}

// plugins holds the positions of a list's plugins.
type plugins struct {
	// open is the offset behind the opening bracket.
	open     int
	elements []span
}

// inlined finds the plugins in a list.
func inlined(text []byte) (plugins, error) {
	list, err := member(text, "plugins")
	switch {
	case err != nil:
		return plugins{}, err
	case list == span{}:
		return plugins{}, errors.New(`it has no "plugins" of its own, so nothing can be put behind them: use dropin`)
	}
	d := json.NewDecoder(bytes.NewReader(list.of(text)))
	if t, _ := d.Token(); t != json.Delim('[') {
		return plugins{}, errors.New(`"plugins" is not a list`)
	}
	p := plugins{open: list.start + 1}
	for d.More() {
		element := next(d)
		p.elements = append(p.elements, span{list.start + element.start, list.start + element.end})
	}
	return p, nil
}

// own returns the indices of this program's stanzas, of any version.
func (p plugins) own(text []byte) []int {
	var out []int
	for i, element := range p.elements {
		if isOwn(element.of(text)) {
			out = append(out, i)
		}
	}
	return out
}

func isOwn(element []byte) bool {
	var c struct {
		Type string `json:"type"`
	}
	return json.Unmarshal(element, &c) == nil && c.Type == PluginType
}

// Insert puts the stanza at the end of a list and removes all older stanzas. No other byte changes;
// Insert returns a list unchanged if this stanza is its last plugin and its only stanza.
func Insert(list, stanza []byte) ([]byte, error) {
	p, err := inlined(list)
	if err != nil {
		return nil, err
	}
	last := len(p.elements) - 1
	if last >= 0 && isOwn(p.elements[last].of(list)) {
		// Insert replaces the last stanza in place, so that the bytes around the stanza do not change.
		if old := p.elements[last]; !Same(old.of(list), stanza) {
			list = slices.Concat(list[:old.start], indented(stanza, p.before(list, last)), list[old.end:])
		}
		return withoutOwn(list, 1)
	}
	if list, err = withoutOwn(list, 0); err != nil {
		return nil, err
	}
	if p, err = inlined(list); err != nil {
		return nil, err
	}
	if len(p.elements) == 0 {
		return nil, errors.New("no plugin in the list to run behind")
	}
	last = len(p.elements) - 1
	space, end := p.before(list, last), p.elements[last].end
	return slices.Concat(list[:end], []byte(","), space, indented(stanza, space), list[end:]), nil
}

// before returns the white space ahead of an element.
func (p plugins) before(text []byte, at int) []byte {
	ahead := text[:p.elements[at].start]
	return ahead[len(bytes.TrimRight(ahead, " \t\r\n")):]
}

// indented formats an object like the neighbouring elements: on one line if the list has no line breaks between elements,
// else on lines that start at the same column.
func indented(stanza, space []byte) []byte {
	var b bytes.Buffer
	at := bytes.LastIndexByte(space, '\n')
	if at < 0 {
		_ = json.Compact(&b, stanza) // Plan ensures that it is an object
		return b.Bytes()
	}
	indent := "  "
	if bytes.IndexByte(space[at:], '\t') >= 0 {
		indent = "\t"
	}
	_ = json.Indent(&b, stanza, string(space[at+1:]), indent)
	if bytes.HasSuffix(space[:at+1], []byte("\r\n")) {
		return bytes.ReplaceAll(b.Bytes(), []byte("\n"), []byte("\r\n"))
	}
	return b.Bytes()
}

// Remove removes every stanza of this program from a list, and no other byte: Remove undoes Insert byte for byte. A list
// without such a stanza stays unchanged; a list with only such stanzas becomes a list without plugins.
func Remove(list []byte) ([]byte, error) {
	return withoutOwn(list, 0)
}

// withoutOwn removes our stanzas except the last leave ones.
func withoutOwn(list []byte, leave int) ([]byte, error) {
	for {
		p, err := inlined(list)
		if err != nil {
			return nil, err
		}
		own := p.own(list)
		if len(own) <= leave {
			return list, nil
		}
		cut := p.cut(own[len(own)-1-leave])
		list = slices.Concat(list[:cut.start], list[cut.end:])
	}
}

// cut returns the bytes to remove with an element: the comma and white space before it, or after it for the first element.
func (p plugins) cut(at int) span {
	switch {
	case at > 0:
		return span{p.elements[at-1].end, p.elements[at].end}
	case len(p.elements) > 1:
		return span{p.elements[0].start, p.elements[1].start}
	default:
		return span{p.open, p.elements[0].end}
	}
}

// Same reports whether two JSON texts are equal, apart from the order of keys and white space. Numbers are equal if their
// spellings are.
func Same(a, b []byte) bool {
	x, errX := decoded(a)
	y, errY := decoded(b)
	return errX == nil && errY == nil && reflect.DeepEqual(x, y)
}

func decoded(text []byte) (any, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var v any
	err := d.Decode(&v)
	return v, err
}

// Versions returns the versions of the CNI specification that the plugin supports, oldest first.
func Versions() []string {
	return []string{"0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"}
}

// nameless is the network name of a list that Convert makes from a plugin without a name; the reference uses it for every list.
const nameless = "k8s-pod-network"

// Convert returns a list with a single plugin. It keeps the plugin's bytes, name and version; it replaces an unsupported
// version by the newest supported version.
func Convert(single []byte) ([]byte, error) {
	c, err := plugin(single)
	if err != nil {
		return nil, err
	}
	name, version := c.Name, ""
	if name == "" {
		name = nameless
	}
	if v := c.CNIVersion; v != "" {
		if !slices.Contains(Versions(), v) {
			v = Versions()[len(Versions())-1]
		}
		version = fmt.Sprintf("  \"cniVersion\": %s,\n", quoted(v))
	}
	return fmt.Appendf(nil, "{\n%s  \"name\": %s,\n  \"plugins\": [\n    %s\n  ]\n}\n", version, quoted(name), bytes.TrimSpace(single)), nil
}
