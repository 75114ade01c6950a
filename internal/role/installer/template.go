package installer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
)

// Placeholders whose values are no settings: the service account's token, the node's name.
const (
	tokenPlaceholder = "__SERVICEACCOUNT_TOKEN__"
	nodePlaceholder  = "__KUBERNETES_NODE_NAME__"
)

// redacted replaces the token in all printed texts. It is no JSON value by itself, so that a token outside of a string is
// detected before the token is read.
const redacted = "REDACTED"

// fillTemplate builds the stanza from a template, if one is set.
func (in input) fillTemplate(d *draft) error {
	template, from, err := in.templateText(d)
	if err != nil || template == "" {
		return err
	}
	values, err := in.placeholders(d, template)
	if err != nil {
		return err
	}
	if err := d.useTemplate(template, values, func() (string, error) { return in.token(d.Token) }); err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	if conf, err := cniconf.Parse(d.shownTemplate); err == nil {
		return d.ambient(from, conf.AmbientEnabled)
	}
	return nil
}

// templateText returns the template, "" for none: the file's content, else CNI_NETWORK_CONFIG.
func (in input) templateText(d *draft) (text, from string, err error) {
	if d.templateFile != "" {
		at := fmt.Sprintf("%s: value %q", d.at("cni-network-config-file"), d.templateFile)
		content, err := in.readFile(d.templateFile)
		switch {
		case err == nil && len(bytes.TrimSpace(content)) == 0:
			return "", "", fmt.Errorf("%s: the file is empty", at)
		case err == nil:
			return string(content), at, nil
		case !errors.Is(err, fs.ErrNotExist) || d.template == "":
			return "", "", fmt.Errorf("%s: reading the template: %w", at, err)
		}
	}
	return d.template, d.at("cni-network-config").String(), nil
}

// placeholders returns the values of a template's placeholders, without the token.
func (in input) placeholders(d *draft, template string) (map[string]string, error) {
	node := d.kubernetesNode
	if node == "" {
		node = d.NodeName
	}
	if node == "" && strings.Contains(template, nodePlaceholder) {
		name, err := in.hostname()
		if err != nil {
			return nil, fmt.Errorf("reading the host's name for %s: %w", nodePlaceholder, err)
		}
		node = name
	}
	return map[string]string{
		"__LOG_LEVEL__":               d.templateLevel,
		"__KUBECONFIG_FILENAME__":     d.oldKubeconfig,
		"__KUBECONFIG_FILEPATH__":     strings.TrimSuffix(d.HostNetDir, "/") + "/" + d.oldKubeconfig,
		"__KUBERNETES_SERVICE_HOST__": d.Server.Host,
		"__KUBERNETES_SERVICE_PORT__": d.Server.Port,
		nodePlaceholder:               node,
		"__LOG_UDS_ADDRESS__":         d.LogSocket,
		"__CNI_EVENT_ADDRESS__":       d.eventAddress,
		"__POD_NAMESPACE__":           d.Namespace,
	}, nil
}

// token reads the service account's token for a template. It must be printable ASCII without characters that JSON escapes.
func (in input) token(file string) (string, error) {
	content, err := in.readFile(file)
	if err != nil {
		return "", fmt.Errorf("reading the token for %s: %w", tokenPlaceholder, err)
	}
	token := strings.TrimSpace(string(content))
	odd := func(r rune) bool { return r <= ' ' || r > '~' || strings.ContainsRune(`"\`, r) }
	if token == "" || strings.ContainsFunc(token, odd) {
		return "", fmt.Errorf("reading the token for %s: file %q holds no token", tokenPlaceholder, file)
	}
	return token, nil
}

// useTemplate builds the stanza. It validates the stanza before it inserts the token, so that no error can hold the token.
func (d *draft) useTemplate(template string, values map[string]string, token func() (string, error)) error {
	values[tokenPlaceholder] = redacted
	text, unknown := substitute(template, values)
	if len(unknown) > 0 {
		return fmt.Errorf("placeholder %s: nothing is known to replace it", strings.Join(unknown, ", "))
	}
	stanza, err := stanzaOf(text)
	if err != nil {
		return err
	}
	d.shownTemplate = stanza
	if strings.Contains(template, tokenPlaceholder) {
		if values[tokenPlaceholder], err = token(); err != nil {
			return err
		}
		text, _ = substitute(template, values)
		if stanza, err = stanzaOf(text); err != nil {
			return errors.New("the token makes the template unusable")
		}
	}
	d.Want.Stanza.Template = stanza
	return nil
}

// substitute replaces placeholders as plain text, at any position, and lists unknown ones. It does not expand placeholders in a
// replacement.
func substitute(template string, values map[string]string) (text string, unknown []string) {
	var b strings.Builder
	for at := 0; at < len(template); {
		name := placeholderAt(template[at:], values)
		value, known := values[name]
		switch {
		case known:
			b.WriteString(value)
		case name != "":
			if !slices.Contains(unknown, name) {
				unknown = append(unknown, name)
			}
			b.WriteString(name)
		default:
			name = template[at : at+1]
			b.WriteString(name)
		}
		at += len(name)
	}
	return b.String(), unknown
}

// placeholderAt returns the placeholder at the beginning of a text, or "": a known one, else capitals, digits and underscores
// between two underscores.
func placeholderAt(text string, values map[string]string) string {
	const fence = "__"
	inner, ok := strings.CutPrefix(text, fence)
	if !ok {
		return ""
	}
	for name := range values {
		if strings.HasPrefix(text, name) {
			return name
		}
	}
	end := strings.Index(inner, fence)
	if end <= 0 || inner[0] < 'A' || inner[0] > 'Z' {
		return ""
	}
	if strings.Trim(inner[:end], "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_") != "" {
		return ""
	}
	return text[:len(fence)+end+len(fence)]
}

// stanzaOf validates that a text is a stanza of this plugin and that the plugin can parse it.
func stanzaOf(text string) (json.RawMessage, error) {
	stanza, keys, err := mendedKeys([]byte(strings.TrimSpace(text)))
	if err != nil {
		return nil, err
	}
	var pluginType string
	if json.Unmarshal(keys["type"], &pluginType) != nil || pluginType != cniconf.PluginType {
		return nil, fmt.Errorf("want a JSON object with \"type\": %q", cniconf.PluginType)
	}
	if _, isList := keys["plugins"]; isList {
		return nil, errors.New("want one plugin's object, not a list with \"plugins\"")
	}
	conf, err := cniconf.Parse(stanza)
	if err == nil {
		err = errors.Join(conf.Problems, cniconf.Usable(stanza))
	}
	if err != nil {
		return nil, errors.New(oneLine(err))
	}
	return stanza, nil
}

// mendedKeys decodes an object and corrects keys with a colon inside of the quotes: a chart of 2020 wrote "cniVersion:" and
// "name:". An object without such keys keeps its text.
func mendedKeys(text []byte) (json.RawMessage, map[string]json.RawMessage, error) {
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(text, &keys); err != nil {
		return nil, nil, fmt.Errorf("want a JSON object: %w", err)
	}
	mended := false
	for _, key := range []string{"cniVersion", "name", "type"} {
		value, odd := keys[key+":"]
		if !odd {
			continue
		}
		if _, there := keys[key]; !there {
			keys[key] = value
		}
		delete(keys, key+":")
		mended = true
	}
	if !mended {
		return text, keys, nil
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(keys); err != nil {
		return nil, nil, fmt.Errorf("encoding the template: %w", err)
	}
	return bytes.TrimSpace(b.Bytes()), keys, nil
}
