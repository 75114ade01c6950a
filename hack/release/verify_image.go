package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
	helm "helm.sh/helm/v3/pkg/registry"
)

// label is the prefix of the standard labels of images.
const label = "org.opencontainers.image."

// programPath is the program's path in the image.
const programPath = "opt/cni/bin/istio-cni"

// image checks the layout of the image, and that its tar has the same files.
func (f found) image(context.Context) []error {
	faults := []error{named(imageDir, f.checkBlobs(imageDir)), named(imageFile(number(f.version)), f.checkTar(imageFile(number(f.version)), imageDir))}
	head, images, attached, err := f.openImage()
	if err != nil {
		return append(faults, named(imageDir, err))
	}
	if head.Annotations[label+"ref.name"] != number(f.version) || head.Annotations["io.containerd.image.name"] != f.imageName() {
		faults = append(faults, fmt.Errorf("%s/index.json: the tag is %q", imageDir, head.Annotations[label+"ref.name"]))
	}
	if err = validate.Index(images); err != nil {
		return append(faults, named(imageDir, err))
	}
	list, err := images.IndexManifest()
	if err != nil || len(list.Manifests) != len(architectures()) || len(attached) != len(architectures()) {
		return append(faults, fmt.Errorf("%s: has other images than one for each of %v, with its list (%w)", imageDir, architectures(), err))
	}
	for i, arch := range architectures() {
		d := list.Manifests[i]
		where := imageDir + ", " + arch
		if d.Platform == nil || d.Platform.OS != "linux" || d.Platform.Architecture != arch {
			faults = append(faults, fmt.Errorf("%s: the platform is %v", where, d.Platform))
		}
		image, err := images.Image(d.Digest)
		if err == nil {
			err = f.checkImage(image, arch)
		}
		faults = append(faults, named(where, err), named(where, f.checkAttached(attached[i], d, arch)))
	}
	return faults
}

// openImage returns the index of the platforms with its descriptor, and the descriptors of what is attached to them.
func (f found) openImage() (head v1.Descriptor, images v1.ImageIndex, attached []v1.Descriptor, err error) {
	all, err := layout.ImageIndexFromPath(f.path(imageDir))
	if err != nil {
		return head, nil, nil, fmt.Errorf("reading the layout: %w", err)
	}
	list, err := all.IndexManifest()
	if err != nil {
		return head, nil, nil, fmt.Errorf("reading the layout: %w", err)
	}
	if len(list.Manifests) == 0 {
		return head, nil, nil, errors.New("index.json is empty")
	}
	head = list.Manifests[0]
	if images, err = all.ImageIndex(head.Digest); err != nil {
		return head, nil, nil, fmt.Errorf("reading the layout: %w", err)
	}
	return head, images, list.Manifests[1:], nil
}

// checkBlobs compares each blob with its name, and finds blobs that nothing references.
func (f found) checkBlobs(dir string) error {
	text, err := f.read(dir + "/index.json")
	if err != nil {
		return err
	}
	referenced := map[string]bool{dir + "/index.json": true, dir + "/oci-layout": true}
	if err = f.follow(dir, text, referenced); err != nil {
		return err
	}
	for _, blob := range sorted(f.sums) {
		if strings.HasPrefix(blob, dir+"/") && !referenced[blob] {
			return fmt.Errorf("%s is referenced by nothing", blob)
		}
	}
	return nil
}

// follow checks the blobs that a manifest references, and all below.
func (f found) follow(dir string, manifest []byte, referenced map[string]bool) error {
	var m struct {
		Manifests, Layers []v1.Descriptor
		Config            *v1.Descriptor
	}
	if err := json.Unmarshal(manifest, &m); err != nil {
		return fmt.Errorf("reading a manifest: %w", err)
	}
	below := slices.Concat(m.Manifests, m.Layers)
	if m.Config != nil {
		below = append(below, *m.Config)
	}
	for _, d := range below {
		blob := dir + "/blobs/sha256/" + d.Digest.Hex
		content, err := f.read(blob)
		if err != nil {
			return err
		}
		if f.sums[blob] != d.Digest.Hex || int64(len(content)) != d.Size {
			return fmt.Errorf("%s has another digest or size", blob)
		}
		referenced[blob] = true
		if !d.MediaType.IsIndex() && !d.MediaType.IsImage() {
			continue
		}
		if err = f.follow(dir, content, referenced); err != nil {
			return err
		}
	}
	return nil
}

// checkTar compares the tar of a layout with the layout.
func (f found) checkTar(name, dir string) error {
	file, err := os.Open(f.path(name))
	if err != nil {
		return fmt.Errorf("reading the release: %w", err)
	}
	defer func() { _ = file.Close() }()
	files, err := untar(file)
	if err != nil {
		return err
	}
	for path, sum := range f.sums {
		name, ours := strings.CutPrefix(path, dir+"/")
		if !ours {
			continue
		}
		if sumOf(files[name]) != sum {
			return fmt.Errorf("%s differs from %s/%s", name, dir, name)
		}
		delete(files, name)
	}
	for name := range files {
		return fmt.Errorf("%s is not in %s", name, dir)
	}
	return nil
}

