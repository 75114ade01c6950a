// Command bom writes the software bills of materials of Go programs, with licenses, by cyclonedx-gomod. The same program yields the
// same text.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/CycloneDX/cyclonedx-gomod/pkg/generate/bin"
	"github.com/CycloneDX/cyclonedx-gomod/pkg/licensedetect"
	"github.com/CycloneDX/cyclonedx-gomod/pkg/licensedetect/local"
	"github.com/google/uuid"
	"github.com/rs/zerolog"
)

func main() {
	version := flag.String("version", "", "`version` of the programs; the arguments are PROGRAM=FILE, the file being what is written")
	flag.Parse()
	if err := run(*version, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "bom:", err)
		os.Exit(1) //nolint:forbidigo // this is a main.go, too
	}
}

func run(version string, programs []string) error {
	// The modules are in the cache and were compared with go.sum, because the programs have just been built; ours is in no proxy. Without
	// a proxy there is no checksum database, which cyclonedx-gomod would ask because it calls Go outside of the module.
	for _, name := range []string{"GOPROXY", "GOSUMDB"} {
		if err := os.Setenv(name, "off"); err != nil {
			return fmt.Errorf("setting %s: %w", name, err)
		}
	}
	known := detector{local.NewDetector(zerolog.Nop()), map[string][]cdx.License{}}
	for _, arg := range programs {
		program, file, _ := strings.Cut(arg, "=")
		if err := write(program, file, version, known); err != nil {
			return fmt.Errorf("%s: %w", program, err)
		}
	}
	return nil
}

// detector reads the licenses of each module once: programs share modules.
type detector struct {
	licensedetect.Detector
	known map[string][]cdx.License
}

func (d detector) Detect(path, version, dir string) ([]cdx.License, error) {
	if found, known := d.known[dir]; known {
		return found, nil
	}
	found, err := d.Detector.Detect(path, version, dir)
	d.known[dir] = found
	return found, err
}

// write writes a bill of materials from the program's build information. Its serial number is derived from the program.
func write(program, file, version string, known detector) error {
	// The long form of package URLs has the platform of this machine, not the program's.
	generator, err := bin.NewGenerator(program, bin.WithIncludeStdlib(true), bin.WithVersionOverride(version), bin.WithShortPURLS(true),
		bin.WithLicenseDetector(known), bin.WithLogger(zerolog.Nop()))
	if err != nil {
		return fmt.Errorf("preparing: %w", err)
	}
	bom, err := generator.Generate()
	if err != nil {
		return fmt.Errorf("reading the modules: %w", err)
	}
	content, err := os.ReadFile(program) //nolint:gosec // who calls it names the program
	if err != nil {
		return err
	}
	bom.SerialNumber = uuid.NewSHA1(uuid.NameSpaceURL, content).URN()
	err = license(bom.Metadata.Component)
	for i := range *bom.Components {
		err = errors.Join(err, license(&(*bom.Components)[i]))
	}
	if err != nil {
		return err
	}
	out, err := os.Create(file) //nolint:gosec // who calls it names the file
	if err != nil {
		return err
	}
	if err = cdx.NewBOMEncoder(out, cdx.BOMFileFormatJSON).SetPretty(true).Encode(bom); err != nil {
		return fmt.Errorf("writing %s: %w", file, err)
	}
	return out.Close()
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
	read, detected := licenses()[c.Name], cdx.Licenses{}
	if c.Evidence != nil && c.Evidence.Licenses != nil {
		detected, c.Evidence = *c.Evidence.Licenses, nil
	}
	switch {
	case strings.Contains(read, " "):
		c.Licenses = &cdx.Licenses{{Expression: read}}
	case read != "":
		c.Licenses = &cdx.Licenses{{License: &cdx.License{ID: read}}}
	case len(detected) == 1 && slices.Contains(allowed(), detected[0].License.ID):
		c.Licenses = &detected
	default:
		return fmt.Errorf("%s has no allowed license, or several: read them, and change licenses or allowed", c.Name)
	}
	return nil
}
