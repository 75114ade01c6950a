package departure

import (
	"testing"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
)

// TestW6TheDaemonSetIsAskedAbout: an end is a removal only when the cluster says so. Whatever the mode of the mesh, a
// rollout, a drain, a reboot and an API server that is away keep the plugin.
func TestW6TheDaemonSetIsAskedAbout(t *testing.T) {
	t.Parallel()
	if got := decided(t, self(), nil); got.Uninstall || got.Reason != DaemonSetPresent {
		t.Errorf("in a rollout: %+v", got)
	}
	drained := func(_ *testing.T, c *cluster) {
		c.Set(kubetest.Node("node-1", map[string]string{"kubernetes.io/os": "linux"},
			`[{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}, {"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}]`))
	}
	if got := decided(t, self(), drained); got.Uninstall {
		t.Errorf("in a drain: %+v", got)
	}
	if got := decided(t, self(), func(_ *testing.T, c *cluster) { c.Stop() }); got.Uninstall || got.Reason != NoAnswer {
		t.Errorf("without an API server: %+v", got)
	}
	if got := decided(t, self(), deleted(setPath)); !got.Uninstall {
		t.Errorf("after its removal: %+v", got)
	}
}

// TestW23RefusalsAreAnAnswerOnlyWhenConfirmed: "helm uninstall" takes the permissions first. A refusal that others cause,
// such as a gateway in trouble, is none.
func TestW23RefusalsAreAnAnswerOnlyWhenConfirmed(t *testing.T) {
	t.Parallel()
	gone := both(fails(setPath, kubetest.Forbidden, ever), fails(podPath, kubetest.Forbidden, ever))
	if got := decided(t, self(), gone); !got.Uninstall || got.Reason != PermissionsGone {
		t.Errorf("with all permissions gone: %+v", got)
	}
	if got := decided(t, self(), fails(setPath, kubetest.Forbidden, ever)); got.Uninstall {
		t.Errorf("with a permission that never was there: %+v", got)
	}
	if got := decided(t, self(), fails(setPath, kubetest.Unauthorized, 1)); got.Uninstall {
		t.Errorf("401 once: %+v", got)
	}
	page := both(fails(setPath, kubetest.ForbiddenPage, ever), fails(podPath, kubetest.ForbiddenPage, ever))
	if got := decided(t, self(), page); got.Uninstall {
		t.Errorf("403 by something else: %+v", got)
	}
}

// TestW33ADaemonSetThatIsNotForThisNodeAnyMore looks at each of what keeps pods of a DaemonSet from a node.
func TestW33ADaemonSetThatIsNotForThisNodeAnyMore(t *testing.T) {
	t.Parallel()
	affinity := `{"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
		{"matchExpressions": [{"key": "mesh", "operator": "In", "values": ["yes"]}]}]}}}}`
	for name, spec := range map[string]string{"nodeSelector": `{"nodeSelector": {"mesh": "yes"}}`, "nodeAffinity": affinity} {
		for _, labels := range []map[string]string{{}, {"mesh": "yes"}} {
			got := decided(t, self(), func(_ *testing.T, c *cluster) {
				c.Set(kubetest.DaemonSet("istio-system", "istio-cni-node", spec))
				c.Set(kubetest.Node("node-1", labels, ""))
			})
			if got.Uninstall != (len(labels) == 0) {
				t.Errorf("%s, a node with labels %v: %+v", name, labels, got)
			}
		}
	}
	for _, effect := range []string{"NoExecute", "NoSchedule"} {
		for _, tolerations := range []string{`{}`, `{"tolerations": [{"operator": "Exists"}]}`} {
			got := decided(t, self(), func(_ *testing.T, c *cluster) {
				c.Set(kubetest.DaemonSet("istio-system", "istio-cni-node", tolerations))
				c.Set(kubetest.Node("node-1", nil, `[{"key": "k", "effect": "`+effect+`"}]`))
			})
			if want := tolerations == `{}` && effect == "NoExecute"; got.Uninstall != want {
				t.Errorf("taint %s, tolerations %s: %+v, want to uninstall %v", effect, tolerations, got, want)
			}
		}
	}
}
