package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/applet/command"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/node/hostpath"
	"github.com/meshcni/istio-cni/internal/node/selfcheck"
)

// directories compares the runtime's directories with the agent's.
func directories(_ context.Context, v *view) document.Check {
	if v.root == "" {
		return warn("run it on the node, or with the node's file system mounted and --host-root (manifests/examples/doctor.yaml)",
			"the node's file system is not seen here, so the container runtime's configuration cannot be read")
	}
	c := v.runtime()
	if c.Runtime == "" {
		return warn("name the directories that the runtime uses: cniConfDir and cniBinDir of the chart",
			"there is neither a socket nor a configuration file of containerd or CRI-O below %s", v.root)
	}
	if err := c.Doubt(); err != nil {
		return warn("see the container runtime's configuration in docs/errors.md, or name the directories: cniConfDir and cniBinDir of the chart",
			"where the runtime looks is not known: %v", err)
	}
	files := append(slices.Clone(c.Files), "by its defaults, without a file")
	runtime := fmt.Sprintf("%s (%s)", c.Runtime, files[0])
	where := fmt.Sprintf("%s reads configuration in %s and plugins in %s", runtime, c.ConfDir, strings.Join(c.BinDirs, ", "))
	finds := func(dir string) bool {
		return slices.ContainsFunc(c.BinDirs, func(bin string) bool { return same(v.below(bin), v.seen(dir)) })
	}
	elsewhere := !same(v.below(c.ConfDir), v.seen(v.NetDir)) && !v.network().delegates()
	elsewhere = !v.features.observe && (elsewhere || !slices.ContainsFunc(v.BinDirs, finds))
	if elsewhere && v.agentErr() != nil && v.NetDir == command.DefaultNetDir && slices.Equal(v.BinDirs, []string{command.DefaultBinDir}) {
		return ok("%s, where an agent without cniConfDir and cniBinDir installs", where)
	}
	if elsewhere {
		return fail(fmt.Sprintf("leave cniConfDir and cniBinDir unset in the chart, or set cniConfDir=%s and cniBinDir=%s; without it mount these directories at MOUNTED_CNI_NET_DIR and "+
			"MOUNTED_CNI_BIN_DIRS", c.ConfDir, c.BinDirs[0]),
			"%s; the agent installs into %s", where, v.installs())
	}
	if len(c.Problems) > 0 {
		return warn("see the container runtime's configuration in docs/errors.md", "%s: %v", runtime, errors.Join(c.Problems...))
	}
	if v.features.observe {
		return ok("%s", where)
	}
	return ok("%s, where the agent installs", where)
}

// same reports whether two paths are the same directory, which may be mounted twice or missing.
func same(a, b string) bool { return a == b || hostpath.Same(a, b) }

// primary checks the configuration that the runtime loads, and the other programs that write it.
func primary(_ context.Context, v *view) document.Check {
	n := v.network()
	const wait = "install the pod network; the agent waits for its configuration"
	switch {
	case errors.Is(n.err, fs.ErrNotExist):
		return warn(wait, "there is no configuration directory %s yet", v.shown(n.dir))
	case n.err != nil:
		return warn("run it as root", "the configuration directory cannot be read: %v", n.err)
	case n.primary == "":
		return warn(wait, "no valid CNI configuration in %s%s", v.shown(n.dir), skippedOf(n))
	}
	text := fmt.Sprintf("the runtime loads %s with %s", n.primary, strings.Join(n.loaded.Types, ", "))
	if n.has(n.primary) {
		return rivals(v, n, text+drops(n))
	}
	if c := rivals(v, n, text); c.Result != document.OK {
		return c
	}
	if n.delegates() {
		return multus(v, n, text)
	}
	for _, name := range n.files.Names() {
		if n.has(name) {
			return fail("remove the file that sorts first, or name the right one by cniConfFileName (CNI_CONF_NAME)",
				"%s, and the plugin is in %s, which the runtime does not load", text, name)
		}
	}
	if v.features.observe {
		return fail("see the log of Istio's agent on this node", "%s, without the plugin istio-cni: pods that start now bypass the mesh", text)
	}
	if v.agentErr() == nil {
		return fail("see the agent's log and its readiness: it names what prevents the installation", "%s, without the plugin, although the agent runs", text)
	}
	return warn("install the chart", "%s; the plugin is not installed yet", text)
}

// delegates reports whether the runtime loads multus, which runs the networks of other files, perhaps in another directory.
func (n network) delegates() bool {
	return slices.ContainsFunc(n.loaded.Types, func(name string) bool { return strings.HasPrefix(name, "multus") })
}

func multus(v *view, n network, text string) document.Check {
	own := v.readNetwork(v.seen(v.NetDir))
	if slices.ContainsFunc(n.files.Names(), n.has) || slices.ContainsFunc(own.files.Names(), own.has) {
		return ok("%s, which delegates to other files; the plugin is in one of them", text)
	}
	return warn("see manifests/examples/values-multus.yaml", "%s: multus delegates, and the plugin has to be in a file that it delegates to", text)
}

