package main

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

// pods returns the pod specs of a rendering.
func pods(t *testing.T, r rendering) []corev1.PodSpec {
	t.Helper()
	var out []corev1.PodSpec
	for _, o := range r.Objects {
		switch o.Kind {
		case "DaemonSet":
			out = append(out, get[appsv1.DaemonSet](t, r, o.id()).Spec.Template.Spec)
		case "Deployment":
			out = append(out, get[appsv1.Deployment](t, r, o.id()).Spec.Template.Spec)
		case "Pod", "Job", "CronJob", "StatefulSet", "ReplicaSet":
			t.Errorf("%s is not checked by this test", o.id())
		}
	}
	return out
}

// TestContainers_NotPrivileged checks every rendering of the chart.
func TestContainers_NotPrivileged(t *testing.T) {
	t.Parallel()
	eachRendering(t, func(t *testing.T, r rendering) {
		for _, pod := range pods(t, r) {
			if pod.HostPID || pod.HostIPC || len(pod.InitContainers) != 0 || len(pod.Containers) != 1 {
				t.Errorf("pod %+v", pod)
			}
			c := pod.Containers[0]
			s := c.SecurityContext
			switch {
			case s.Privileged == nil || *s.Privileged:
				t.Errorf("%s has no privileged: false", c.Name)
			case s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem:
				t.Errorf("%s may write to its root", c.Name)
			case !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}):
				t.Errorf("%s keeps capabilities: drops %q", c.Name, s.Capabilities.Drop)
			case s.SeccompProfile == nil || s.SeccompProfile.Type == corev1.SeccompProfileTypeUnconfined:
				t.Errorf("%s has no seccomp profile", c.Name)
			}
			for _, v := range pod.Volumes {
				if v.HostPath == nil {
					continue
				}
				if path := v.HostPath.Path; path == "/" || path == "/var/run" || path == "/run" || path == "/etc" {
					t.Errorf("%s has %s of the node", c.Name, path)
				}
			}
		}
	})
}

var (
	always  = []string{"/etc/cni/net.d", "/opt/cni/bin", "/var/lib/cni ro", "/var/run/istio-cni", "/var/run/netns ro"}
	ofFiles = []corev1.Capability{"CHOWN", "DAC_OVERRIDE", "FOWNER"}
	inPlace = []corev1.Capability{"NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE"}
)

// TestRights_OfTheFeatures checks the table of docs/security.md.
func TestRights_OfTheFeatures(t *testing.T) {
	t.Parallel()
	watchPods := []string{"get /pods", "list /pods", "watch /pods"}
	repairing := slices.Concat([]string{"create /events", "patch /events"}, watchPods[1:])
	with := func(rights ...string) []string { return append(rights, repairing...) }
	for name, c := range map[string]struct {
		values string
		// files are of other users, and pods are entered, for which the node's processes are seen.
		files, pods bool
		more        string   // a capability or a mount
		repair      []string // rules of istio-cni-repair-role; nil: there is no such role
	}{
		"defaults":              {`{}`, true, true, "", repairing},
		"root's own files":      {`foreignOwners: false`, false, true, "", repairing},
		"legacy":                {`{foreignOwners: false, forceIptablesBinary: legacy}`, false, true, "NET_RAW", repairing},
		"no repair":             {`repair: {enabled: false}`, true, true, "", repairing},
		"no audit":              {`audit: {interval: 0}`, true, true, "", repairing},
		"neither":               {`{audit: {interval: 0m}, repair: {enabled: false}}`, true, false, "", nil},
		"pod condition":         {`audit: {podCondition: true}`, true, true, "", with("patch /pods/status")},
		"in place, else delete": {`repair: {deletePods: true, labelPods: true}`, true, true, "", with("delete /pods")},
		"in place, else label":  {`repair: {labelPods: true}`, true, true, "", with("patch /pods/status")},
		"detect":                {`{audit: {interval: 0}, repair: {repairPods: false}}`, true, false, "", repairing},
		"ambient":               {`profile: ambient`, true, true, "/var/run/ztunnel", repairing},
		"off beats a mode": {
			`{audit: {interval: 0, mode: repair, podCondition: true}, repair: {enabled: false, deletePods: true, labelPods: true}}`, true, false, "", nil,
		},
		"pod condition, delete": {
			`{audit: {podCondition: true}, repair: {repairPods: false, deletePods: true}}`, true, true, "", with("delete /pods", "patch /pods/status"),
		},
		"delete": {
			`{audit: {interval: 0}, repair: {repairPods: false, deletePods: true, labelPods: true}}`, true, false, "", with("delete /pods"),
		},
		"evict": {
			`{audit: {interval: 0}, repair: {repairPods: false, deletePods: true, evict: true}}`, true, false, "", with("create /pods/eviction"),
		},
		"label": {`{audit: {interval: 0}, repair: {repairPods: false, labelPods: true}}`, true, false, "", with("patch /pods/status")},
		"ambient alone": {
			`{ambient: {enabled: true}, foreignOwners: false, audit: {interval: 0}, repair: {enabled: false}}`, false, true, "/var/run/ztunnel", nil,
		},
		"ambient ignored": {
			`{env: {AMBIENT_ENABLED: true, AMBIENT_PODS: ignore}, foreignOwners: false, audit: {interval: 0}, repair: {enabled: false}}`,
			false, false, "", nil,
		},
		"least": {
			`{foreignOwners: false, audit: {interval: 0}, repair: {repairPods: false, deletePods: true}}`, false, false, "", with("delete /pods"),
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := mustRender(t, c.values)
			ds := agent(t, r)
			s := ds.Spec.Template.Spec.Containers[0].SecurityContext
			wanted, dirs := map[bool][]corev1.Capability{true: ofFiles}[c.files], always
			own := append([]string{"get /nodes"}, watchPods...)
			if c.pods {
				wanted, dirs = slices.Concat(wanted, inPlace), slices.Concat(dirs, []string{"/proc ro"})
			}
			switch {
			case strings.HasPrefix(c.more, "/"): // ambient mode
				dirs = append(dirs, c.more)
				own = append(own, "get /namespaces", "list /namespaces", "watch /namespaces", "patch /pods/status")
			case c.more != "":
				wanted = append(wanted, corev1.Capability(c.more))
			}
			same(t, "capabilities", wanted, s.Capabilities.Add)
			same(t, "mounts", dirs, mounts(ds))
			if c.repair == nil {
				own = append(own, "create /events", "patch /events") // about nodes
			}
			same(t, "rights of istio-cni", own, rules(t, r, "ClusterRole//istio-cni"))
			if has := r.has("ClusterRole//istio-cni-repair-role"); has != (c.repair != nil) {
				t.Errorf("role for repair: %t", has)
			} else if has {
				same(t, "rights of repair", c.repair, rules(t, r, "ClusterRole//istio-cni-repair-role"))
			}
			equal(t, s.AllowPrivilegeEscalation == nil, c.pods, "escalation", s.AllowPrivilegeEscalation)
			checkAppArmor(t, ds.Spec.Template, c.pods, true)
			field := agent(t, mustRender(t, c.values, `useAppArmorAnnotation: false`))
			checkAppArmor(t, field.Spec.Template, c.pods, false)
		})
	}
}

