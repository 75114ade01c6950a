// Command bom writes the software bill of materials of a Go program, with licenses, by cyclonedx-gomod. The same program yields
// the same text.
package main

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/CycloneDX/cyclonedx-gomod/pkg/generate/bin"
	"github.com/CycloneDX/cyclonedx-gomod/pkg/licensedetect/local"
	"github.com/google/uuid"
	"github.com/rs/zerolog"
)

func main() {
	program := flag.String("program", "", "`file` of the program")
	version := flag.String("version", "", "`version` of the program")
	out := flag.String("out", "", "`file` to write")
	flag.Parse()
	if err := write(*program, *version, *out); err != nil {
		fmt.Fprintln(os.Stderr, "bom:", err)
		os.Exit(1) //nolint:forbidigo // this is a main.go, too
	}
}

// write writes a bill of materials from the program's build information. Its serial number is derived from the program.
func write(program, version, out string) error {
	// The modules are in the cache and were compared with go.sum, because the program has just been built; ours is in no proxy. Without
	// a proxy there is no checksum database, which cyclonedx-gomod would ask because it calls Go outside of the module.
	for _, name := range []string{"GOPROXY", "GOSUMDB"} {
		if err := os.Setenv(name, "off"); err != nil {
			return fmt.Errorf("setting %s: %w", name, err)
		}
	}
	quiet := zerolog.Nop()
	generator, err := bin.NewGenerator(program, bin.WithIncludeStdlib(true), bin.WithVersionOverride(version),
		bin.WithLicenseDetector(local.NewDetector(quiet)), bin.WithLogger(quiet))
	if err != nil {
		return fmt.Errorf("preparing: %w", err)
	}
	bom, err := generator.Generate()
	if err != nil {
		return fmt.Errorf("reading %s: %w", program, err)
	}
	content, err := os.ReadFile(program) //nolint:gosec // who calls it names the program
	if err != nil {
		return fmt.Errorf("reading the program: %w", err)
	}
	bom.SerialNumber = uuid.NewSHA1(uuid.NameSpaceURL, content).URN()
	if err = license(bom.Metadata.Component); err != nil {
		return err
	}
	for i := range *bom.Components {
		if err = license(&(*bom.Components)[i]); err != nil {
			return err
		}
	}
	file, err := os.Create(out) //nolint:gosec // who calls it names the file
	if err != nil {
		return fmt.Errorf("writing: %w", err)
	}
	if err = cdx.NewBOMEncoder(file, cdx.BOMFileFormatJSON).SetPretty(true).Encode(bom); err != nil {
		return fmt.Errorf("writing %s: %w", out, err)
	}
	return file.Close()
}

// licenses are those that were read by hand: of what is not in the module cache, and where the detector is wrong, or reads one of
// several texts.
func licenses() map[string]string {
	return map[string]string{
		"github.com/meshcni/istio-cni": "Apache-2.0", "std": "BSD-3-Clause", "github.com/davecgh/go-spew": "ISC",
		"golang.org/x/net": "BSD-3-Clause", "golang.org/x/oauth2": "BSD-3-Clause", "golang.org/x/sys": "BSD-3-Clause",
		"golang.org/x/term": "BSD-3-Clause", "golang.org/x/text": "BSD-3-Clause", "golang.org/x/time": "BSD-3-Clause",
		"go.yaml.in/yaml/v2": "Apache-2.0 AND MIT", "sigs.k8s.io/json": "Apache-2.0 AND BSD-3-Clause",
		"sigs.k8s.io/yaml": "Apache-2.0 AND BSD-3-Clause AND MIT",
	}
}

// allowed are the licenses that need no reading.
func allowed() []string { return []string{"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT"} }

// license asserts the license that was read, or the detected one, which is only evidence, if it is allowed.
func license(c *cdx.Component) error {
	detected := c.Evidence
	c.Evidence = nil
	read, known := licenses()[c.Name]
	switch {
	case strings.Contains(read, " "):
		c.Licenses = &cdx.Licenses{{Expression: read}}
	case known:
		c.Licenses = &cdx.Licenses{{License: &cdx.License{ID: read}}}
	case detected == nil || detected.Licenses == nil || len(*detected.Licenses) != 1:
		return fmt.Errorf("%s has no license that was detected, or several: read it, and add it to licenses", c.Name)
	case !slices.Contains(allowed(), (*detected.Licenses)[0].License.ID):
		return fmt.Errorf("%s has the license %s: read it, and add it to licenses or allowed", c.Name, (*detected.Licenses)[0].License.ID)
	default:
		c.Licenses = detected.Licenses
	}
	return nil
}
