package fleet

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
)

// control is what a move to ambient mode needs of the control plane. It is read once for the cluster, with the user's rights, because the
// agents have none for it.
type control struct {
	istiods, ztunnels []corev1.Pod
	// configs are the data of istiod's ConfigMaps, by their names.
	configs map[istiod]map[string]map[string]string
	// plain are running pods whose sidecars do not accept HBONE.
	plain []string
	// unread is why something was not read; sidecars is why pods with a sidecar were not.
	unread   []string
	sidecars error
}

// istiod is a revision of istiod.
type istiod struct{ namespace, revision string }

// named returns the name of one of the revision's ConfigMaps.
func (i istiod) named(name string) string {
	if i.revision != "" && i.revision != "default" {
		name += "-" + i.revision
	}
	return name
}

// container returns the container with the name, or the only one.
func container(p corev1.Pod, name string) (c corev1.Container) {
	all := p.Spec.Containers
	if at := slices.IndexFunc(all, func(c corev1.Container) bool { return c.Name == name }); at >= 0 {
		return all[at]
	}
	if len(all) == 1 {
		c = all[0]
	}
	return c
}

// setting returns an environment variable. It is not known without a container, or if another object has it.
func setting(c corev1.Container, name string) (value string, known bool) {
	known = c.Name != "" && len(c.EnvFrom) == 0
	for _, e := range c.Env { // of several the last one counts
		if e.Name == name {
			value, known = e.Value, e.ValueFrom == nil
		}
	}
	return value, known
}

// withCluster adds to the nodes' rows what a move to ambient mode needs of the cluster. It leaves out what agents cannot check, and this
// program can.
func (f *fleet) withCluster(ctx context.Context, rows []row[document.Check]) []row[document.Check] {
	ctx, cancel := f.limit(ctx)
	defer cancel()
	c, policies := f.control(ctx), f.policies(ctx)
	rows = slices.DeleteFunc(rows, func(r row[document.Check]) bool { return r.shown.Name == policies.Name })
	for _, check := range []document.Check{c.versions(), c.ambient(), c.hbone(), c.injection(), policies} {
		text, _ := json.Marshal(check) // it has texts only
		rows = append(rows, row[document.Check]{shown: check, text: text})
	}
	return rows
}

// mostNamespaces bounds the namespaces of istiod.
const mostNamespaces = 10

// control reads what the checks need. The namespaces are the agents', the usual ones, and those of istiod's webhooks: everybody who may
// create pods chooses their labels.
func (f *fleet) control(ctx context.Context) *control {
	c := &control{configs: map[istiod]map[string]map[string]string{}}
	namespaces := []string{f.home, "istio-system", "kube-system"}
	namespaces = append(namespaces, c.webhooks(ctx, f)...)
	slices.Sort(namespaces)
	namespaces = slices.Compact(namespaces)
	for _, namespace := range namespaces[:min(len(namespaces), mostNamespaces)] {
		pods, err := query[corev1.Pod](ctx, f, "pods", "-n", namespace, "-l", "app in (istiod, ztunnel)")
		c.note("the pods of namespace "+namespace, err)
		c.add(pods)
	}
	for i := range c.configs {
		maps, err := query[corev1.ConfigMap](ctx, f, "configmaps", "-n", i.namespace, "--ignore-not-found", i.named("istio"), i.named("istio-sidecar-injector"))
		c.note("istiod's ConfigMaps in namespace "+i.namespace, err)
		for _, m := range maps {
			c.configs[i][m.Name] = m.Data
		}
	}
	text, err := f.kubectl(ctx, maxObjects, "get", "pods", "--all-namespaces", "-l", "security.istio.io/tlsMode=istio,networking.istio.io/tunnel!=http",
		"--field-selector=status.phase=Running", "-o", `jsonpath={range .items[*]}{.metadata.namespace}/{.metadata.name}{"\n"}{end}`)
	c.plain, c.sidecars = strings.Fields(string(text)), err
	return c
}

// webhooks returns the namespaces of the istiods that inject sidecars.
func (c *control) webhooks(ctx context.Context, f *fleet) (namespaces []string) {
	hooks, err := query[admissionv1.MutatingWebhookConfiguration](ctx, f, "mutatingwebhookconfigurations.admissionregistration.k8s.io", "-l", "app=sidecar-injector")
	c.note("istiod's webhooks", err)
	for _, hook := range hooks {
		for _, w := range hook.Webhooks {
			if w.ClientConfig.Service != nil {
				namespaces = append(namespaces, w.ClientConfig.Service.Namespace)
			} else {
				c.note("istiod", errors.New("its webhook has a URL: it is outside of the cluster"))
			}
		}
	}
	return namespaces
}

