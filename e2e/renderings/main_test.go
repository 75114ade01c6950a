// Package renderings applies what the chart can render, and the manifests beside it, to a real API server as users do.
//
// The list of renderings is the chart program's (hack/chart/list.go). Each one is installed, with strict validation of fields,
// compared with what the server made of it, and removed; and each is an upgrade of the default one, and back. Pods are made
// of each template without being kept. Nothing of it runs: the agent on a node is e2e/mesh, the controller e2e/node. All
// tests share one API server, one after the other, as names in the cluster are the same in all renderings.
//
// Start reading at install_test.go; server_test.go is what is asked of the server.
package renderings

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/cluster"
)

// shared is what all tests have.
var shared struct {
	cluster    *cluster.Cluster
	server     *server
	renderings []rendering
	// fresh has what the server stores of each rendering that is installed where nothing is, by the rendering's name.
	fresh map[string]stored
}

func TestMain(m *testing.M) {
	cluster.Main()
	os.Exit(run(m))
}

func run(m *testing.M) (status int) {
	ctx := context.Background()
	found, err := artifacts.Find()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	c, err := cluster.Start(ctx, cluster.Options{Kube: found.Kube, Tier: cluster.ControlPlane, Log: os.Stderr})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() {
		if status != 0 {
			err = errors.Join(err, c.CollectLogs(filepath.Join(found.Logs, "renderings")))
		}
		if stopped := c.Stop(); err != nil || stopped != nil {
			fmt.Fprintln(os.Stderr, err, stopped)
			status = 1
		}
	}()
	if err = prepare(ctx, c, found); err != nil {
		return 1
	}
	shared.cluster, shared.fresh = c, map[string]stored{}
	return m.Run()
}

// prepare renders everything for this version of the API server, and gives that what an administrator sees to: custom
// resources, namespaces, and what values name.
func prepare(ctx context.Context, c *cluster.Cluster, found artifacts.Artifacts) error {
	version, err := c.Client().Discovery().ServerVersion()
	if err != nil {
		return fmt.Errorf("asking for the server's version: %w", err)
	}
	if shared.renderings, err = renderAll(ctx, found.Chart, version.GitVersion, filepath.Join(c.Dir(), "renderings")); err != nil {
		return err
	}
	if shared.server, err = newServer(c.REST()); err != nil {
		return err
	}
	if err := shared.server.define(ctx, found.CRDs); err != nil {
		return err
	}
	// docs/install.md says so.
	if err := shared.server.namespace(ctx, "istio-system", "privileged"); err != nil {
		return err
	}
	for _, name := range namespaces(shared.renderings) {
		if err := c.Namespace(ctx, name); err != nil {
			return err
		}
	}
	return shared.server.priorityClass(ctx, "mine") // of the option "scheduling"
}
