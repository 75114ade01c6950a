package installer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// maxFile bounds a template and the token, in bytes.
const maxFile = 1 << 20

// Placeholders whose values are not settings: the service account's token, the node's name.
const (
	tokenPlaceholder = "__SERVICEACCOUNT_TOKEN__"
	nodePlaceholder  = "__KUBERNETES_NODE_NAME__"
)

// redacted replaces the token in all printed texts. It is not a JSON value by itself, so that a token outside of a string is
// detected before the token is read.
const redacted = "REDACTED"

// fillTemplate builds the stanza from a template, if one is set.
func (in input) fillTemplate(d *draft) error {
	template, from, err := d.templateText()
	if err != nil || template == "" {
		return err
	}
	values, err := in.placeholders(d, template)
	if err != nil {
		return err
	}
	if err := d.useTemplate(template, values); err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	// The template decides what the plugin does about pods of ambient mode, and the setting what the agent does.
	if conf, err := cniconf.Parse(d.shownTemplate); err == nil && conf.AmbientEnabled != d.Ambient.Enabled {
		return fmt.Errorf("%s: ambient_enabled is %t in the template and %t in %s: want the same in both",
			from, conf.AmbientEnabled, d.Ambient.Enabled, d.at("ambient-enabled"))
	}
	return nil
}

// templateText returns the template, "" without one: the file's content, else CNI_NETWORK_CONFIG.
func (d *draft) templateText() (text, from string, err error) {
	if d.templateFile != "" {
		at := fmt.Sprintf("%s: value %q", d.at("cni-network-config-file"), d.templateFile)
		content, _, err := hostfs.ReadFile(d.templateFile, maxFile)
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
func token(file string) (string, error) {
	content, _, err := hostfs.ReadFile(file, maxFile)
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
func (d *draft) useTemplate(template string, values map[string]string) error {
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
		if values[tokenPlaceholder], err = token(d.Token); err != nil {
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

// substitute replaces placeholders as plain text, at any position, and lists unknown ones: capitals, digits and single
// underscores between two underscores. It does not expand placeholders in a replacement.
func substitute(template string, values map[string]string) (text string, unknown []string) {
	text = regexp.MustCompile(`__[A-Z][A-Z0-9_]*?__`).ReplaceAllStringFunc(template, func(name string) string {
		value, known := values[name]
		switch {
		case known:
			return value
		case !slices.Contains(unknown, name):
			unknown = append(unknown, name)
		}
		return name
	})
	return text, unknown
}

// stanzaOf validates that a text is a stanza of this plugin and that the plugin can parse it. It corrects keys with a colon
// inside of the quotes: a chart of 2020 wrote "cniVersion:" and "name:".
func stanzaOf(text string) (json.RawMessage, error) {
	for _, key := range []string{"cniVersion", "name", "type"} {
		text = strings.ReplaceAll(text, `"`+key+`:"`, `"`+key+`"`)
	}
	stanza := json.RawMessage(strings.TrimSpace(text))
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(stanza, &keys); err != nil {
		return nil, fmt.Errorf("want a JSON object: %w", err)
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
