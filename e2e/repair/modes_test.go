package repair

import (
	"context"
	"net/http"
	"testing"

	core "k8s.io/api/core/v1"
	policy "k8s.io/api/policy/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// TestDeletion_GracePeriod: deletion and eviction use the pod's own terminationGracePeriodSeconds.
func TestDeletion_GracePeriod(t *testing.T) {
	for _, m := range modes()[:2] {
		l := newFixture(t)
		l.pod("p", broken(), grace(77))
		l.once(m.grant(l), m.args...)
		pod := l.get(l.app, "p")
		if pod == nil || pod.DeletionGracePeriodSeconds == nil || *pod.DeletionGracePeriodSeconds != 77 {
			t.Errorf("%s: %v", m.name, pod)
		}
		l.clear()
	}
}

// TestEviction_DisruptionBudget: the budget blocks an eviction until it allows a disruption. The API server applies it to
// running pods only: a pod in phase Pending, as most broken pods are, is evicted in any case.
func TestEviction_DisruptionBudget(t *testing.T) {
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