// note keeps why something was not read.
func (c *control) note(what string, err error) {
	if text := fmt.Sprintf("%s: %v", what, err); err != nil && !slices.Contains(c.unread, text) {
		c.unread = append(c.unread, text)
	}
}

// add keeps the pods that have not ended.
func (c *control) add(pods []corev1.Pod) {
	for _, p := range pods {
		switch {
		case p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed:
		case p.Labels["app"] == "ztunnel":
			c.ztunnels = append(c.ztunnels, p)
		default:
			c.istiods = append(c.istiods, p)
			c.configs[istiod{p.Namespace, p.Labels["istio.io/rev"]}] = map[string]map[string]string{}
		}
	}
}

// unchecked is the result of a check without what it needs. Without an error nothing was found.
func (c *control) unchecked(name, what string) document.Check {
	return result(name, document.Warn, "run it as a user who may read mutatingwebhookconfigurations, pods, and ConfigMaps of istiod's namespace",
		"%s could not be checked: %s", what, cmp.Or(printable.Some(c.unread, mostNames), "not found in the namespaces of the agents and of istiod's webhooks"))
}

// result is a check of the cluster.
func result(name string, outcome document.Result, remedy, format string, args ...any) document.Check {
	return document.Check{Name: name, Result: outcome, Text: fmt.Sprintf(format, args...), Remedy: remedy}
}

// minor matches a tag of Istio's images, such as 1.31.0-distroless; its number is the minor version.
var minor = regexp.MustCompile(`^v?1\.([0-9]{1,3})([.-]|$)`)

// minors groups pods by the minor version that their image names, -1 if it names none.
func minors(pods []corev1.Pod, name string) map[int][]string {
	found := map[int][]string{}
	for _, p := range pods {
		image, _, _ := strings.Cut(container(p, name).Image, "@")
		version := -1
		if at := strings.LastIndex(image, ":"); at > strings.LastIndex(image, "/") {
			if m := minor.FindStringSubmatch(image[at+1:]); m != nil {
				version, _ = strconv.Atoi(m[1])
			}
		}
		shown := p.Namespace + "/" + p.Name
		if version < 0 {
			shown += " (image " + cmp.Or(container(p, name).Image, "not known") + ")"
		}
		found[version] = append(found[version], shown)
	}
	return found
}

// versions compares ztunnel's minor versions with istiod's: Istio supports a ztunnel of the same version and of the one before.
func (c *control) versions() document.Check {
	const name = "ambient-versions"
	istiods, ztunnels := minors(c.istiods, "discovery"), minors(c.ztunnels, "istio-proxy")
	var wrong, all []string
	for _, z := range slices.Sorted(maps.Keys(ztunnels)) {
		for _, i := range slices.Sorted(maps.Keys(istiods)) {
			pair := fmt.Sprintf("ztunnel 1.%d (%s) with istiod 1.%d (%s)", z, printable.Some(ztunnels[z], mostNames), i, printable.Some(istiods[i], mostNames))
			switch {
			case i < 0 || z < 0:
			case z > i || z < i-1:
				wrong = append(wrong, pair)
			default:
				all = append(all, pair)
			}
		}
	}
	unknown := slices.Concat(istiods[-1], ztunnels[-1])
	switch {
	case len(wrong) > 0:
		return result(name, document.Fail, "upgrade istiod first, then ztunnel, one minor version at a time (istio.io: ambient upgrade)",
			"Istio supports a ztunnel of istiod's minor version or of the one before, and this is %s", printable.Some(wrong, mostNames))
	case len(c.istiods) == 0:
		return c.unchecked(name, "istiod's version")
	case len(c.ztunnels) == 0:
		return c.unchecked(name, "ztunnel's version")
	case len(unknown) > 0:
		return result(name, document.Warn, "compare the versions: istioctl version, and ztunnel's log",
			"versions could not be checked, because the images name none: %s", printable.Some(unknown, mostNames))
	}
	return result(name, document.OK, "", "%s", printable.Some(all, mostNames))
}

