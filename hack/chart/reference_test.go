package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
)

// TestInventory lists the objects of renderings: the reference's under its names, and ours.
func TestInventory(t *testing.T) {
	t.Parallel()
	// Objects of the reference's chart.
	base := []string{
		"ServiceAccount/istio-system/istio-cni", "ConfigMap/istio-system/istio-cni-config", "ClusterRole//istio-cni",
		"ClusterRoleBinding//istio-cni", "DaemonSet/istio-system/istio-cni-node",
	}
	repair := []string{"ClusterRole//istio-cni-repair-role", "ClusterRoleBinding//istio-cni-repair-rolebinding"}
	ours := []string{
		"Role/istio-system/istio-cni", "RoleBinding/istio-system/istio-cni",
	}
	taint := []string{
		"ServiceAccount/istio-system/istio-cni-taint", "ClusterRole//istio-cni-taint-role",
		"ClusterRoleBinding//istio-cni-taint-rolebinding", "Deployment/istio-system/istio-cni-taint",
		"Role/istio-system/istio-cni-taint-pods", "RoleBinding/istio-system/istio-cni-taint-pods",
		"Role/istio-system/istio-cni-taint-lease", "RoleBinding/istio-system/istio-cni-taint-lease",
	}
	defaults := slices.Concat(base, repair, ours)
	for values, want := range map[string][]string{
		`{}`:                       slices.Concat(base, repair, ours),
		`repair: {enabled: false}`: slices.Concat(base, repair, ours), // for the audit
		`{repair: {enabled: false}, audit: {interval: 0}}`: slices.Concat(base, ours),
		`provider: multus`: append(slices.Clone(defaults), "NetworkAttachmentDefinition/default/istio-cni"),
		`platform: gke`:    append(slices.Clone(defaults), "ResourceQuota/istio-system/istio-cni-resource-quota"),
		`global: {networkPolicy: {enabled: true}}`:               append(slices.Clone(defaults), "NetworkPolicy/istio-system/istio-cni"),
		`{provider: multus, networkAttachmentDefinition: false}`: defaults,
		`{revision: r1, global: {resourceScope: cluster, networkPolicy: {enabled: true}}}`: {
			base[2], base[3], repair[0], repair[1],
		},
		`global: {resourceScope: namespace}`:                         slices.Concat(base[:2], base[4:], ours),
		`taint: {enabled: true}`:                                     slices.Concat(base, repair, ours, taint),
		`{taint: {enabled: true}, global: {resourceScope: cluster}}`: slices.Concat(base[2:4], repair, taint[1:3]),
		`taint: {enabled: true, namespaces: [a, "*"]}`:               slices.Concat(defaults, taint[:4], taint[6:]),
		`taint: {enabled: true, mode: legacy, requirements: [{name: a, selector: a=b, namespace: a}, {name: b, selector: b=c}]}`: slices.Concat(
			defaults, taint[:6], []string{
				"Role/a/istio-cni-taint-pods-a", "RoleBinding/a/istio-cni-taint-pods-a", "ConfigMap/istio-system/istio-cni-taint-configmap",
				"Role/istio-system/istio-cni-taint-config", "RoleBinding/istio-system/istio-cni-taint-config",
				"Role/kube-system/istio-cni-taint-lease", "RoleBinding/kube-system/istio-cni-taint-lease",
			}),
		`{taint: {enabled: true}, global: {networkPolicy: {enabled: true}},
monitoring: {podMonitor: {enabled: true}, dashboard: {enabled: true}}}`: slices.Concat(defaults, taint, []string{
			"NetworkPolicy/istio-system/istio-cni", "NetworkPolicy/istio-system/istio-cni-taint",
			"PodMonitor/istio-system/istio-cni-node", "PodMonitor/istio-system/istio-cni-taint",
			"ConfigMap/istio-system/istio-cni-dashboard",
		}),
	} {
		t.Run(values, func(t *testing.T) {
			t.Parallel()
			same(t, "objects", want, mustRender(t, values).ids())
		})
	}
}

