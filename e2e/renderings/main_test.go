// Package renderings applies the renderings of the chart, and the manifests beside it, to a real API server as users do.
//
// The chart program has the list of renderings (hack/chart/list.go). Each is installed with strict field validation, compared
// with the stored objects, and deleted; each is also an upgrade of the default rendering, and the other way round. Pods of
// each template are created by dry run. Helm itself installs and upgrades releases, among them one of the reference's chart. No
// pod runs: e2e/mesh tests the agent on a node, e2e/node the controller. All tests
// share one API server and run sequentially, because all renderings have the same object names.
//
// Start reading at install_test.go; server_test.go has the client.
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
	"github.com/meshcni/istio-cni/e2e/lab"
)

// shared is the state of all tests.
var shared struct {
	cluster    *cluster.Cluster
	reference  artifacts.Reference
	server     *server
	renderings []rendering
	// fresh has the stored objects of each rendering after an installation in an empty cluster, by the rendering's name.
	fresh map[string]stored
}

func TestMain(m *testing.M) {
	cluster.Main()
	os.Exit(lab.Shared(m, "renderings", func(ctx context.Context, found artifacts.Artifacts) (*cluster.Cluster, error) {
		c, err := cluster.Start(ctx, cluster.Options{Kube: found.Kube, Tier: cluster.ControlPlane, Log: os.Stderr})
		if err != nil {
			return nil, err
		}
		shared.cluster, shared.fresh = c, map[string]stored{}
		if shared.reference, err = artifacts.FindReference(); err == nil {
			err = prepare(ctx, c, found)
		}
		if err != nil {
			return nil, errors.Join(err, c.Stop())
		}
		return c, nil
	}))
}

// prepare renders the chart for the API server's version and creates the objects that an administrator provides:
// CustomResourceDefinitions, namespaces and a PriorityClass.
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
	// docs/install.md requires this Pod Security level.
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
