package installer

import (
	"errors"
	"fmt"
	"slices"
)

// layer is live configuration: the data of a ConfigMap, or the files of a mounted directory by their names. Keys are
// names of environment variables; what is none does not count.
type layer struct {
	// name is for people, as in `ConfigMap "istio-cni-config"`.
	name string
	data map[string]string
}

// withOverlay makes the configuration with live values; the first layer that has a key counts. Only what the plugin is
// told is taken from layers. Restart lists the keys of the rest whose values differ from what is in force. On an error,
// which names layer, key, value and cause, the caller keeps the last good configuration.
func (in input) withOverlay(layers ...layer) (c Config, restart []string, err error) {
	d, err := in.build(layers)
	if err != nil {
		return Config{}, nil, err
	}
	var errs []error
	for _, s := range settings(in.environment) {
		if s.scope != forAgent {
			continue
		}
		if _, byFlag := in.flags[s.flag]; byFlag {
			continue
		}
		key, err := s.differs(&d, layers)
		errs = append(errs, err)
		if key != "" {
			restart = append(restart, key)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return Config{}, nil, err
	}
	slices.Sort(restart)
	return d.Config, restart, nil
}

// differs names the key of a layer that has another value than the one in force, "" for none.
func (s setting) differs(inForce *draft, layers []layer) (string, error) {
	wanted, at, ok := overlaid(s, layers)
	if !ok || wanted == "" {
		return "", nil
	}
	v := s.into(&draft{})
	if err := v.Set(wanted); err != nil {
		return "", fmt.Errorf("%s: value %s: %w", at, s.quote(wanted), err)
	}
	if v.String() == s.into(inForce).String() {
		return "", nil
	}
	return at.name, nil
}

// overlaid is the text that layers have for a setting, "" for its default. Blanks around it are a file's last newline.
func overlaid(s setting, layers []layer) (string, origin, bool) {
	for _, l := range layers {
		for _, key := range s.names() {
			if text, there := l.data[key]; there {
				return bare(text), origin{kind: fromOverlay, name: key, layer: l.name}, true
			}
		}
	}
	return "", origin{}, false
}