// TestUpgrade_KeepsNamesOfTheReference checks what other programs know of its pods. e2e/renderings upgrades a release of its chart,
// and each rendering, on an API server, which rejects a changed selector or roleRef.
func TestUpgrade_KeepsNamesOfTheReference(t *testing.T) {
	t.Parallel()
	eachRendering(t, func(t *testing.T, r rendering) {
		if !r.has("DaemonSet/istio-system/istio-cni-node") {
			return
		}
		pod := agent(t, r).Spec.Template
		for name, want := range map[string]string{
			"k8s-app": "istio-cni-node", "sidecar.istio.io/inject": "false", "istio.io/dataplane-mode": "none",
		} {
			equal(t, pod.Labels[name], want, "label", name)
		}
		c := pod.Spec.Containers[0]
		if c.Name != "install-cni" || !slices.Equal(c.Command, []string{"install-cni"}) || pod.Spec.ServiceAccountName != "istio-cni" {
			t.Errorf("container %q runs %q as %q", c.Name, c.Command, pod.Spec.ServiceAccountName)
		}
		if pod.Spec.TerminationGracePeriodSeconds == nil || *pod.Spec.TerminationGracePeriodSeconds < 30 {
			t.Error("the shutdown of the agent takes up to 25 s")
		}
	})
}

// TestConfigMap_KeysOfTheReference checks each key of the reference's ConfigMap and its default value.
func TestConfigMap_KeysOfTheReference(t *testing.T) {
	t.Parallel()
	have := agentConfig(t, mustRender(t, `tag: 1.2.3`, `hub: r.example/mesh`))
	for name, want := range map[string]string{
		"CURRENT_AGENT_VERSION": "1.2.3", "AMBIENT_ENABLED": "false", "AMBIENT_DNS_CAPTURE": "true", "AMBIENT_IPV6": "true",
		"AMBIENT_RECONCILE_POD_RULES_ON_STARTUP": "true", "ENABLE_AMBIENT_DETECTION_RETRY": "false",
		"ISTIO_OWNED_CNI_CONFIG": "false", "CHAINED_CNI_PLUGIN": "true", "EXCLUDE_NAMESPACES": "kube-system",
		"REPAIR_ENABLED": "true", "REPAIR_LABEL_PODS": "false", "REPAIR_DELETE_PODS": "false", "REPAIR_REPAIR_PODS": "true",
		"REPAIR_INIT_CONTAINER_NAME": "istio-validation", "REPAIR_BROKEN_POD_LABEL_KEY": "cni.istio.io/uninitialized",
		"REPAIR_BROKEN_POD_LABEL_VALUE": "true", "NATIVE_NFTABLES": "false",
	} {
		equal(t, have[name], want, name)
	}
	for _, name := range []string{"CNI_CONF_NAME", "ISTIO_OWNED_CNI_CONFIG_FILENAME", "CNI_CONF_MODE"} {
		if value, is := have[name]; is {
			t.Errorf("%s=%q by default", name, value)
		}
	}
}

// TestAmbient_HostNamespace: the agent enters the node's network namespace unless it runs in it.
func TestAmbient_HostNamespace(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		`{}`:                       "",
		`ambient: {enabled: true}`: "true",
		`{ambient: {enabled: true}, hostNetwork: true}`:             "false",
		`ambient: {enabled: true, shareHostNetworkNamespace: true}`: "false",
		`ambient: {shareHostNetworkNamespace: true}`:                "",
	} {
		r := mustRender(t, text)
		equal(t, agentConfig(t, r)["ALLOW_SWITCH_TO_HOST_NS"], want, text)
		equal(t, agent(t, r).Spec.Template.Spec.HostNetwork, want == "false", text, "host network")
	}
}

// TestConfigMap_OwnedFileName, W-1: the reference's chart sets ISTIO_OWNED_CNI_CONF_FILENAME, which its agent
// does not read.
func TestConfigMap_OwnedFileName(t *testing.T) {
	t.Parallel()
	const given = `istioOwnedCNIConfigFileName: 01-mesh.conflist`
	for _, mode := range []string{`istioOwnedCNIConfig: true`, `confMode: owned`} {
		have := agentConfig(t, mustRender(t, mode, given))
		if _, wrong := have["ISTIO_OWNED_CNI_CONF_FILENAME"]; wrong || have["ISTIO_OWNED_CNI_CONFIG_FILENAME"] != "01-mesh.conflist" {
			t.Errorf("%s: %q", mode, have)
		}
	}
	if have, is := agentConfig(t, mustRender(t, given))["ISTIO_OWNED_CNI_CONFIG_FILENAME"]; is {
		t.Errorf("without an owned file: %q", have)
	}
}

