package repair

import (
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	policy "k8s.io/api/policy/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// TestPrecedence: repair comes before deletion, deletion before labels. Repair does nothing for pods of another node,
// so these are deleted or labelled.
func TestPrecedence(t *testing.T) {
	for _, test := range []struct {
		name          string
		args          []string
		gone, labeled bool
		reason        string
	}{
		{"delete before label", []string{"--delete-pods", "--label-pods"}, true, false, "DeleteBrokenPod"},
		{"repair is of no use from elsewhere, delete", []string{"--repair-pods", "--delete-pods", "--label-pods"}, true, false, "DeleteBrokenPod"},
		{"repair is of no use from elsewhere, label", []string{"--repair-pods", "--label-pods"}, false, true, "LabelBrokenPod"},
		{"repair is of no use from elsewhere", []string{"--repair-pods"}, false, false, "BrokenPod"},
	} {
		t.Run(test.name, func(t *testing.T) {
			l := newFixture(t)
			l.pod("p", broken())
			kubeconfig := l.grant(mayWatch, mayReport, mayDelete, mayLabel)
			if status := l.once(kubeconfig, append(test.args, "--node-name="+node)...); status != 0 {
				t.Errorf("exit status %d", status)
			}
			if gone, labeled := l.gone("p"), l.labelled("p") == "true"; gone != test.gone || labeled != test.labeled {
				t.Errorf("deleted: %t, labelled: %t", gone, labeled)
			}
			if events := l.events(l.app, "p"); len(events) != 1 || !strings.HasPrefix(events[0], test.reason+" ") {
				t.Errorf("events %q", events)
			}
			l.noForbiddenRequests()
		})
	}
}

// TestDeletionKeepsTheGracePeriod: deletion and eviction use the pod's own terminationGracePeriodSeconds.
func TestDeletionKeepsTheGracePeriod(t *testing.T) {
	for _, m := range modes()[:2] {
		l := newFixture(t)
		l.pod("p", broken(), func(p *core.Pod) {
			grace := int64(77)
			p.Spec.TerminationGracePeriodSeconds = &grace
		})
		if status := l.once(m.grant(l), m.args...); status != 0 {
			t.Errorf("%s: exit status %d", m.name, status)
		}
		pod := l.get(l.app, "p")
		if pod == nil || pod.DeletionGracePeriodSeconds == nil || *pod.DeletionGracePeriodSeconds != 77 {
			t.Errorf("%s: %v", m.name, pod)
		}
		l.clear(t.Context())
	}
}

// TestExistingLabelIsKept: the repairer does not change an existing label, whatever its value.
func TestExistingLabelIsKept(t *testing.T) {
	l := newFixture(t)
	l.pod("marked", broken(), labels(map[string]string{brokenKey: "seen"}))
	l.pod("unmarked", broken(), labels(map[string]string{"app": "shop"}))
	kubeconfig := l.grant(mayWatch, mayReport, mayLabel)
	for range 2 {
		if status := l.once(kubeconfig, "--label-pods"); status != 0 {
			t.Errorf("exit status %d", status)
		}
	}
	if mark := l.labelled("marked"); mark != "seen" || l.count("patch", "pods/status", "marked", 0) != 0 {
		t.Errorf("label %q", mark)
	}
	if mark := l.labelled("unmarked"); mark != "true" || l.count("patch", "pods/status", "unmarked", 0) != 1 {
		t.Errorf("label %q", mark)
	}
	if got := l.get(l.app, "unmarked").Labels["app"]; got != "shop" {
		t.Errorf("the other label is %q", got)
	}
	// Another label key is independent of the first one.
	args := []string{"--label-pods", "--broken-pod-label-key=example.com/broken", "--broken-pod-label-value=very"}
	if status := l.once(kubeconfig, args...); status != 0 {
		t.Errorf("exit status %d", status)
	}
	if got := l.get(l.app, "marked").Labels["example.com/broken"]; got != "very" {
		t.Errorf("label %q", got)
	}
	l.noForbiddenRequests()
}

// TestAPodDisruptionBudget: the budget blocks an eviction until it allows a disruption. The API server applies it to
// running pods only: a pod in phase Pending, as most broken pods are, is evicted in any case.
func TestAPodDisruptionBudget(t *testing.T) {
	l := newFixture(t)
	shop := labels(map[string]string{"app": "shop"})
	l.budget(0)
	l.pod("waits", broken(), shop)
	l.pod("runs", broken(), shop, phase(core.PodRunning))
	d := l.daemon(l.grant(mayWatch, mayReport, mayEvict), "--delete-pods", "--evict")
	l.Until("an event about the blocked eviction", func() bool {
		return l.event(l.app, "runs", "DeleteBrokenPod", "PodDisruptionBudget", "429", "disruption budget")
	})
	l.Until("the other eviction", func() bool { return l.gone("waits") })
	if l.gone("runs") || l.count("create", "pods/eviction", "runs", http.StatusTooManyRequests) == 0 {
		t.Errorf("requests %v", l.requests())
	}
	l.budget(1)
	l.Until("the eviction", func() bool { return l.gone("runs") })
	l.Until("its event", func() bool { return l.event(l.app, "runs", "DeleteBrokenPod", "it is deleted") })
	d.stop()
	l.noForbiddenRequests()
}

// budget creates or updates a PodDisruptionBudget for pods with label app=shop, with the status in place of its
// controller.
func (l *fixture) budget(allowed int32) {
	l.Helper()
	const name = "shop"
	budgets := l.client.PolicyV1().PodDisruptionBudgets(l.app)
	budget, err := budgets.Get(l.Context(), name, meta.GetOptions{})
	if err != nil {
		one := intstr.FromInt32(1)
		budget, err = budgets.Create(l.Context(), &policy.PodDisruptionBudget{
			ObjectMeta: meta.ObjectMeta{Name: name},
			Spec: policy.PodDisruptionBudgetSpec{
				MinAvailable: &one, Selector: &meta.LabelSelector{MatchLabels: map[string]string{"app": name}},
			},
		}, meta.CreateOptions{})
		l.Must(err)
		l.Cleanup(func() { l.Must(budgets.Delete(context.Background(), name, meta.DeleteOptions{})) })
	}
	budget.Status = policy.PodDisruptionBudgetStatus{
		ObservedGeneration: budget.Generation, DisruptionsAllowed: allowed, CurrentHealthy: allowed, DesiredHealthy: 1, ExpectedPods: 1,
	}
	_, err = budgets.UpdateStatus(l.Context(), budget, meta.UpdateOptions{})
	l.Must(err)
}

// TestLegacyCommandName runs the program under its historic name, with environment variables that have dashes.
func TestLegacyCommandName(t *testing.T) {
	l := newFixture(t)
	l.pod("p", broken())
	l.pod("elsewhere", broken(), on("node-b"))
	old := filepath.Join(t.TempDir(), "istio-cni-repair")
	l.Must(os.Symlink(shared.IstioCNI, old))
	d := l.run([]string{
		"REPAIR_NODE-NAME=" + node, "REPAIR_LABEL-PODS=true", "REPAIR_RUN-AS-DAEMON=true", "REPAIR_BROKEN-POD-LABEL-VALUE=old",
		"KUBECONFIG=" + l.grant(mayWatch, mayReport, mayLabel),
	}, old)
	l.Until("the label", func() bool { return l.labelled("p") == "old" })
	l.Until("the event", func() bool { return l.event(l.app, "p", "LabelBrokenPod") })
	d.stop()
	if mark := l.labelled("elsewhere"); mark != "" {
		t.Errorf("label %q on a pod of another node", mark)
	}
	l.noForbiddenRequests()
}
