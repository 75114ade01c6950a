package kube

import (
	"context"
	"encoding/json"
	"maps"
	"net/url"
)

// ConfigMapState is a ConfigMap as it is now.
type ConfigMapState struct {
	// Present is false when there is none of that name.
	Present bool
	// Data is its text; binary data is left out. It must not be changed.
	Data map[string]string
}

// ConfigMapListener is told about a ConfigMap. Both functions are called from the goroutine that follows, one after the
// other: following waits for them.
type ConfigMapListener struct {
	// Changed is told the state once it is known and whenever presence or data have changed.
	Changed func(ConfigMapState)
	// Trouble is told once when following has begun to fail, once more when it fails in another way, and nil when it goes
	// well again. The state that was told last stays the best that is known.
	Trouble func(error)
}

// FollowConfigMap keeps one ConfigMap in sight until ctx ends, by list and watch of that one object, which is what a
// Role with resourceNames allows. It never gives up, but on a namespace or name that no ConfigMap can have: that is told
// as a trouble at once.
func (a *API) FollowConfigMap(ctx context.Context, namespace, name string, tell ConfigMapListener) {
	if c := (call{verb: "watch", resource: configMaps(), namespace: namespace, name: name}); !validSegment(namespace) ||
		!validSegment(name) {
		tell.Trouble(a.failed(&c, "", &failure{class: InvalidKey, err: errNoSegment}))
		return
	}
	var last *ConfigMapState
	now := func(state ConfigMapState) {
		if last == nil || last.Present != state.Present || !maps.Equal(last.Data, state.Data) {
			last = &state
			tell.Changed(state)
		}
	}
	this := objectKey{namespace, name}
	from := collection{
		resource: configMaps(), namespace: namespace, selection: url.Values{"fieldSelector": {"metadata.name=" + name}},
	}
	present := false
	follow(ctx, a, from, configMapData, changes[map[string]string]{
		set: func(key objectKey, data map[string]string) {
			if key == this {
				present = true
				now(ConfigMapState{Present: true, Data: data})
			}
		},
		gone: func(key objectKey, _ map[string]string) {
			if key == this {
				present = false
				now(ConfigMapState{})
			}
		},
		listed: func() {
			if !present {
				now(ConfigMapState{})
			}
		},
		trouble: tell.Trouble,
	})
}

func configMapData(object []byte) (map[string]string, error) {
	var wire struct {
		Data map[string]string `json:"data"`
	}
	err := json.Unmarshal(object, &wire)
	return wire.Data, err
}
