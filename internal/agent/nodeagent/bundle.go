package nodeagent

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redact"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// bundle serves the parts of a bug report that only the agent knows, without credentials of known forms.
func (n *node) bundle() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var since time.Time
		if text := r.URL.Query().Get(agentapi.SinceParam); text != "" {
			var err error
			if since, err = time.Parse(time.RFC3339, text); err != nil {
				http.Error(w, agentapi.SinceParam+": not a time", http.StatusBadRequest)
				return
			}
		}
		clean := n.redactor()
		text, isJSON, err := n.part(agentapi.BundlePart(r.PathValue("part")), since, clean)
		switch {
		case err != nil:
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		case text == nil:
			http.Error(w, "there is no such part", http.StatusNotFound)
			return
		}
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		if isJSON {
			w.Header().Set("Content-Type", "application/json")
			if text, err = clean.JSON(text); err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
		} else {
			text = clean.Text(text)
		}
		_, _ = w.Write(printable.Lines(text)) //nolint:gosec // no HTML, and the client can have closed the connection
	})
}

// redactor knows the token of the agent's own account, which the plugin has as well.
func (n *node) redactor() *redact.Redactor {
	const maxToken = 1 << 20
	token, _, _ := hostfs.ReadFile(n.Config.Token, maxToken) // without the file there is no secret
	return redact.New(string(token))
}

// part returns a part, nil for an unknown one.
func (n *node) part(part agentapi.BundlePart, since time.Time, clean *redact.Redactor) (text []byte, isJSON bool, err error) {
	var value any
	switch part {
	case agentapi.BundleMetrics:
		return n.metrics.Text(), false, nil
	case agentapi.BundleLog:
		if n.Recent == nil {
			return nil, false, nil
		}
		return n.Recent.Since(since), false, nil
	case agentapi.BundleReadiness:
		value = n.health.Snapshot()
	case agentapi.BundleAgent:
		value, err = n.info(clean)
	default:
		return nil, false, nil
	}
	if err == nil {
		text, err = json.Marshal(value)
	}
	return text, true, err
}

// info describes the agent. An installation's template of the stanza can have any key.
func (n *node) info(clean *redact.Redactor) (agentapi.AgentInfo, error) {
	c := n.Config
	stanza, err := clean.Foreign(n.stanza.Load().written.Element())
	i := agentapi.AgentInfo{Version: n.Version, Node: c.NodeName, Namespace: c.Namespace, Pod: c.PodName, Plugin: json.RawMessage(stanza)}
	for _, l := range c.Lines {
		i.Settings = append(i.Settings, agentapi.Setting{Name: l.Name, Value: l.Value, Origin: l.Origin})
	}
	return i, err
}
