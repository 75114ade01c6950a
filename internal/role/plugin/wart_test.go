package plugin_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
)

// TestW25AfterARebootTheSystemStarts: the run directory, on a tmpfs, is empty until the agent has been there, or a loss of
// power left an empty file in it. Pods that are decided by their name start all the same, first of all the agent that
// mends it; a pod that may be in the mesh waits, as it must not start without redirection.
func TestW25AfterARebootTheSystemStarts(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(dir string) error{
		"nothing there": os.RemoveAll,
		"empty file": func(dir string) error {
			return os.Truncate(filepath.Join(dir, "istio-cni-kubeconfig"), 0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			node := chaintest.New(t, program(t))
			if err := spoil(node.RunDir); err != nil {
				t.Fatal(err)
			}
			list := node.Chain("1.0.0", chaintest.Stanza{
				"exclude_namespaces": []string{"kube-system"}, "pod_namespace": "istio-system", "api_timeout": "1s",
			})
			for _, pod := range []chaintest.Pod{
				node.NewPod("istio-system", "istio-cni-node-x2x4", nil), node.NewPod("kube-system", "coredns", nil),
			} {
				if _, err := node.Add(list, pod); err != nil {
					t.Errorf("ADD of %s/%s: %v", pod.Namespace, pod.Name, err)
				}
			}
			_, err := node.Add(list, node.NewPod("apps", "web", chaintest.Sidecar))
			var failed *types.Error
			if !errors.As(err, &failed) || !strings.Contains(err.Error(), "istio-cni-kubeconfig") {
				t.Errorf("ADD of a pod of the mesh: %v, want an error that names the file", err)
			}
		})
	}
}