// ambient checks PILOT_ENABLE_AMBIENT, without which istiod refuses ztunnels.
func (c *control) ambient() document.Check {
	const name, key = "ambient-istiod", "PILOT_ENABLE_AMBIENT"
	if len(c.istiods) == 0 {
		return c.unchecked(name, "istiod's "+key)
	}
	var on, off, unknown []string
	for _, p := range c.istiods {
		value, known := setting(container(p, "discovery"), key)
		set, _ := strconv.ParseBool(value)
		state := &off
		if !known {
			state = &unknown
		} else if set {
			state = &on
		}
		*state = append(*state, p.Namespace+"/"+p.Name)
	}
	const remedy = "set profile=ambient (or pilot.env." + key + "=true) in istiod's chart"
	refuses := document.Fail
	if len(on)+len(unknown) > 0 {
		refuses = document.Warn
	}
	switch {
	case len(off) > 0:
		return result(name, refuses, remedy, "%s is not true, so istiod refuses ztunnels: %s", key, printable.Some(off, mostNames))
	case len(unknown) > 0:
		return result(name, document.Warn, remedy, "%s could not be checked, because these pods do not have it themselves: %s", key, printable.Some(unknown, mostNames))
	}
	return result(name, document.OK, "", "%s is true: %s", key, printable.Some(on, mostNames))
}

// without returns the ConfigMaps of istiods, as NAMESPACE/NAME, whose text under a key has a setting switched off. known reports whether each
// was read, and there is an istiod.
func without[T any](c *control, config, key string, on func(T) bool) (names []string, known bool) {
	known = len(c.configs) > 0
	for i, configs := range c.configs {
		var value T
		text, has := configs[i.named(config)][key]
		if !has || yaml.Unmarshal([]byte(text), &value) != nil {
			known = false
		} else if !on(value) {
			names = append(names, i.namespace+"/"+i.named(config))
		}
	}
	slices.Sort(names)
	return slices.Compact(names), known
}

// hbone checks whether sidecars accept HBONE: by ISTIO_META_ENABLE_HBONE of the mesh, and by the label that it gives to pods.
func (c *control) hbone() document.Check {
	const name, key = "ambient-sidecars", "ISTIO_META_ENABLE_HBONE"
	type mesh struct {
		DefaultConfig struct{ ProxyMetadata map[string]any }
	}
	off, known := without(c, "istio", "mesh", func(m mesh) bool { return m.DefaultConfig.ProxyMetadata[key] == "true" })
	const remedy = "set profile=ambient (or meshConfig.defaultConfig.proxyMetadata." + key + `="true") in istiod's chart, and restart pods with a sidecar`
	const effect = "pods of ambient mode reach such sidecars without mTLS, and not at all where it is required (STRICT)"
	switch {
	case len(c.plain) > 0:
		return result(name, document.Fail, remedy, "%s with a sidecar that does not accept HBONE: %s; %s",
			output.Plural(len(c.plain), "pod"), printable.Some(c.plain, mostNames), effect)
	case len(off) > 0:
		return result(name, document.Warn, remedy, "%s is not true in ConfigMap %s, so that new sidecars do not accept HBONE; %s", key, printable.Some(off, mostNames), effect)
	case c.sidecars != nil:
		c.note("pods with a sidecar", c.sidecars)
		fallthrough
	case !known:
		return c.unchecked(name, "whether sidecars accept HBONE")
	}
	return result(name, document.OK, "", "sidecars accept HBONE (%s)", key)
}

// injection checks pilot.cni.enabled: pods with a sidecar need it beside ambient mode, too.
func (c *control) injection() document.Check {
	const name, key = "ambient-injection", "pilot.cni.enabled"
	type values struct {
		Pilot struct{ CNI struct{ Enabled bool } }
	}
	off, known := without(c, "istio-sidecar-injector", "values", func(v values) bool { return v.Pilot.CNI.Enabled })
	switch {
	case len(off) > 0:
		return result(name, document.Warn, "set "+key+"=true in istiod's chart: profile=ambient does not",
			"%s is off in ConfigMap %s: new pods with a sidecar get istio-init, which needs NET_ADMIN", key, printable.Some(off, mostNames))
	case !known:
		return c.unchecked(name, key)
	}
	return result(name, document.OK, "", "%s is on", key)
}
