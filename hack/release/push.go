package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// upload is a layout and the repository that it goes to.
type upload struct{ dir, repository string }

// uploads are the image, and the chart below charts/.
func uploads(hub string) []upload {
	return []upload{{imageDir, hub + "/install-cni"}, {chartDir, hub + "/charts/cni"}}
}

// reference is a pushed tag with its digest.
type reference struct {
	tag    name.Tag
	digest name.Digest
}

// push pushes image and chart with crane's library, and prints their names with digests. A tag that exists is never moved: both are
// looked for before anything is pushed.
func push(ctx context.Context, o options, out io.Writer) error {
	to := []remote.Option{remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain)}
	for _, u := range uploads(o.Hub) {
		_, _, ref, err := o.open(u)
		if err == nil && !o.DryRun {
			err = named("pushing "+ref.tag.String(), checkTag(ref, to))
		}
		if err != nil {
			return err
		}
	}
	for _, u := range uploads(o.Hub) {
		index, list, ref, err := o.open(u)
		if err != nil {
			return err
		}
		word := "would push"
		if !o.DryRun {
			word = "pushed"
			err = pushLayout(index, list, ref, to)
		}
		if err != nil {
			return fmt.Errorf("pushing %s: %w", ref.tag, err)
		}
		if _, err := fmt.Fprintf(out, "%s %s@%s\n", word, ref.tag, ref.digest.DigestStr()); err != nil {
			return err //nolint:wrapcheck // of writing to stdout
		}
	}
	return nil
}

// open reads a layout, and makes the name of its first manifest.
func (o options) open(u upload) (v1.ImageIndex, *v1.IndexManifest, reference, error) {
	var ref reference
	if o.Hub == "" {
		return nil, nil, ref, errors.New("HUB is not set: the registry, and a path below which install-cni and charts/cni are pushed")
	}
	index, err := layout.ImageIndexFromPath(found{dir: o.Dir}.path(u.dir))
	if err != nil {
		return nil, nil, ref, fmt.Errorf("reading %s: %w", u.dir, err)
	}
	list, err := index.IndexManifest()
	if err != nil || len(list.Manifests) == 0 {
		return nil, nil, ref, fmt.Errorf("reading %s: no manifests (%w)", u.dir, err)
	}
	repository, err := name.NewRepository(u.repository)
	if err != nil {
		return nil, nil, ref, fmt.Errorf("reading HUB: %w", err)
	}
	head := list.Manifests[0]
	ref = reference{repository.Tag(head.Annotations[label+"ref.name"]), repository.Digest(head.Digest.String())}
	return index, list, ref, nil
}

// pushLayout pushes all manifests by their digests, and the tag of the first at the end.
func pushLayout(index v1.ImageIndex, list *v1.IndexManifest, ref reference, options []remote.Option) error {
	for _, d := range list.Manifests {
		if err := pushOne(index, d, ref.digest.Digest(d.Digest.String()), options); err != nil {
			return err
		}
	}
	head, err := remote.Get(ref.digest, options...)
	if err != nil {
		return fmt.Errorf("reading what was pushed: %w", err)
	}
	if err = remote.Tag(ref.tag, head, options...); err != nil {
		return fmt.Errorf("tagging: %w", err)
	}
	return nil
}

// checkTag refuses a tag that exists with another digest.
func checkTag(ref reference, options []remote.Option) error {
	there, err := remote.Head(ref.tag, options...)
	if status := (*transport.Error)(nil); errors.As(err, &status) && status.StatusCode == http.StatusNotFound {
		return nil
	}
	if err != nil {
		return fmt.Errorf("looking for the tag: %w", err)
	}
	if there.Digest.String() != ref.digest.DigestStr() {
		return fmt.Errorf("the tag exists, with digest %s", there.Digest)
	}
	return nil
}

// pushOne pushes one manifest of a layout, and what it references.
func pushOne(index v1.ImageIndex, d v1.Descriptor, to name.Digest, options []remote.Option) error {
	if d.MediaType.IsIndex() {
		images, err := index.ImageIndex(d.Digest)
		if err == nil {
			err = remote.WriteIndex(to, images, options...)
		}
		return named("the index of the platforms", err)
	}
	image, err := index.Image(d.Digest)
	if err == nil {
		err = remote.Write(to, image, options...)
	}
	return named("manifest "+d.Digest.String(), err)
}

// sign prints the commands that sign a release without keys, and writes the predicate that one of them attests.
func sign(o options, out io.Writer) error {
	s, err := readProvenance(o.Dir)
	if err != nil {
		return err
	}
	text, err := json.Marshal(s.Predicate)
	if err != nil {
		return fmt.Errorf("writing the predicate: %w", err)
	}
	if err = writeFile(o.Out, text); err != nil {
		return err
	}
	checksums := found{dir: o.Dir}.path(checksumsFile)
	commands := []string{fmt.Sprintf("cosign sign-blob --yes --bundle %s %s", found{dir: o.Dir}.path(signatureFile), checksums)}
	for _, u := range uploads(o.Hub) {
		_, _, ref, opened := o.open(u)
		if opened != nil {
			return opened
		}
		commands = append(commands, fmt.Sprintf("cosign sign --yes --recursive %s", ref.digest),
			fmt.Sprintf("cosign attest --yes --type slsaprovenance1 --predicate %s %s", o.Out, ref.digest))
	}
	_, err = fmt.Fprintln(out, strings.Join(commands, "\n"))
	return err //nolint:wrapcheck // of writing to stdout
}
