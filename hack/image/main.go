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
)

func main() {
	if err := run(os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1) //nolint:forbidigo // this is a main.go, too
	}
}

// programs is a flag ARCHITECTURE=FILE[,LIST] that may be repeated.
type programs []program

func (p *programs) String() string { return fmt.Sprint(*p) }

func (p *programs) Set(text string) error {
	arch, path, found := strings.Cut(text, "=")
	if !found || arch == "" || path == "" {
		return errors.New("want ARCHITECTURE=FILE[,LIST]")
	}
	path, list, _ := strings.Cut(path, ",")
	*p = append(*p, program{Architecture: arch, Path: path, List: list})
	return nil
}

// files is a flag PATH=FILE that may be repeated.
type files []file

func (f *files) String() string { return fmt.Sprint(*f) }

func (f *files) Set(text string) error {
	path, source, found := strings.Cut(text, "=")
	if !found || !strings.HasPrefix(path, "/") || source == "" {
		return errors.New("want /PATH/IN/THE/IMAGE=FILE")
	}
	*f = append(*f, file{Path: path, Source: source})
	return nil
}

func run(args []string, out, problems io.Writer) error {
	flags := flag.NewFlagSet("image", flag.ContinueOnError)
	flags.SetOutput(problems)
	var order order
	var seconds int64
	flags.Var((*programs)(&order.Programs), "program", "`ARCHITECTURE=FILE[,LIST]`, once for each architecture; the list is its bill of materials")
	flags.Var((*files)(&order.Files), "file", "`/PATH=FILE` in the place of programs: an image of other programs, of which the first is run")
	flags.StringVar(&order.Name, "name", "", "`REGISTRY/PATH:TAG` of the image")
	flags.Int64Var(&seconds, "created", 0, "time of everything in the image, `seconds` since 1970")
	dir := flags.String("out", "bin/image", "`directory` to write to")
	name := flags.String("tar", "istio-cni.tar", "`name` of the image's file there")
	if err := flags.Parse(args); err != nil {
		return fmt.Errorf("reading flags: %w", err)
	}
	order.Created = time.Unix(seconds, 0).UTC()
	packed, err := pack(order)
	if err != nil {
		return err
	}
	if err = packed.write(*dir, *name, order.Created); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s@%s in %s\n", order.Name, packed.Digest, filepath.Join(*dir, *name))
	return err
}

// write writes the tar to a directory by an atomic rename.
func (p packed) write(dir, name string, at time.Time) error {
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // a result of a build, for everybody
		return fmt.Errorf("making the output directory: %w", err)
	}
	content, err := p.layout.tar(at)
	if err != nil {
		return err
	}
	path := filepath.Join(dir, name)
	//nolint:gosec,forbidigo // a result of a build, for everybody; written aside
	if err := os.WriteFile(path+".tmp", content, 0o644); err != nil {
		return fmt.Errorf("writing %q: %w", name, err)
	}
	if err := os.Rename(path+".tmp", path); err != nil {
		return fmt.Errorf("writing %q: %w", name, err)
	}
	return nil
}
