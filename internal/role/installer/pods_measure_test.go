//go:build measure

// A measurement that is no part of a plain run:
//
//	go test -tags measure,urfave_cli_no_docs -v -run TestAgentOfManyPods ./internal/role/installer

package installer_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
)

// TestAgentOfManyPods measures the agent of a node with 250 of 10,000 pods.
func TestAgentOfManyPods(t *testing.T) {
	const pods, nodes = 10_000, 40
	n := newNode(t)
	env := []kubetest.EnvVar{}
	for e := range 40 {
		env = append(env, kubetest.EnvVar{Name: fmt.Sprintf("ISTIO_META_VARIABLE_%d", e), Value: strings.Repeat("v", 40)})
	}
	for i := range pods {
		node := nodetest.NodeName
		if i%nodes != 0 {
			node = fmt.Sprintf("other-%d", i%nodes)
		}
		pod := kubetest.Pod{
			Namespace: "shop", Name: fmt.Sprintf("web-%d", i),
			Annotations: map[string]string{"sidecar.istio.io/status": strings.Repeat("x", 500), "last-applied": strings.Repeat("y", 1500)},
			Containers:  []kubetest.Container{{Name: "app", Env: env}, {Name: "istio-proxy", Env: env}},
		}.JSON(t)
		n.API.Set([]byte(strings.Replace(string(pod), `"nodeName":"node-1"`, fmt.Sprintf(`"nodeName":%q`, node), 1)))
	}
	n.API.Compact()
	a := n.Start()
	a.AwaitReady()
	nodetest.Await(t, "the watches", func() error {
		if n.API.Watches() < 2 {
			return notYet("there are none")
		}
		return nil
	})
	time.Sleep(20 * time.Second) //nolint:forbidigo // a measurement of quiet
	u := usage(t, a.PID())
	t.Logf("memory: %s resident (anonymous %s, of files %s; peak %s), %d threads, CPU %s",
		u.status["VmRSS"], u.status["RssAnon"], u.status["RssFile"], u.status["VmHWM"], u.threads, u.cpu)
}
