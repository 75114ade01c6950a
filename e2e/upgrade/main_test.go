// Package upgrade takes a node over from the reference, Istio's own istio-cni, and gives it back: its chart and its programs
// as they are, Helm as it is, a real node, and pods whose traffic is looked at before, between and after.
//
// It is one story: the reference is installed, upgraded to this program, rolled back, upgraded again and uninstalled, while
// pods come and go.
//
// Start reading at TestFromTheReferenceAndBack; lab_test.go has what it is told with.
package upgrade

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
	// oursHub and oursTag are the defaults of the chart.
	oursHub, oursTag = "localhost/istio-cni", "0.1.0"
	oursImage        = oursHub + "/install-cni:" + oursTag
	theirHub         = "localhost/reference"
	theirTag         = "e2e"
	theirImage       = theirHub + "/install-cni:" + theirTag
)

var shared struct {
	*cluster.Cluster
	artifacts.Artifacts
	reference artifacts.Reference
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
	reference, err := artifacts.FindReference()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	c, err := start(context.Background(), found, reference)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() {
		if status != 0 {
			err = c.CollectLogs(filepath.Join(found.Logs, "upgrade"))
		}
		if stopped := c.Stop(); err != nil || stopped != nil {
			fmt.Fprintln(os.Stderr, err, stopped)
			status = 1
		}
	}()
	shared.Cluster, shared.Artifacts, shared.reference = c, found, reference
	return m.Run()
}

// start makes the images and starts the cluster.
func start(ctx context.Context, found artifacts.Artifacts, reference artifacts.Reference) (*cluster.Cluster, error) {
	dir, err := os.MkdirTemp("", "istio-cni-images-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a temporary directory
	const plugin, installer = "/opt/cni/bin/istio-cni", "/usr/local/bin/install-cni"
	var archives []string
	for name, image := range map[string]images.Image{
		"box.tar": {Name: boxImage, Entrypoint: []string{"/box"}, Files: []images.File{{Source: found.Box, Path: "/box"}}},
		// As hack/image.sh lays it out.
		"ours.tar": {Name: oursImage, Entrypoint: []string{plugin}, Files: []images.File{{
			Source: found.IstioCNI, Path: plugin, Links: []string{installer, "/usr/local/bin/istio-cni"},
		}}},
		// As the reference's own image has them.
		"reference.tar": {Name: theirImage, Entrypoint: []string{installer}, Files: []images.File{
			{Source: reference.IstioCNI, Path: plugin}, {Source: reference.InstallCNI, Path: installer},
		}},
	} {
		to := filepath.Join(dir, name)
		if err := images.Write(to, image); err != nil {
			return nil, err
		}
		archives = append(archives, to)
	}
	return cluster.Start(ctx, cluster.Options{Kube: found.Kube, Tier: cluster.Node, Images: archives, Pause: boxImage, Log: os.Stderr})
}