func skippedOf(n network) string {
	if len(n.skipped) == 0 {
		return ""
	}
	return fmt.Sprintf(" (%v)", errors.Join(n.skipped...))
}

// drops names the drop-in file that has the plugin.
func drops(n network) string {
	if slices.Contains(n.loaded.Types, cniconf.PluginType) {
		return ""
	}
	return ", and the plugin from a file beside it"
}

// has reports whether a runtime that loads the file runs the plugin.
func (n network) has(name string) bool {
	list, err := cniconf.Load(name, n.files[name].Data)
	if err != nil {
		return false
	}
	return slices.Contains(list.Types, cniconf.PluginType) || slices.ContainsFunc(n.files.DropIns(list.Name), func(file string) bool {
		one, err := cniconf.Load(filepath.Base(file), n.files[file].Data)
		return err == nil && slices.Contains(one.Types, cniconf.PluginType)
	})
}

// backup is the suffix of a file that Cilium has renamed because its cni.exclusive is on.
const backup = ".cilium_bak"

// rivals checks other programs that write the same directory. It fails only if the plugin is missing.
func rivals(v *view, n network, text string) document.Check {
	renamed := slices.DeleteFunc(slices.Clone(n.names), func(name string) bool { return !strings.HasSuffix(name, backup) })
	here := n.has(n.primary)
	isCilium := slices.Contains(n.loaded.Types, "cilium-cni")
	const exclusive = "set cni.exclusive=false in Cilium's chart, and restart its agents"
	switch {
	case isCilium && (v.cilium().exclusive() || len(renamed) > 0 && !v.cilium().whole):
		report := warn
		if !here {
			report = fail
		}
		return report(exclusive, "%s; Cilium keeps the directory to itself (cni.exclusive): it renames what others write%s", text, files(renamed))
	case v.root != "" && v.runtime().ConfTemplate != "" && !here:
		return warn("the agent adds the plugin again after each change; see to it that it runs",
			"%s; containerd itself writes a configuration from the template %s", text, v.runtime().ConfTemplate)
	case len(n.skipped) > 0:
		return warn("correct or remove the file", "%s; a file that sorts before it cannot be used%s", text, skippedOf(n))
	}
	return ok("%s", text)
}

func files(names []string) string {
	if len(names) == 0 {
		return ""
	}
	return ": " + printable.Some(names, mostNames)
}

// pluginDirs returns the runtime's plugin directories or, if unknown, the agent's.
func (v *view) pluginDirs() (dirs []string) {
	if v.root != "" && v.runtime().Runtime != "" {
		for _, dir := range v.runtime().BinDirs {
			dirs = append(dirs, v.below(dir))
		}
		return dirs
	}
	for _, dir := range v.BinDirs {
		dirs = append(dirs, v.seen(dir))
	}
	return dirs
}

// cilium is Cilium's configuration. Only a complete configuration has all keys.
type cilium struct {
	data  map[string]string
	whole bool
	err   error
}

// exclusive reports whether Cilium renames other programs' configurations, which is its default.
func (c cilium) exclusive() bool { return c.whole && c.data["cni-exclusive"] != "false" }

// present reports whether Cilium is on this node.
func (v *view) present() bool {
	n := v.network()
	return slices.Contains(n.loaded.Types, "cilium-cni") || slices.ContainsFunc(n.names, func(name string) bool { return strings.Contains(name, "cilium") }) ||
		slices.ContainsFunc(v.pluginDirs(), func(dir string) bool {
			_, err := os.Stat(filepath.Join(dir, "cilium-cni"))
			return err == nil
		})
}

// selfTest shows the verdict that the agent has recorded. Without a verdict it makes the test, in its own namespaces.
func selfTest(ctx context.Context, v *view) document.Check {
	if v.features.observe { // the test would load kernel modules, and does not test the node's plugin
		return ok("an observer makes none: the Job of manifests/examples/doctor.yaml shows whether this program would serve the node")
	}
	verdict, source := selfcheck.Recorded(v.RunDir), "recorded by the agent"
	if len(verdict.Results) == 0 {
		var err error
		if verdict, err = selfcheck.Run(ctx, v.searchPath, true, slog.New(slog.DiscardHandler)); err != nil {
			return warn("run it as root with CAP_SYS_ADMIN and CAP_NET_ADMIN, or see the log of the agent, which makes the test at its start",
				"no self-test was made: %v", err)
		}
		source = "made now, with the programs of this file system"
	}
	if err := verdict.Err(); err != nil {
		return fail("load the modules that the text names, or install iptables on the node: see docs/errors.md", "%v (%s)", err, source)
	}
	if text := verdict.Summary(); text != "" {
		return warn("none if pods do not need it; else load the modules that the text names",
			"packets are redirected by %s; not everything works: %s (%s)", verdict.Choice, text, source)
	}
	return ok("packets are redirected by %s (%s)", verdict.Choice, source)
}