// TestChecksum_RollsForSettingsOfARestart, W-28: a change of any other setting does not.
func TestChecksum_RollsForSettingsOfARestart(t *testing.T) {
	t.Parallel()
	sum := func(texts ...string) string {
		return agent(t, mustRender(t, texts...)).Spec.Template.Annotations["checksum/config"]
	}
	before := sum()
	if len(before) != 64 {
		t.Fatalf("checksum %q", before)
	}
	for _, restart := range []string{`cniConfFileName: a.conflist`, `env: {KUBECONFIG_MODE: "0640"}`, `healthPort: 8001`} {
		if sum(restart) == before {
			t.Errorf("%s does not roll", restart)
		}
	}
	for _, live := range []string{`excludeNamespaces: [a]`, `secondIPFamily: reject`, `networkConfig: '{"type": "istio-cni"}'`} {
		equal(t, sum(live), before, live, "rolls, and takes effect without")
		if sum(live, `liveConfiguration: false`) == sum(`liveConfiguration: false`) {
			t.Errorf("%s does not roll where the agent does not watch its ConfigMap", live)
		}
	}
}

// TestPlatforms checks the table of the reference's platform profiles, except for the plugins of k3s, for which the agent looks.
func TestPlatforms(t *testing.T) {
	t.Parallel()
	want := map[string][]string{
		"":          {"/opt/cni/bin", "/etc/cni/net.d", "/var/run/netns"},
		"gke":       {"/home/kubernetes/bin", "/etc/cni/net.d", "/var/run/netns"},
		"openshift": {"/var/lib/cni/bin", "/etc/cni/multus/net.d", "/var/run/netns"},
		"k3s":       {"/var/lib/rancher/k3s/data/cni", "/var/lib/rancher/k3s/agent/etc/cni/net.d", "/var/run/netns"},
		"k3d":       {"/var/lib/rancher/k3s/data/cni", "/var/lib/rancher/k3s/agent/etc/cni/net.d", "/var/run/netns"},
		"microk8s":  {"/var/snap/microk8s/current/opt/cni/bin", "/var/snap/microk8s/current/args/cni-network", "/var/run/netns"},
		"minikube":  {"/opt/cni/bin", "/etc/cni/net.d", "/var/run/docker/netns"},
	}
	same(t, "platforms", platforms(theChart(t)), slices.Collect(maps.Keys(want)))
	for platform, dirs := range want {
		r := mustRender(t, fmt.Sprintf("platform: %q", platform))
		paths := map[string]string{}
		for _, v := range agent(t, r).Spec.Template.Spec.Volumes {
			paths[v.Name] = v.HostPath.Path
		}
		have := []string{paths["cni-bin-dir"], paths["cni-net-dir"], paths["cni-netns-dir"]}
		equal(t, cmp.Diff(dirs, have), "", platform, "-want +have")
		if platform == "openshift" {
			config, selinux := agentConfig(t, r), agent(t, r).Spec.Template.Spec.Containers[0].SecurityContext.SELinuxOptions
			if config["CHAINED_CNI_PLUGIN"] != "false" || config["CNI_CONF_NAME"] != "istio-cni.conf" || selinux.Type != "spc_t" ||
				!r.has("NetworkAttachmentDefinition/default/istio-cni") {
				t.Errorf("configuration %q, SELinux %v", config, selinux)
			}
		}
	}
}

// TestPlatforms_GKEByVersion: unless cniBinDir is set.
func TestPlatforms_GKEByVersion(t *testing.T) {
	t.Parallel()
	server := defaultRelease()
	server.Kubernetes = "v1.33.5-gke.1080000"
	for text, want := range map[string]string{
		`{}`: "/home/kubernetes/bin", `platform: gke`: "/home/kubernetes/bin", `cniBinDir: /opt/cni/bin`: "/opt/cni/bin",
		`{platform: gke, cniBinDir: /mine}`: "/mine",
	} {
		r, err := render(theChart(t), server, values(t, text))
		noError(t, err)
		equal(t, agent(t, r).Spec.Template.Spec.Volumes[0].HostPath.Path, want, text)
	}
}

