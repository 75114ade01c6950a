package main

import (
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	helm "helm.sh/helm/v3/pkg/registry"
)

// writeChart adds the layout of the chart.
func writeChart(o options) error {
	chart, err := os.ReadFile(filepath.Join(o.Dir, chartFile(number(o.Version))))
	if err != nil {
		return fmt.Errorf("reading the chart: %w", err)
	}
	return packChart(chart, filepath.Join(o.Dir, chartDir), number(o.Version), o.Created)
}

// seal writes the provenance and CHECKSUMS.
func seal(o options) error {
	sums, err := digests(o.Dir)
	if err != nil {
		return err
	}
	sums = assets(sums)
	delete(sums, provenanceFile)
	text, err := json.MarshalIndent(provenance(o, sums), "", "  ")
	if err != nil {
		return fmt.Errorf("writing the provenance: %w", err)
	}
	if err = writeFile(filepath.Join(o.Dir, provenanceFile), append(text, '\n')); err != nil {
		return err
	}
	if sums, err = digests(o.Dir); err != nil {
		return err
	}
	return writeFile(filepath.Join(o.Dir, checksumsFile), []byte(checksums(assets(sums))))
}

// packChart pushes a chart as "helm push" does, to a registry in this process, and stores the result as an OCI image layout.
func packChart(chart []byte, dir, tag string, created time.Time) error {
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	ref := strings.TrimPrefix(server.URL, "http://") + "/cni:" + tag
	client, err := helm.NewClient(helm.ClientOptPlainHTTP(), helm.ClientOptWriter(io.Discard))
	if err != nil {
		return fmt.Errorf("preparing to push the chart: %w", err)
	}
	if _, err = client.Push(chart, ref, helm.PushOptCreationTime(created.Format(time.RFC3339))); err != nil {
		return fmt.Errorf("packing the chart: %w", err)
	}
	parsed, err := name.ParseReference(ref)
	if err != nil {
		return fmt.Errorf("reading the name of the chart: %w", err)
	}
	image, err := remote.Image(parsed)
	if err != nil {
		return fmt.Errorf("reading the pushed chart: %w", err)
	}
	out, err := layout.Write(dir, empty.Index)
	if err != nil {
		return fmt.Errorf("writing the layout of the chart: %w", err)
	}
	annotations := map[string]string{"org.opencontainers.image.ref.name": tag}
	if err := out.AppendImage(image, layout.WithAnnotations(annotations)); err != nil {
		return fmt.Errorf("writing the layout of the chart: %w", err)
	}
	return nil
}
