// Command image packs the program into a container image for several architectures, without a container engine.
//
// It promises an OCI image layout in one tar file: an index with an image per architecture, which contains the program and
// symbolic links with the names of its roles. It also packs images of other programs, for tests. The same programs, name and
// time yield the same bytes. It never builds a program and never connects to a registry. Start reading at pack.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing/fstest"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
)

func main() {
	if err := run(os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1) //nolint:forbidigo // this is a main.go, too
	}
}

// input is a file, and the architecture or path that it is for.
type input struct{ name, file string }

// inputs is a flag that can be repeated.
type inputs []input

func (i *inputs) String() string { return fmt.Sprint(*i) }

func (i *inputs) Set(text string) error {
	name, file, found := strings.Cut(text, "=")
	if !found || name == "" || file == "" {
		return errors.New("want NAME=FILE")
	}
	*i = append(*i, input{name, file})
	return nil
}

func run(args []string, out, problems io.Writer) error {
	flags := flag.NewFlagSet("image", flag.ContinueOnError)
	flags.SetOutput(problems)
	var programs, files inputs
	flags.Var(&programs, "program", "`ARCHITECTURE=FILE`, once for each architecture")
	flags.Var(&files, "file", "`/PATH=FILE` instead of programs: an image of other programs, of which the first is run")
	image := flags.String("name", "", "`REGISTRY/PATH:TAG` of the image")
	seconds := flags.Int64("created", 0, "time of everything in the image, `seconds` since 1970")
	dir := flags.String("out", "bin/image", "`directory` to write to")
	file := flags.String("tar", "istio-cni.tar", "`name` of the image's file there")
	if err := flags.Parse(args); err != nil {
		return fmt.Errorf("reading flags: %w", err)
	}
	tag, err := name.NewTag(*image, name.StrictValidation)
	if err != nil {
		return fmt.Errorf("want --name REGISTRY/PATH:TAG: %w", err)
	}
	if (len(programs) == 0) == (len(files) == 0) {
		return errors.New("want programs or files to pack, and not both")
	}
	at := time.Unix(*seconds, 0).UTC()
	index, digest, err := pack(programs, files, tag, at)
	if err != nil {
		return err
	}
	path := filepath.Join(*dir, *file)
	if err = write(index, path, at); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	_, err = fmt.Fprintf(out, "%s@%s in %s\n", tag, digest, path)
	return err
}

// write writes the layout as a tar, by an atomic rename.
func write(index v1.ImageIndex, path string, at time.Time) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { //nolint:gosec // a result of a build, for everybody
		return err
	}
	dir, err := os.MkdirTemp(filepath.Dir(path), "layout")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if _, err = layout.Write(dir, index); err != nil {
		return err
	}
	files := fstest.MapFS{}
	err = fs.WalkDir(os.DirFS(dir), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		content, err := os.ReadFile(filepath.Join(dir, name)) //nolint:gosec // written above
		files[name] = &fstest.MapFile{Data: content, Mode: 0o644}
		return err
	})
	if err != nil {
		return err
	}
	content, err := archive(files, at)
	if err != nil {
		return err
	}
	//nolint:gosec,forbidigo // a result of a build, for everybody; written aside
	if err := os.WriteFile(path+".tmp", content, 0o644); err != nil {
		return err
	}
	return os.Rename(path+".tmp", path)
}
