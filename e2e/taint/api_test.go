package taint

import (
	"net/url"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/meshcni/istio-cni/e2e/cluster"
)

// startSynced starts the controller and waits until its caches are synced.
func (l *fixture) startSynced() *controller {
	l.Helper()
	c := l.begin(l.grant(permissions{}), "--namespace="+l.mesh, "--leader-elect=false")
	l.Until("the caches to be synced", func() bool { return c.logged("nodes and pods are known") })
	return c
}

// expectTaintRemoved creates a ready node with the taint and a ready agent, and waits for the removal.
func (l *fixture) expectTaintRemoved(node string) {
	l.Helper()
	l.node(node, nodeState{ready: "True", taints: []string{untaint}})
	l.pod(node, podState{ready: true})
	l.Until("the removal at "+node, func() bool { return len(l.taints(node)) == 0 })
}

// checkWatchCache checks that the API server can answer all lists and watches from its watch cache: no start of the
// controller reads all pods from etcd.
func (c *controller) checkWatchCache() {
	c.fixture.Helper()
	watches := 0
	for _, r := range c.requests() {
		if r.Verb != "list" && r.Verb != "watch" {
			continue
		}
		at, err := url.Parse(r.URI)
		c.fixture.Must(err)
		query := at.Query()
		streams := query.Get("sendInitialEvents") == "true" && query.Get("resourceVersionMatch") == "NotOlderThan"
		switch {
		case r.Verb == "list" && query.Get("resourceVersion") == "":
			c.fixture.Errorf("a list without resourceVersion: %s", r.URI)
		case r.Verb == "watch" && (query.Get("allowWatchBookmarks") != "true" || !streams && query.Get("resourceVersion") == ""):
			c.fixture.Errorf("a watch without bookmarks or resourceVersion: %s", r.URI)
		case r.Verb == "watch":
			watches++
		}
	}
	if watches < 2 {
		c.fixture.Errorf("%d watches, want those of nodes and pods at least", watches)
	}
}

// TestListsAndWatchesUseTheWatchCache: also those after a restart of the API server.
func TestListsAndWatchesUseTheWatchCache(t *testing.T) {
	l := newFixture(t)
	c := l.startSynced()
	l.expectTaintRemoved("a")
	l.crash()
	l.recover()
	l.expectTaintRemoved("b")
	c.checkWatchCache()
	c.stop()
}

// TestEtcdRestarts: the controller works again afterwards.
func TestEtcdRestarts(t *testing.T) {
	l := newFixture(t)
	c := l.startSynced()
	l.expectTaintRemoved("a")
	l.Must(shared.Kill(cluster.Etcd))
	l.Must(shared.Restart(t.Context(), cluster.Etcd))
	l.Until("the API server", func() bool {
		_, err := l.client.CoreV1().Nodes().Patch(t.Context(), "a", "application/merge-patch+json",
			[]byte(`{"metadata": {"annotations": {"after": "etcd"}}}`), meta.PatchOptions{})
		return err == nil
	})
	l.expectTaintRemoved("b")
	c.checkWatchCache()
	c.stop()
}

// TestPodNearTheSizeLimitDoesNotStopTheWatch creates a pod of nearly the maximum size in etcd, with characters that
// JSON escapes.
func TestPodNearTheSizeLimitDoesNotStopTheWatch(t *testing.T) {
	l := newFixture(t)
	config, err := clientcmd.BuildConfigFromFlags("", shared.Kubeconfig())
	l.Must(err)
	config.ContentType = runtime.ContentTypeProtobuf // as JSON the request would exceed the limit
	client, err := kubernetes.NewForConfig(config)
	l.Must(err)
	huge := func(name string) {
		t.Helper()
		_, err := client.CoreV1().Pods(l.mesh).Create(t.Context(), &core.Pod{
			ObjectMeta: meta.ObjectMeta{Name: name, Labels: agentLabels()},
			Spec: core.PodSpec{NodeName: "a", Containers: []core.Container{{
				Name: "app", Image: "app", Env: []core.EnvVar{{Name: "BIG", Value: strings.Repeat("<", 1_450_000)}},
			}}},
		}, meta.CreateOptions{})
		l.Must(err)
	}
	huge("huge-0") // in a list
	c := l.startSynced()
	huge("huge-1") // in a watch
	l.expectTaintRemoved("b")
	l.crash()
	l.recover()
	l.expectTaintRemoved("d")
	if c.logged("watch fails") && !c.logged("watch works again") {
		t.Error("the controller's watch has not recovered")
	}
	c.stop()
}
