package main

import (
	"bytes"
	"debug/buildinfo"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/CycloneDX/cyclonedx-gomod/pkg/generate/bin"
	"github.com/CycloneDX/cyclonedx-gomod/pkg/licensedetect/local"
	"github.com/rs/zerolog"
)

// readLicenses are those that were read by hand: of what is not in the module cache, and where the detector is wrong, or reads one of
// several texts.
func readLicenses() map[string]string {
	return map[string]string{
		module: "Apache-2.0", "std": "BSD-3-Clause", "github.com/davecgh/go-spew": "ISC",
		"golang.org/x/net": "BSD-3-Clause", "golang.org/x/oauth2": "BSD-3-Clause", "golang.org/x/sys": "BSD-3-Clause",
		"golang.org/x/term": "BSD-3-Clause", "golang.org/x/text": "BSD-3-Clause", "golang.org/x/time": "BSD-3-Clause",
		"go.yaml.in/yaml/v2": "Apache-2.0 AND MIT", "sigs.k8s.io/json": "Apache-2.0 AND BSD-3-Clause",
		"sigs.k8s.io/yaml": "Apache-2.0 AND BSD-3-Clause AND MIT",
	}
}

// allowed are the licenses of the others. One that is not here has to be read, too.
func allowed() []string { return []string{"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT"} }

// writeBOM writes the bill of materials of a Go program by cyclonedx-gomod, from the program's build information. The same
// program yields the same text: no time, and a serial number that is derived from its digest.
func writeBOM(o options) error {
	// The modules are in the cache and were compared with go.sum, as the program has just been built; ours is in no proxy. Without a
	// proxy there is no checksum database, which cyclonedx-gomod would ask as it calls Go outside of the module.
	for _, name := range []string{"GOPROXY", "GOSUMDB"} {
		if err := os.Setenv(name, "off"); err != nil {
			return fmt.Errorf("setting %s: %w", name, err)
		}
	}
	quiet := zerolog.Nop()
	generator, err := bin.NewGenerator(o.Program, bin.WithIncludeStdlib(true), bin.WithVersionOverride(o.Version),
		bin.WithLicenseDetector(local.NewDetector(quiet)), bin.WithLogger(quiet))
	if err != nil {
		return fmt.Errorf("preparing the bill of materials: %w", err)
	}
	bom, err := generator.Generate()
	if err != nil {
		return fmt.Errorf("writing the bill of materials: %w", err)
	}
	sum, err := digest(o.Program)
	if err != nil {
		return err
	}
	bom.SerialNumber = serial(sum)
	bom.Metadata.Component.Hashes = &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: sum}}
	assertLicense(bom.Metadata.Component)
	for i := range *bom.Components {
		assertLicense(&(*bom.Components)[i])
	}
	var text bytes.Buffer
	if err := cdx.NewBOMEncoder(&text, cdx.BOMFileFormatJSON).SetPretty(true).Encode(bom); err != nil {
		return fmt.Errorf("writing the bill of materials: %w", err)
	}
	return writeFile(o.Out, text.Bytes())
}

// assertLicense makes the license that was read, or the detected one, which is evidence, the component's.
func assertLicense(c *cdx.Component) {
	if c.Evidence != nil && c.Evidence.Licenses != nil {
		c.Licenses, c.Evidence = c.Evidence.Licenses, nil
	}
	switch read := readLicenses()[c.Name]; {
	case strings.Contains(read, " "):
		c.Licenses = &cdx.Licenses{{Expression: read}}
	case read != "":
		c.Licenses = &cdx.Licenses{{License: &cdx.License{ID: read}}}
	}
}

// checkLicense expects the license that was read, or an allowed one.
func checkLicense(c cdx.Component) error {
	if c.Licenses == nil || len(*c.Licenses) != 1 {
		return fmt.Errorf("component %q has no license, or several", c.Name)
	}
	one := (*c.Licenses)[0]
	have := one.Expression
	if one.License != nil {
		have = one.License.ID
	}
	if read := readLicenses()[c.Name]; have != read && (read != "" || !slices.Contains(allowed(), have)) {
		return fmt.Errorf("component %q has the license %q: read it, and change readLicenses or allowed", c.Name, have)
	}
	return nil
}

// serial returns a UUID derived from a SHA-256 in hexadecimal.
func serial(sum string) string {
	id, _ := hex.DecodeString(sum[:32])
	id[6], id[8] = id[6]&0x0f|0x80, id[8]&0x3f|0x80
	return fmt.Sprintf("urn:uuid:%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}

// checkBOM checks a bill of materials of a program.
func checkBOM(text []byte, version string, program []byte) error {
	var bom cdx.BOM
	if err := cdx.NewBOMDecoder(bytes.NewReader(text), cdx.BOMFileFormatJSON).Decode(&bom); err != nil {
		return fmt.Errorf("is no CycloneDX: %w", err)
	}
	if bom.BOMFormat != cdx.BOMFormat || bom.Metadata == nil || bom.Metadata.Component == nil || bom.Components == nil {
		return errors.New("is no CycloneDX bill of materials of a program")
	}
	main, sum := bom.Metadata.Component, sumOf(program)
	if main.Version != version {
		return fmt.Errorf("is of version %s, not %s", main.Version, version)
	}
	if main.Hashes == nil || len(*main.Hashes) != 1 || (*main.Hashes)[0].Value != sum || bom.SerialNumber != serial(sum) {
		return errors.New("is of another program")
	}
	return checkComponents(bom, program)
}

// checkComponents expects the modules that are in the program, their licenses, and that each reference leads to a component.
func checkComponents(bom cdx.BOM, program []byte) error {
	info, err := buildinfo.Read(bytes.NewReader(program))
	if err != nil {
		return fmt.Errorf("reading the modules of the program: %w", err)
	}
	want := map[string]string{"std": info.GoVersion, module: bom.Metadata.Component.Version}
	for _, m := range info.Deps {
		want[m.Path] = m.Version
	}
	refs := map[string]bool{}
	for _, c := range append([]cdx.Component{*bom.Metadata.Component}, *bom.Components...) {
		if want[c.Name] != c.Version || !strings.HasPrefix(c.PackageURL, "pkg:golang/"+c.Name+"@") || refs[c.BOMRef] {
			return fmt.Errorf("component %q of version %q is not in the program, or is there twice", c.Name, c.Version)
		}
		if err := checkLicense(c); err != nil {
			return err
		}
		delete(want, c.Name)
		refs[c.BOMRef] = true
	}
	if len(want) > 0 || bom.Dependencies == nil {
		return fmt.Errorf("lacks dependencies, or components: %v", sorted(want))
	}
	for _, d := range *bom.Dependencies {
		if !refs[d.Ref] {
			return fmt.Errorf("dependency %q is no component", d.Ref)
		}
	}
	return nil
}
