// Package mesh tests the whole path on a real node: containerd, kubelet and scheduler, the agent as a DaemonSet of the manifest
// that users apply, pods as injection makes them, and their traffic.
//
// The proxy is a stand-in that answers HTTP where Envoy would listen: an answer from where nothing else listens is the proof
// that traffic was redirected. It is one story, told in the order in which it happens on a new node.
//
// Start reading at TestANewNode; lab_test.go has what it is told with.
package mesh

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/images"
)

const (
	boxImage = "localhost/box:e2e"
	// cniImage is the name in the manifest.
	cniImage = "localhost/istio-cni/install-cni:0.1.0"
)

var shared struct {
	*cluster.Cluster
	artifacts.Artifacts
}

func TestMain(m *testing.M) {
	cluster.Main()
	os.Exit(run(m))
}

func run(m *testing.M) (status int) {
	found, err := artifacts.Find()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	c, err := start(context.Background(), found)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() {
		if status != 0 {
			err = c.CollectLogs(filepath.Join(found.Logs, "mesh"))
		}
		if stopped := c.Stop(); err != nil || stopped != nil {
			fmt.Fprintln(os.Stderr, err, stopped)
			status = 1
		}
	}()
	shared.Cluster, shared.Artifacts = c, found
	return m.Run()
}

// start makes the images and starts the cluster.
func start(ctx context.Context, found artifacts.Artifacts) (*cluster.Cluster, error) {
	dir, err := os.MkdirTemp("", "istio-cni-images-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a temporary directory
	var archives []string
	for name, image := range map[string]images.Image{
		"box.tar": {Name: boxImage, Entrypoint: []string{"/box"}, Files: []images.File{{Source: found.Box, Path: "/box"}}},
		// As hack/image.sh lays it out.
		"istio-cni.tar": {Name: cniImage, Entrypoint: []string{"/opt/cni/bin/istio-cni"}, Files: []images.File{{
			Source: found.IstioCNI, Path: "/opt/cni/bin/istio-cni",
			Links: []string{"/usr/local/bin/install-cni", "/usr/local/bin/istio-cni"},
		}}},
	} {
		to := filepath.Join(dir, name)
		if err := images.Write(to, image); err != nil {
			return nil, err
		}
		archives = append(archives, to)
	}
	return cluster.Start(ctx, cluster.Options{Kube: found.Kube, Tier: cluster.Node, Images: archives, Pause: boxImage, Log: os.Stderr})
}
