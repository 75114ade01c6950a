package applet

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// release is the version of a release. hack/release.sh sets it at link time.
var release string //nolint:gochecknoglobals // the linker can set nothing else

// BuildInfo has the Go toolchain's build information of the program.
type BuildInfo struct{ version, revision, modified string }

// Build reads the build information. A build outside version control has no revision.
func Build() BuildInfo {
	b := BuildInfo{version: "(devel)"}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	if info.Main.Version != "" {
		b.version = info.Main.Version
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.revision = s.Value
		case "vcs.modified":
			b.modified = s.Value
		}
	}
	if release != "" {
		b.version = release
	}
	return b
}

// Version returns the version of the release, else the module's version.
func (b BuildInfo) Version() string { return b.version }

// String returns one line: version, revision, toolchain, platform.
func (b BuildInfo) String() string {
	text := "version " + b.version
	if b.revision != "" {
		text += ", revision " + b.revision
	}
	if b.modified == "true" {
		text += " (modified)"
	}
	return fmt.Sprintf("%s, %s %s/%s", text, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

// Run runs the role that prints the version.
func (b BuildInfo) Run(c Call) int {
	if len(c.Args) > 0 && c.Args[0] != "--help" && c.Args[0] != "-h" {
		_, _ = fmt.Fprintf(c.Stderr, "version takes no arguments, got %q\n", c.Args)
		return ExitUsage
	}
	_, _ = fmt.Fprintln(c.Stdout, "istio-cni "+b.String())
	return ExitOK
}
