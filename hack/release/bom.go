package main

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/CycloneDX/cyclonedx-gomod/pkg/generate/bin"
	"github.com/CycloneDX/cyclonedx-gomod/pkg/licensedetect/local"
	"github.com/rs/zerolog"
)

// knownLicenses are of what is not in the module cache.
func knownLicenses() map[string]string {
	return map[string]string{module: "Apache-2.0", "std": "BSD-3-Clause"}
}

// writeBOM writes the bill of materials of a Go program by cyclonedx-gomod, from the program's build information. The same
// program yields the same text: no time, and a serial number that is derived from its digest.
func writeBOM(o options) error {
	// The modules are in the cache, as the program has just been built; ours is in no proxy.
	if err := os.Setenv("GOPROXY", "off"); err != nil {
		return fmt.Errorf("setting GOPROXY: %w", err)
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

// assertLicense makes the detected license, which is evidence, the component's.
func assertLicense(c *cdx.Component) {
	if c.Evidence != nil && c.Evidence.Licenses != nil {
		c.Licenses, c.Evidence = c.Evidence.Licenses, nil
	}
	if id := knownLicenses()[c.Name]; id != "" && c.Licenses == nil {
		c.Licenses = &cdx.Licenses{{License: &cdx.License{ID: id}}}
	}
}

// serial returns a UUID derived from a SHA-256 in hexadecimal.
func serial(sum string) string {
	id, _ := hex.DecodeString(sum[:32])
	id[6], id[8] = id[6]&0x0f|0x80, id[8]&0x3f|0x80
	return fmt.Sprintf("urn:uuid:%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}

// checkBOM checks a bill of materials of a program with a digest.
func checkBOM(text []byte, version, sum string) error {
	var bom cdx.BOM
	if err := cdx.NewBOMDecoder(bytes.NewReader(text), cdx.BOMFileFormatJSON).Decode(&bom); err != nil {
		return fmt.Errorf("is no CycloneDX: %w", err)
	}
	if bom.BOMFormat != cdx.BOMFormat || bom.Metadata == nil || bom.Metadata.Component == nil || bom.Components == nil {
		return errors.New("is no CycloneDX bill of materials of a program")
	}
	main := bom.Metadata.Component
	if main.Version != version {
		return fmt.Errorf("is of version %s, not %s", main.Version, version)
	}
	if main.Hashes == nil || len(*main.Hashes) != 1 || (*main.Hashes)[0].Value != sum || bom.SerialNumber != serial(sum) {
		return errors.New("is of another program")
	}
	return checkComponents(bom)
}

// checkComponents checks names and licenses, and that each reference leads to a component.
func checkComponents(bom cdx.BOM) error {
	refs := map[string]bool{}
	for _, c := range append([]cdx.Component{*bom.Metadata.Component}, *bom.Components...) {
		if c.Name == "" || c.Version == "" || !strings.HasPrefix(c.PackageURL, "pkg:golang/") || refs[c.BOMRef] {
			return fmt.Errorf("component %q has no name, version or package URL, or is there twice", c.Name)
		}
		if c.Licenses == nil || len(*c.Licenses) == 0 || (*c.Licenses)[0].License == nil || (*c.Licenses)[0].License.ID == "" {
			return fmt.Errorf("component %q has no license", c.Name)
		}
		refs[c.BOMRef] = true
	}
	if len(refs) < 3 || bom.Dependencies == nil {
		return errors.New("has no components or no dependencies")
	}
	for _, d := range *bom.Dependencies {
		if !refs[d.Ref] {
			return fmt.Errorf("dependency %q is no component", d.Ref)
		}
	}
	return nil
}