// TestDirectories_Set: each is mounted, and the agent looks for those alone that are not set.
func TestDirectories_Set(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		values, net, bins string
		volumes           map[string]string
	}{
		{`{}`, "", "", map[string]string{"cni-bin-dir": "/opt/cni/bin", "cni-net-dir": "/etc/cni/net.d"}},
		{`{cniBinDir: "", cniConfDir: "", cniBinDirs: []}`, "", "", map[string]string{"cni-bin-dir": "/opt/cni/bin", "cni-net-dir": "/etc/cni/net.d"}},
		{`cniConfDir: /c`, "/host/etc/cni/net.d", "", map[string]string{"cni-bin-dir": "/opt/cni/bin", "cni-net-dir": "/c"}},
		{`cniBinDir: /b`, "", "/host/opt/cni/bin", map[string]string{"cni-bin-dir": "/b", "cni-net-dir": "/etc/cni/net.d"}},
		{`platform: k3d`, "/host/etc/cni/net.d", "", map[string]string{
			"cni-bin-dir": "/var/lib/rancher/k3s/data/cni", "cni-net-dir": "/var/lib/rancher/k3s/agent/etc/cni/net.d",
		}},
		{`platform: gke`, "", "", map[string]string{"cni-bin-dir": "/home/kubernetes/bin", "cni-net-dir": "/etc/cni/net.d"}},
		{`cniBinDirs: [/b, /c]`, "", "/host/opt/cni/bin,/host/cni-bin-2", map[string]string{
			"cni-bin-dir": "/b", "cni-bin-dir-2": "/c", "cni-net-dir": "/etc/cni/net.d",
		}},
		{`{cniBinDir: /a, cniBinDirs: [/b, /a]}`, "", "/host/opt/cni/bin,/host/cni-bin-2", map[string]string{
			"cni-bin-dir": "/a", "cni-bin-dir-2": "/b", "cni-net-dir": "/etc/cni/net.d",
		}},
	} {
		r := mustRender(t, c.values)
		config, spec, mounts := agentConfig(t, r), agent(t, r).Spec.Template.Spec, map[string]string{}
		if config["MOUNTED_CNI_NET_DIR"] != c.net || config["MOUNTED_CNI_BIN_DIRS"] != c.bins || config["CNI_NET_DIR"] != c.volumes["cni-net-dir"] {
			t.Errorf("%s: %q", c.values, config)
		}
		for _, m := range spec.Containers[0].VolumeMounts {
			mounts[m.Name] = m.MountPath
		}
		have, binds := map[string]string{}, []string{}
		for _, v := range spec.Volumes {
			if strings.HasPrefix(v.Name, "cni-bin-dir") {
				binds = append(binds, mounts[v.Name])
			}
			if strings.HasPrefix(v.Name, "cni-bin-dir") || v.Name == "cni-net-dir" {
				have[v.Name] = v.HostPath.Path
			}
		}
		equal(t, cmp.Diff(c.volumes, have), "", c.values, "-want +have")
		if c.bins != "" && strings.Join(binds, ",") != c.bins {
			t.Errorf("%s: mounted at %q", c.values, binds)
		}
	}
}

func TestImage(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		`{}`:                           "localhost/istio-cni/install-cni:" + theChart(t).Metadata.AppVersion,
		`global: {hub: r/x, tag: "1"}`: "r/x/install-cni:1",
		`{hub: r/y, tag: "2", global: {hub: r/x, tag: "1"}}`:   "r/y/install-cni:2",
		`global: {variant: debug, tag: "1"}`:                   "localhost/istio-cni/install-cni:1",
		`{variant: lean, tag: 1.27, global: {variant: debug}}`: "localhost/istio-cni/install-cni:1.27",
		`{variant: distroless, tag: 1.27.0-distroless}`:        "localhost/istio-cni/install-cni:1.27.0-distroless",
		`{image: pilot, tag: 20260827}`:                        "localhost/istio-cni/install-cni:20260827",
		`{image: r/a/b:c, tag: "2"}`:                           "r/a/b:c",
		`{hub: docker.io/istio, image: r/a/b:c}`:               "r/a/b:c",
	} {
		r := mustRender(t, text, `taint: {enabled: true}`)
		equal(t, agent(t, r).Spec.Template.Spec.Containers[0].Image, want, text)
		equal(t, tainter(t, r).Spec.Template.Spec.Containers[0].Image, want, text, "controller")
	}
	pull := mustRender(t, `global: {imagePullPolicy: Always, imagePullSecrets: [a, {name: b}]}`)
	equal(t, agent(t, pull).Spec.Template.Spec.Containers[0].ImagePullPolicy, corev1.PullAlways, "pull policy")
	// The API server defaults these, but only for new objects: an upgrade would keep the policy of the previous tag.
	for text, want := range map[string]corev1.PullPolicy{
		`{}`: corev1.PullIfNotPresent, `tag: latest`: corev1.PullAlways, `image: r/a/b`: corev1.PullAlways,
		`image: r:5000/a/b`: corev1.PullAlways, `image: r:5000/a/b:latest@sha256:00`: corev1.PullAlways,
		`image: r:5000/a/latest:1`: corev1.PullIfNotPresent, `image: r/a/b@sha256:00`: corev1.PullIfNotPresent,
		`{tag: latest, variant: debug}`: corev1.PullAlways, `{tag: latest, pullPolicy: Never}`: corev1.PullNever,
	} {
		r := mustRender(t, text, `taint: {enabled: true}`)
		have := agent(t, r).Spec.Template.Spec.Containers[0].ImagePullPolicy
		if of := tainter(t, r).Spec.Template.Spec.Containers[0].ImagePullPolicy; have != want || of != want {
			t.Errorf("%s: %q and %q, want %q", text, have, of, want)
		}
	}
	secrets := get[corev1.ServiceAccount](t, pull, "ServiceAccount/istio-system/istio-cni").ImagePullSecrets
	if len(secrets) != 2 || secrets[0].Name != "a" || secrets[1].Name != "b" {
		t.Errorf("pull secrets %v", secrets)
	}
}

