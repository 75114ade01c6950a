package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
)

func main() {
	if err := run(os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1) //nolint:forbidigo // this is a main.go, too
	}
}

func run(args []string, out, problems io.Writer) error {
	flags := flag.NewFlagSet("image", flag.ContinueOnError)
	flags.SetOutput(problems)
	var order order
	flags.Func("program", "`ARCHITECTURE=FILE`, once for each architecture", order.programs.add)
	flags.Func("file", "`/PATH=FILE` instead of programs: an image of other programs, of which the first is run", order.files.add)
	flags.StringVar(&order.name, "name", "", "`REGISTRY/PATH:TAG` of the image")
	seconds := flags.Int64("created", 0, "time of everything in the image, `seconds` since 1970")
	dir := flags.String("out", "bin/image", "`directory` to write to")
	file := flags.String("tar", "istio-cni.tar", "`name` of the image's file there")
	if err := flags.Parse(args); err != nil {
		return fmt.Errorf("reading flags: %w", err)
	}
	order.created = time.Unix(*seconds, 0).UTC()
	index, err := pack(order)
	if err != nil {
		return err
	}
	list, err := index.IndexManifest()
	if err != nil {
		return fmt.Errorf("packing: %w", err)
	}
	path := filepath.Join(*dir, *file)
	if err = write(index, path, order.created); err != nil {
		return fmt.Errorf("writing %q: %w", path, err)
	}
	_, err = fmt.Fprintf(out, "%s@%s in %s\n", order.name, list.Manifests[0].Digest, path)
	return err
}

// input is a file, and the architecture or path that it is for.
type input struct{ name, file string }

type inputs []input

// add parses NAME=FILE.
func (i *inputs) add(text string) error {
	name, file, found := strings.Cut(text, "=")
	if !found || name == "" || file == "" {
		return errors.New("want NAME=FILE")
	}
	*i = append(*i, input{name, file})
	return nil
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
	entries, err := read(os.DirFS(dir))
	if err != nil {
		return err
	}
	content, err := archive(entries, at)
	if err != nil {
		return err
	}
	//nolint:gosec,forbidigo // a result of a build, for everybody; written aside
	if err := os.WriteFile(path+".tmp", content, 0o644); err != nil {
		return err
	}
	return os.Rename(path+".tmp", path)
}
