package command_test

import (
	"testing"

	"github.com/meshcni/istio-cni/internal/applet/command"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestParseTarget_Forms: a pod or a workload is named as in kubectl, and NAMESPACE/NAME is a pod.
func TestParseTarget_Forms(t *testing.T) {
	t.Parallel()
	const pod, deployments = command.Pod, "deployments.apps"
	for _, tt := range []struct {
		text, namespace string
		want            command.Target // no name: refused
	}{
		{"web-0", "", command.Target{Kind: pod, Name: "web-0"}},
		{"web-0", "shop", command.Target{Kind: pod, Namespace: "shop", Name: "web-0"}},
		{"shop/web-0", "", command.Target{Kind: pod, Namespace: "shop", Name: "web-0"}},
		{"shop/web-0", "shop", command.Target{Kind: pod, Namespace: "shop", Name: "web-0"}},
		{"pod/web-0", "shop", command.Target{Kind: pod, Namespace: "shop", Name: "web-0"}},
		{"po/web-0", "", command.Target{Kind: pod, Name: "web-0"}},
		{"deploy/web", "", command.Target{Kind: deployments, Name: "web"}},
		{"deployment.v1.apps/web", "shop", command.Target{Kind: deployments, Namespace: "shop", Name: "web"}},
		{"shop/deployments/web", "", command.Target{Kind: deployments, Namespace: "shop", Name: "web"}},
		{"jobs/pod/x", "", command.Target{Kind: pod, Namespace: "jobs", Name: "x"}},
		{"x", "jobs", command.Target{Kind: pod, Namespace: "jobs", Name: "x"}},
		{"deploy", "", command.Target{Kind: pod, Name: "deploy"}},
		{text: "shop/web-0", namespace: "other"},
		{text: "svc/web", namespace: "shop"},
	} {
		got, err := command.ParseTarget(tt.text, tt.namespace)
		if refused := tt.want.Name == ""; refused != (err != nil) || !refused && got != tt.want {
			t.Errorf("%q in %q: %+v, error %v", tt.text, tt.namespace, got, err)
		}
	}
	for _, text := range []string{"", "/", "/x", "x/", "a//b", "a/b/c", "a/b/pod/c", "a?b", "a#b/c"} {
		if got, err := command.ParseTarget(text, ""); err == nil {
			t.Errorf("%q: %+v", text, got)
		}
	}
	for _, namespace := range []string{"shop", "jobs", "pod"} {
		key, err := command.PodOf(command.PodKey(namespace+"/x"), "")
		check.OK(t, err)
		check.Equal(t, key, namespace+"/x")
	}
	for _, text := range []string{"x", "deploy/x", ""} {
		if key, err := command.PodOf(text, ""); err == nil {
			t.Errorf("%q on a node: %q", text, key)
		}
	}
}
