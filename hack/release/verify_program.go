package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"debug/elf"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"sigs.k8s.io/yaml"
)

func sumOf(content []byte) string {
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])
}

// machines are the ELF machines of architectures, and the byte orders.
func machines() map[string]elf.FileHeader {
	return map[string]elf.FileHeader{
		"amd64": {Machine: elf.EM_X86_64, Data: elf.ELFDATA2LSB}, "arm64": {Machine: elf.EM_AARCH64, Data: elf.ELFDATA2LSB},
		"ppc64le": {Machine: elf.EM_PPC64, Data: elf.ELFDATA2LSB}, "s390x": {Machine: elf.EM_S390, Data: elf.ELFDATA2MSB},
	}
}

// programs checks the program of each architecture, and runs it.
func (f found) programs(ctx context.Context) []error {
	var faults []error
	for _, arch := range architectures() {
		name := programFile(arch)
		err := checkELF(f.path(name), arch)
		if err == nil {
			err = f.checkBuild(name, "linux", arch)
		}
		if err == nil {
			err = f.runs(ctx, f.path(name), arch)
		}
		faults = append(faults, named(name, err))
	}
	return faults
}

// checkELF expects a static program of an architecture.
func checkELF(file, arch string) error {
	f, err := elf.Open(file)
	if err != nil {
		return fmt.Errorf("is no program: %w", err)
	}
	defer func() { _ = f.Close() }()
	if want := machines()[arch]; f.Machine != want.Machine || f.Data != want.Data || f.Class != elf.ELFCLASS64 {
		return fmt.Errorf("is a program of %s, %s", f.Machine, f.Data)
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
			return errors.New("is not static")
		}
	}
	return nil
}

// checkBuild checks the build information.
func (f found) checkBuild(name, system, arch string) error {
	info, err := buildinfo.ReadFile(f.path(name))
	if err != nil {
		return fmt.Errorf("reading the build information: %w", err)
	}
	return f.checkInfo(info, system, arch)
}

func (f found) checkInfo(info *buildinfo.BuildInfo, system, arch string) error {
	want := map[string]string{"GOOS": system, "GOARCH": arch, "CGO_ENABLED": "0", "-trimpath": "true", "vcs.revision": f.revision}
	for _, s := range info.Settings {
		if want[s.Key] == s.Value {
			delete(want, s.Key)
		}
	}
	if info.Main.Path != module || len(want) > 0 {
		return fmt.Errorf("is a build of %s without %v", info.Main.Path, want)
	}
	return nil
}

// runs expects the version of the program. Programs of other machines run under qemu's user mode.
func (f found) runs(ctx context.Context, file, arch string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	qemu := map[string]string{"amd64": "x86_64", "arm64": "aarch64", "ppc64le": "ppc64le", "s390x": "s390x"}[arch]
	file, err := filepath.Abs(file)
	if err != nil {
		return fmt.Errorf("finding the program: %w", err)
	}
	args := []string{"qemu-" + qemu + "-static", file, "version"}
	if arch == runtime.GOARCH {
		args = args[1:]
	}
	out, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput() //nolint:gosec // what is verified
	if err != nil {
		return fmt.Errorf("running it (hack/setup.sh arch installs qemu): %w: %s", err, out)
	}
	if want := "version " + f.version + ","; !strings.Contains(string(out), want) {
		return fmt.Errorf("has another version than %s: %s", f.version, strings.TrimSpace(string(out)))
	}
	return nil
}

// krew is what is read of a plugin's manifest.
type krew struct {
	Spec struct {
		Version   string `json:"version"`
		Platforms []struct {
			Selector struct {
				MatchLabels map[string]string `json:"matchLabels"`
			} `json:"selector"`
			URI    string `json:"uri"`
			SHA256 string `json:"sha256"`
			Bin    string `json:"bin"`
		} `json:"platforms"`
	} `json:"spec"`
}

// plugin checks the kubectl plugin: archives, and krew's manifest.
func (f found) plugin(ctx context.Context) []error {
	var k krew
	text, err := f.read(krewFile)
	if err == nil {
		err = yaml.Unmarshal(text, &k)
	}
	if err == nil && (k.Spec.Version != f.version || len(k.Spec.Platforms) != len(pluginPlatforms())) {
		err = fmt.Errorf("is of version %s and %d platforms", k.Spec.Version, len(k.Spec.Platforms))
	}
	faults := []error{named(krewFile, err)}
	archives := map[string]string{}
	for _, p := range k.Spec.Platforms {
		name := pluginFile(p.Selector.MatchLabels["os"] + "-" + p.Selector.MatchLabels["arch"])
		archives[name] = p.SHA256
		if !strings.HasSuffix(p.URI, "/"+name) || p.SHA256 != f.sums[name] {
			faults = append(faults, fmt.Errorf("%s: uri or sha256 is not that of %s", krewFile, name))
		}
	}
	for _, platform := range pluginPlatforms() {
		if archives[pluginFile(platform)] == "" {
			faults = append(faults, fmt.Errorf("%s lacks %s", krewFile, platform))
		}
		faults = append(faults, named(pluginFile(platform), f.checkPlugin(ctx, platform)))
	}
	return faults
}

func (f found) checkPlugin(ctx context.Context, platform string) error {
	content, err := f.pluginProgram(platform)
	if err != nil {
		return err
	}
	info, err := buildinfo.Read(bytes.NewReader(content))
	if err != nil {
		return fmt.Errorf("reading the build information: %w", err)
	}
	system, arch, _ := strings.Cut(platform, "-")
	if err = f.checkInfo(info, system, arch); err != nil {
		return err
	}
	// Programs of other systems cannot run here.
	if !bytes.Contains(content, []byte(f.version)) {
		return fmt.Errorf("has another version than %s", f.version)
	}
	if system != "linux" {
		return nil
	}
	dir, err := os.MkdirTemp("", "plugin")
	if err != nil {
		return fmt.Errorf("unpacking: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	file := filepath.Join(dir, "kubectl-istio_cni")
	if err := os.WriteFile(file, content, 0o700); err != nil { //nolint:gosec,forbidigo // a program, only for this process
		return fmt.Errorf("unpacking: %w", err)
	}
	return f.runs(ctx, file, arch)
}

// pluginProgram returns the program in an archive, which has the license beside it.
func (f found) pluginProgram(platform string) ([]byte, error) {
	archive, err := f.read(pluginFile(platform))
	if err != nil {
		return nil, err
	}
	files, err := unpack(archive)
	if err != nil {
		return nil, named(pluginFile(platform), err)
	}
	name := "kubectl-istio_cni"
	if strings.HasPrefix(platform, "windows-") {
		name += ".exe"
	}
	if len(files) != 2 || files[name] == nil || files["LICENSE"] == nil {
		return nil, fmt.Errorf("%s has other files than a program and its license", pluginFile(platform))
	}
	return files[name], nil
}

// unpack returns the regular files of a compressed tar.
func unpack(archive []byte) (map[string][]byte, error) {
	pressed, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		return nil, fmt.Errorf("is not compressed: %w", err)
	}
	return untar(pressed)
}

func untar(from io.Reader) (map[string][]byte, error) {
	out := map[string][]byte{}
	for reader := tar.NewReader(from); ; {
		h, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, fmt.Errorf("is no tar: %w", err)
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		if out[h.Name], err = io.ReadAll(reader); err != nil {
			return nil, fmt.Errorf("is no tar: %w", err)
		}
	}
}