// checkAppArmor checks that the only container is unconfined by the annotation or by the field, and never by both, or has
// neither: then the runtime's default profile applies.
func checkAppArmor(t *testing.T, pod corev1.PodTemplateSpec, unconfined, annotation bool) {
	t.Helper()
	want := map[string]string{}
	if unconfined && annotation {
		want["container.apparmor.security.beta.kubernetes.io/"+pod.Spec.Containers[0].Name] = "unconfined"
	}
	have := maps.Clone(pod.Annotations)
	maps.DeleteFunc(have, func(name, _ string) bool { return !strings.Contains(name, "apparmor") })
	equal(t, cmp.Diff(want, have, cmpopts.EquateEmpty()), "", "AppArmor's annotations, -want +have")
	var profile *corev1.AppArmorProfile
	if unconfined && !annotation {
		profile = &corev1.AppArmorProfile{Type: corev1.AppArmorProfileTypeUnconfined}
	}
	equal(t, cmp.Diff(profile, pod.Spec.Containers[0].SecurityContext.AppArmorProfile), "", "AppArmor's field, -want +have")
	if s := pod.Spec.SecurityContext; s != nil && s.AppArmorProfile != nil {
		t.Errorf("AppArmor's field of the pod: %v", s.AppArmorProfile)
	}
}

// same compares lists regardless of order.
func same[T ~string](t *testing.T, what string, want, have []T) {
	t.Helper()
	want, have = slices.Sorted(slices.Values(want)), slices.Sorted(slices.Values(have))
	equal(t, cmp.Diff(want, have), "", what, "-want +have")
}

// mounts returns the node's directories in the agent's volumes, with "ro" for read-only mounts.
func mounts(ds appsv1.DaemonSet) []string {
	pod := ds.Spec.Template.Spec
	var out []string
	for _, m := range pod.Containers[0].VolumeMounts {
		for _, v := range pod.Volumes {
			if v.Name != m.Name {
				continue
			}
			path := v.HostPath.Path
			if m.ReadOnly {
				path += " ro"
			}
			out = append(out, path)
		}
	}
	return out
}

// TestRights_OpenShift: TestInventory has the roles of namespaces, TestRights_UsedAndEnough their rules.
func TestRights_OpenShift(t *testing.T) {
	t.Parallel()
	scc := "use security.openshift.io/securitycontextconstraints:privileged"
	for _, platform := range platforms(theChart(t)) {
		have := slices.Contains(rules(t, mustRender(t, fmt.Sprintf("platform: %q", platform)), "ClusterRole//istio-cni"), scc)
		equal(t, have, platform == "openshift", "platform", platform, "may use the security context constraint")
	}
}

// TestTaintController_Restricted: no capability, user, escalation, volume or AppArmor profile of its own.
func TestTaintController_Restricted(t *testing.T) {
	t.Parallel()
	r := mustRender(t, `taint: {enabled: true}`)
	s := tainter(t, r).Spec.Template.Spec.Containers[0].SecurityContext
	if len(s.Capabilities.Add) != 0 || *s.RunAsUser != 1337 || !*s.RunAsNonRoot || *s.AllowPrivilegeEscalation {
		t.Errorf("security context %+v", s)
	}
	checkAppArmor(t, tainter(t, r).Spec.Template, false, true)
	checkAppArmor(t, tainter(t, mustRender(t, `{taint: {enabled: true}, useAppArmorAnnotation: false}`)).Spec.Template, false, false)
	if volumes := tainter(t, r).Spec.Template.Spec.Volumes; len(volumes) != 0 {
		t.Errorf("volumes %v", volumes)
	}
}

// TestPermissions_Documented: the table of docs/security.md has each capability and each host directory.
func TestPermissions_Documented(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile(top + "/docs/security.md")
	noError(t, err)
	words := []string{"NET_RAW", "useAppArmorAnnotation", "/proc", "pods/eviction", "pods/status", "nodes/status", "securitycontextconstraints"}
	for _, list := range [][]corev1.Capability{ofFiles, inPlace} {
		for _, c := range list {
			words = append(words, string(c))
		}
	}
	for _, path := range always {
		words = append(words, strings.TrimSuffix(path, " ro"))
	}
	for _, word := range words {
		contains(t, string(text), "`"+word+"`")
	}
}