// TestLabels_OfTheUser: labels in values do not duplicate keys and do not override the labels of selectors.
func TestLabels_OfTheUser(t *testing.T) {
	t.Parallel()
	r := mustRender(t, `{podLabels: {k8s-app: x, team: 7, istio.io/dataplane-mode: other},
daemonSetLabels: {k8s-app: x, release: other},
podAnnotations: {prometheus.io/scrape: false, big: 10000000},
monitoring: {podMonitor: {enabled: true, labels: {release: prometheus}}}}`)
	ds := agent(t, r)
	want := map[string]string{"k8s-app": "istio-cni-node", "team": "7", "istio.io/dataplane-mode": "other"}
	for name, value := range want {
		equal(t, ds.Spec.Template.Labels[name], value, "label", name)
	}
	if ds.Labels["k8s-app"] != "istio-cni-node" || ds.Labels["release"] != "other" {
		t.Errorf("labels %v", ds.Labels)
	}
	annotations := ds.Spec.Template.Annotations
	if annotations["prometheus.io/scrape"] != "false" || annotations["big"] != "10000000" {
		t.Errorf("annotations %v", annotations)
	}
	monitor := r.Objects[slices.Index(r.ids(), "PodMonitor/istio-system/istio-cni-node")].Fields["metadata"].(map[string]any)
	equal(t, monitor["labels"].(map[string]any)["release"], "prometheus", "monitor", monitor)
}

// TestObserver_BesideTheReference: no object, label or file of the node is one of Istio's agent, and nothing of the node can be written.
func TestObserver_BesideTheReference(t *testing.T) {
	t.Parallel()
	const all = `global: {networkPolicy: {enabled: true}}
monitoring: {podMonitor: {enabled: true}, dashboard: {enabled: true}}
resourceQuotas: {enabled: true}
provider: multus
`
	r := mustRender(t, all, `{cni: {observe: "true"}, env: {CNI_OBSERVE: "false", AMBIENT_ENABLED: "true"}}`)
	others := mustRender(t, all).ids()
	for _, o := range r.Objects {
		text := fmt.Sprint(o.Fields["metadata"], o.Fields["spec"])
		if slices.Contains(others, o.id()) || strings.Contains(text, "istio-cni-node") || strings.Contains(text, "operator.istio.io") {
			t.Errorf("%s is like that of an agent: %s", o.id(), text)
		}
	}
	same(t, "rights", requests(t, "agent", map[string]bool{"Observe": true, "Live": true, "Audit": true}), granted(t, r, "istio-cni-observer"))
	config := get[corev1.ConfigMap](t, r, "ConfigMap/istio-system/istio-cni-observer-config").Data
	check := map[string]string{
		"CNI_OBSERVE": "true", "REPAIR_ENABLED": "false", "AMBIENT_ENABLED": "false", "CONFIG_MAP": "istio-cni-observer-config",
		"DAEMONSET_NAME": "istio-cni-observer",
	}
	for name, want := range check {
		equal(t, config[name], want, name)
	}
	pod := pods(t, r)[0]
	if pod.PriorityClassName != "" || pod.HostNetwork {
		t.Errorf("pod %+v", pod)
	}
	same(t, "capabilities", inPlace, pod.Containers[0].SecurityContext.Capabilities.Add)
	writable := map[string]bool{}
	for _, m := range pod.Containers[0].VolumeMounts {
		writable[m.Name] = !m.ReadOnly
	}
	for _, v := range pod.Volumes {
		if v.EmptyDir == nil && (writable[v.Name] || v.HostPath.Path != "/proc" || *v.HostPath.Type != corev1.HostPathDirectory) {
			t.Errorf("volume %+v", v)
		}
	}
	equal(t, pods(t, mustRender(t, `{observe: true, priorityClassName: mine}`))[0].PriorityClassName, "mine", "priority class")
}
