package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"time"
)

func main() {
	if err := run(context.Background(), os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1) //nolint:forbidigo // this is a main.go, too
	}
}

// options are the flags of all commands.
type options struct {
	Dir, Version, Hub, Revision, Tag, Program, Out, Builder string
	Created                                                 time.Time
	Dirty, DryRun                                           bool
}

func run(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 0 {
		return errors.New("want bom, chart, finish, verify, push or sign")
	}
	var o options
	var seconds int64
	flags := flag.NewFlagSet("release "+args[0], flag.ContinueOnError)
	flags.StringVar(&o.Dir, "dir", "dist", "`directory` of the release")
	flags.StringVar(&o.Version, "version", "", "`version` of the release, such as v0.2.0; verify takes any without it")
	flags.StringVar(&o.Hub, "hub", "", "`registry` and path")
	flags.StringVar(&o.Revision, "revision", "", "git `commit`")
	flags.StringVar(&o.Tag, "tag", "", "git `tag`, if there is one")
	flags.StringVar(&o.Program, "program", "", "`file` to write a bill of materials of")
	flags.StringVar(&o.Out, "out", "", "`file` to write")
	flags.StringVar(&o.Builder, "builder", "", "`URI` of what builds")
	flags.Int64Var(&seconds, "created", 0, "`seconds` since 1970")
	flags.BoolVar(&o.Dirty, "dirty", false, "the tree has uncommitted changes")
	flags.BoolVar(&o.DryRun, "dry-run", false, "print what push would do")
	if err := flags.Parse(args[1:]); err != nil {
		return fmt.Errorf("reading flags: %w", err)
	}
	o.Created = time.Unix(seconds, 0).UTC()
	switch args[0] {
	case "bom":
		return writeBOM(o)
	case "chart":
		return writeChart(o)
	case "finish":
		return seal(o)
	case "verify":
		return verify(ctx, o, out)
	case "push":
		return push(ctx, o, out)
	case "sign":
		return sign(o, out)
	}
	return fmt.Errorf("unknown command %q", args[0])
}
