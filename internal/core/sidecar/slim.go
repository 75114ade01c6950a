package sidecar

import "slices"

// ValidationContainer is the init container that finds out whether the traffic is redirected.
const ValidationContainer = "istio-validation"

// proxyEnv are the variables of the proxy that rules read.
func proxyEnv() []string {
	return []string{"DISABLE_ENVOY", "ISTIO_META_DNS_CAPTURE", "ISTIO_DUAL_STACK", "INVALID_DROP"}
}

// Reads lists the keys of annotations and labels and the variables of the proxy that rules read, sorted: with the fields
// of [Facts] they are what decisions rest on.
func Reads() []string {
	keys := append([]string{InjectKey, StatusKey, KubevirtInterfacesKey, initContainer, ValidationContainer, proxyContainer}, proxyEnv()...)
	for key := range fields {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

// Slim gives facts about which Decide decides alike, without what no rule reads: who remembers many pods remembers
// these. The facts themselves are not changed, and what is kept does not hold the rest in memory.
func (f Facts) Slim() Facts {
	keys := []string{InjectKey, StatusKey, KubevirtInterfacesKey}
	for key := range fields {
		keys = append(keys, key)
	}
	slim := f
	slim.Labels, slim.Annotations = only(f.Labels, InjectKey), only(f.Annotations, keys...)
	if _, injected := slim.Annotations[StatusKey]; injected {
		slim.Annotations[StatusKey] = "" // only that it is there counts
	}
	slim.Containers = nil
	for _, c := range f.Containers {
		switch c.Name {
		case proxyContainer:
			c.Args = slices.Clone(c.Args[:min(2, len(c.Args))])
			c.Env = slices.DeleteFunc(slices.Clone(c.Env), func(e EnvVar) bool { return !slices.Contains(proxyEnv(), e.Name) })
			c.Env = slices.Clip(c.Env)
			slim.Containers = append(slim.Containers, c)
		case initContainer, ValidationContainer:
			slim.Containers = append(slim.Containers, Container{Name: c.Name, Init: c.Init})
		}
	}
	return slim
}

func only(all map[string]string, keys ...string) map[string]string {
	var some map[string]string
	for _, key := range keys {
		if text, ok := all[key]; ok {
			if some == nil {
				some = map[string]string{}
			}
			some[key] = text
		}
	}
	return some
}