// checkImage checks labels and the program of one architecture.
func (f found) checkImage(image v1.Image, arch string) error {
	config, err := image.ConfigFile()
	if err != nil {
		return fmt.Errorf("reading the configuration: %w", err)
	}
	want := map[string]string{"version": number(f.version), "revision": f.revision, "source": source, "licenses": "Apache-2.0"}
	for key, value := range want {
		if config.Config.Labels[label+key] != value {
			return fmt.Errorf("label %s is %q, not %q", label+key, config.Config.Labels[label+key], value)
		}
	}
	if created := config.Created.UTC().Format("2006-01-02T15:04:05Z"); config.Config.Labels[label+"created"] != created {
		return fmt.Errorf("label %s is not %s", label+"created", created)
	}
	if config.Architecture != arch || config.OS != "linux" {
		return fmt.Errorf("is configured for %s/%s", config.OS, config.Architecture)
	}
	all := mutate.Extract(image)
	defer func() { _ = all.Close() }()
	files, err := untar(all)
	if err != nil {
		return err
	}
	if len(files) != 1 || sumOf(files[programPath]) != f.sums[programFile(arch)] {
		return fmt.Errorf("has other files than the program %s", programFile(arch))
	}
	return nil
}

// checkAttached expects the bill of materials of an architecture.
func (f found) checkAttached(d, image v1.Descriptor, arch string) error {
	text, err := f.read(imageDir + "/blobs/sha256/" + d.Digest.Hex)
	if err != nil {
		return err
	}
	manifest, err := v1.ParseManifest(bytes.NewReader(text))
	if err != nil {
		return fmt.Errorf("reading what is attached: %w", err)
	}
	if manifest.Subject == nil || manifest.Subject.Digest != image.Digest || len(manifest.Layers) != 1 ||
		manifest.Layers[0].Digest.Hex != f.sums[bomFile(programFile(arch))] {
		return fmt.Errorf("has another list attached than %s", bomFile(programFile(arch)))
	}
	return nil
}

// chart checks the chart's package by Helm's loader and linter, and its layout.
func (f found) chart(context.Context) []error {
	name := chartFile(number(f.version))
	archive, err := f.read(name)
	if err != nil {
		return []error{err}
	}
	loaded, err := loader.LoadArchive(bytes.NewReader(archive))
	if err != nil {
		return []error{named(name, err)}
	}
	if m := loaded.Metadata; m.Name != "cni" || m.Version != number(f.version) || m.AppVersion != number(f.version) {
		err = fmt.Errorf("is chart %s of version %s and appVersion %s", m.Name, m.Version, m.AppVersion)
	}
	return []error{
		named(name, err), named(name, lintChart(archive)),
		named(chartDir, f.checkBlobs(chartDir)), named(chartTar(number(f.version)), f.checkTar(chartTar(number(f.version)), chartDir)),
		named(chartDir, f.checkChartLayout(loaded.Metadata, sumOf(archive))),
	}
}

// lintChart runs "helm lint".
func lintChart(archive []byte) error {
	dir, err := os.MkdirTemp("", "chart")
	if err != nil {
		return fmt.Errorf("unpacking: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	files, err := unpack(archive)
	if err != nil {
		return err
	}
	for name, content := range files {
		if !filepath.IsLocal(name) {
			return fmt.Errorf("has a file %q", name)
		}
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			return fmt.Errorf("unpacking: %w", err)
		}
		if err := writeFile(file, content); err != nil {
			return err
		}
	}
	for _, message := range lint.AllWithKubeVersion(filepath.Join(dir, "cni"), nil, "istio-system", nil).Messages {
		if message.Severity >= support.WarningSev {
			return message
		}
	}
	return nil
}

// checkChartLayout expects what "helm push" pushes.
func (f found) checkChartLayout(m *chart.Metadata, sum string) error {
	all, err := layout.ImageIndexFromPath(f.path(chartDir))
	if err != nil {
		return fmt.Errorf("reading the layout: %w", err)
	}
	list, err := all.IndexManifest()
	if err != nil || len(list.Manifests) != 1 || list.Manifests[0].Annotations[label+"ref.name"] != number(f.version) {
		return fmt.Errorf("has other manifests than one with tag %s (%w)", number(f.version), err)
	}
	image, err := all.Image(list.Manifests[0].Digest)
	if err != nil {
		return fmt.Errorf("reading the layout: %w", err)
	}
	manifest, err := image.Manifest()
	if err != nil {
		return fmt.Errorf("reading the layout: %w", err)
	}
	if manifest.Config.MediaType != helm.ConfigMediaType || len(manifest.Layers) != 1 ||
		manifest.Layers[0].MediaType != helm.ChartLayerMediaType || manifest.Layers[0].Digest.Hex != sum {
		return errors.New("has another layer than the chart, or other media types")
	}
	config, err := image.RawConfigFile()
	if err != nil {
		return fmt.Errorf("reading the layout: %w", err)
	}
	want, err := json.Marshal(m)
	if err != nil || !bytes.Equal(config, want) {
		return fmt.Errorf("the configuration is not the chart's metadata (%w)", err)
	}
	return nil
}
