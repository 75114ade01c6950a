package renderings

import (
	"fmt"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// TestPodSecurity creates the pods of all renderings by dry run in a namespace of each Pod Security level: the agent
// and the Job of doctor need hostPath volumes, and so "privileged"; the taint controller passes "restricted".
func TestPodSecurity(t *testing.T) {
	ctx, a := t.Context(), newAccount()
	levels := []string{"privileged", "baseline", "restricted"}
	accounts := []string{"istio-cni", "istio-cni-observer", "istio-cni-taint", "istio-cni-doctor"}
	for _, level := range levels {
		if err := shared.server.namespace(ctx, level, level); err != nil {
			t.Fatal(err)
		}
		if err := shared.cluster.Namespace(ctx, level, accounts...); err != nil {
			t.Fatal(err)
		}
	}
	tried := map[string]int{}
	for account, all := range podsByAccount(t) {
		for name, pod := range all {
			for _, level := range levels {
				one := pod.DeepCopy()
				one.SetNamespace(level)
				_, err := shared.server.tryPod(ctx, one)
				may := account == "istio-cni-taint" || level == "privileged"
				refused := err != nil && strings.Contains(err.Error(), "violates PodSecurity") && strings.Contains(err.Error(), "hostPath")
				if refused == may || (err != nil && !refused) {
					t.Errorf("%s: a pod of %s in a namespace of level %s: %v", name, account, level, err)
				}
				tried[fmt.Sprintf("%s in %s, refused: %t", account, level, refused)]++
				a.warned(t)
			}
		}
	}
	t.Logf("different pods: %v", tried)
	if len(tried) != len(accounts)*len(levels) {
		t.Errorf("not all were tried: %v", tried)
	}
}

// podsByAccount returns the different pods of all renderings, by ServiceAccount and by the name of one rendering.
func podsByAccount(t *testing.T) map[string]map[string]*object {
	t.Helper()
	known := map[string]bool{}
	out := map[string]map[string]*object{}
	for _, r := range shared.renderings {
		all, err := pods(r.objects)
		if err != nil {
			t.Fatal(err)
		}
		for _, pod := range all {
			if known[text(pod)] {
				continue
			}
			known[text(pod)] = true
			account, _, err := unstructured.NestedString(pod.Object, "spec", "serviceAccountName")
			if err != nil {
				t.Fatal(err)
			}
			if out[account] == nil {
				out[account] = map[string]*object{}
			}
			out[account][r.name()] = pod
		}
	}
	return out
}
