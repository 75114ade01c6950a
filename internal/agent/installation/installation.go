// Package installation keeps the plugin installed on a node: its program, its kubeconfig and its stanza in the CNI
// configuration.
//
// It promises that a node without the plugin gets it, in an order in which no pod meets a stanza without a program; that
// changes by other programs are reverted; that files of other programs stay unchanged; that after a crash at any instant the
// runtime can load the configuration; and that Uninstall removes all of it. It does not write an artifact in its desired
// state. The package reads nothing but the node's files.
//
// It never talks to the API server, and never decides when to uninstall.
//
// Start at Installation.Reconcile, which installs the plugin into the target that package runtimedirs finds. Run repeats it; conf.go
// has the configuration, conflict.go other writers, uninstall.go the removal and the sandboxes that still need the program.
package installation

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"k8s.io/utils/clock"

	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/agent/runtimedirs"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/hostpath"
)

// Parts of the installation in the health state. docs/errors.md has the comments.
const (
	// The program is in the runtime's plugin directories. If not, a directory is missing, read-only or full; see `global.platform`,
	// `cniBinDir` and `cniConfDir` of the chart.
	PartBinaries health.PartName = "binaries"
	// The plugin's credentials are in the run directory. If not, the service account's token or certificate is missing or damaged, or
	// the run directory cannot be written.
	PartKubeconfig health.PartName = "kubeconfig"
	// The configuration that the runtime loads runs the plugin. If not, the primary CNI has written no valid file yet, another program
	// rewrites it, or another file sorts first.
	PartConf health.PartName = "cni-config"
)

// eventConflict is the reason of an event on the node. docs/errors.md has the comments.
const (
	// Another program keeps rewriting the CNI configuration; the message names it. See [rewrite conflicts](agent.md#rewrite-conflicts).
	eventConflict kube.EventReason = "CNIConfigFight"
)

// Config names the files to install and their directories. Paths are as this process sees them unless said otherwise.
type Config struct {
	// Source is the program to copy, BinDirs are the directories that receive a copy.
	Source  string
	BinDirs []string
	// Skip names files that are not written; with Update false, existing files stay.
	Skip   []string
	Update bool
	// Reinstall false keeps changes that other programs make after the first installation.
	Reinstall bool

	// NetDir is the directory of CNI configurations as this process sees it, HostNetDir its path for the plugin.
	NetDir, HostNetDir string
	// Detect replaces NetDir and BinDirs by the runtime's own directories.
	Detect runtimedirs.Detect
	// RunDir is the run directory. Its path is the same for this process and the plugin.
	RunDir     string
	RunDirMode fs.FileMode
	// Want is the desired stanza and the mode of its insertion into the configuration.
	Want cniconf.Want

	// Server is the API server's address; Token and CA are files. An empty CA means that the server's certificate is not verified.
	Server         kube.Address
	Token, CA      string
	KubeconfigMode fs.FileMode
	// OldKubeconfig is the file of versions before 1.23. It is removed unless the stanza names it.
	OldKubeconfig string

	// HostRoots are prefixes for paths of the host in this process; CacheDir is libcni's cache, a path of the host.
	HostRoots []string
	CacheDir  string
	// GracePeriod delays the removal of the program after the removal of the stanza, for pods that are being created.
	GracePeriod time.Duration
}

// Links returns the other names of the program: symbolic links in the program's directory.
func Links() []string { return []string{"istio-iptables", "istio-cni-taint", "istio-cni-repair"} }

// Report receives the state of the installation. Every field may be nil.
type Report struct {
	Health  *health.State
	Metrics *metrics.Metrics
	// Warn creates an event on the node.
	Warn func(reason kube.EventReason, message string)
}

// Installation is the plugin on this node. Its methods are safe for concurrent use.
type Installation struct {
	log    *slog.Logger
	disk   hostfs.Disk
	copies hostfs.Comparisons
	now    func() time.Time
	report Report
	wake   chan struct{}

	mu     sync.Mutex
	config Config
	// asWanted has the artifacts that were in their desired state before: another program caused a difference in them.
	asWanted map[metrics.Artifact]bool
	rewrites map[metrics.Artifact]*rewrites
	// unsynced has the parts that failed: their artifacts may be in the desired state in memory but not yet on the disk.
	unsynced map[health.PartName]bool
	// logged is the text of the last logged plan of each directory, so that logPlan does not repeat it.
	logged      map[string]string
	uninstalled bool
	// credentials is the content of the last desired kubeconfig.
	credentials []byte
	// links are the files of the configuration that are symbolic links.
	links []string
	// mounts has the source of each directory's mount when the agent started.
	mounts map[string]string
	// dropIn is the directory of the network that has a drop-in file.
	dropIn string

	// dirs finds the target; target is the last one.
	dirs   *runtimedirs.Finder
	target runtimedirs.Target

	// changes counts the changes of files.
	changes int
}

// New returns an Installation and changes no file. A nil now is the system's clock.
func New(log *slog.Logger, disk hostfs.Disk, config Config, report Report, now func() time.Time) *Installation {
	if now == nil {
		now = clock.RealClock{}.Now
	}
	if report.Health == nil {
		report.Health = health.NewState(health.Options{})
	}
	if report.Metrics == nil {
		report.Metrics = metrics.New("")
	}
	if report.Warn == nil {
		report.Warn = func(kube.EventReason, string) {}
	}
	mounted := runtimedirs.Dirs{Net: config.NetDir, Bins: config.BinDirs}
	return &Installation{
		log: log, disk: disk, now: now, report: report, config: config, wake: make(chan struct{}, 1),
		asWanted: map[metrics.Artifact]bool{}, unsynced: map[health.PartName]bool{}, rewrites: map[metrics.Artifact]*rewrites{},
		logged: map[string]string{}, mounts: map[string]string{}, target: runtimedirs.Target{Dirs: mounted},
		dirs: runtimedirs.NewFinder(log, disk, runtimedirs.Settings{
			Mounted: mounted, HostNet: config.HostNetDir, Detect: config.Detect, Standalone: config.Want.Mode == cniconf.Standalone,
			Host: config.host(), RunDir: config.RunDir, RunDirMode: config.RunDirMode,
		}),
	}
}

// host returns where this process sees the node's file system: below HostRoots in a container that has these directories.
func (c Config) host() (view hostpath.View) {
	inContainer := slices.ContainsFunc(append(slices.Clone(c.BinDirs), c.NetDir), func(dir string) bool {
		return slices.ContainsFunc(c.HostRoots, func(root string) bool { return within(dir, root) })
	})
	if inContainer {
		view.Roots = c.HostRoots
	}
	return view
}

// Change changes the stanza of the desired state, or whether the node's runtime loads drop-in files, and wakes Run.
func (i *Installation) Change(change func(*cniconf.Want)) {
	i.mu.Lock()
	defer i.mu.Unlock()
	before := i.config.Want
	change(&i.config.Want)
	if before.DropIns == i.config.Want.DropIns && bytes.Equal(before.Stanza.Single(), i.config.Want.Stanza.Single()) {
		return
	}
	i.asWanted[metrics.Config] = false
	select {
	case i.wake <- struct{}{}:
	default:
	}
}

// WaitingError is the error of an installation that continues by itself as soon as a file or directory appears.
type WaitingError struct{ For string }

func (e *WaitingError) Error() string { return e.For }

// Reconcile brings program, kubeconfig and configuration into their desired state, each regardless of the result of the
// others. It inserts no stanza before program and kubeconfig exist: such a stanza would stop every pod of the node. An existing
// stanza stays. The error joins the errors of the parts; a WaitingError among them needs no action.
func (i *Installation) Reconcile() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.uninstalled {
		return errors.New("the plugin was uninstalled")
	}
	target, err := i.dirs.Settle()
	i.retarget(target)
	if err != nil {
		return withHint(err)
	}
	var errs []error
	anyChanged := false
	for _, p := range i.parts() {
		changed, err := i.reconcilePart(p)
		anyChanged = anyChanged || changed
		if err != nil {
			errs = append(errs, err)
		}
	}
	if len(errs) > 0 {
		return oneOrAll(errs)
	}
	if anyChanged {
		i.report.Metrics.Installed(metrics.InstallSuccess)
	}
	return i.clean()
}

// retarget changes the target. In other directories the files are missing because nothing has written them yet.
func (i *Installation) retarget(t runtimedirs.Target) {
	if !t.Equal(i.target.Dirs) {
		i.asWanted[metrics.Config], i.asWanted[metrics.Binary] = false, false
	}
	i.target = t
}

// part is one of the three things that Reconcile keeps on the node.
type part struct {
	name     health.PartName
	artifact metrics.Artifact
	failure  metrics.InstallResult
	dirs     []string
	run      func() (changed bool, err error)
}

func (i *Installation) parts() []part {
	return []part{
		{PartBinaries, metrics.Binary, metrics.CopyBinariesFailure, i.target.AllBins(), i.binaries},
		{PartKubeconfig, metrics.Kubeconfig, metrics.CreateKubeconfigFailure, []string{i.config.RunDir}, i.kubeconfig},
		{PartConf, metrics.Config, metrics.CreateCNIConfigFailure, i.target.Nets(), i.confs},
	}
}

func (i *Installation) reconcilePart(p part) (changed bool, err error) {
	began := i.now()
	changed, err = p.run()
	if err == nil && i.unsynced[p.name] {
		err = i.syncAgain(p)
	}
	if err != nil {
		i.unsynced[p.name] = i.unsynced[p.name] || !waits(err)
		i.failed(p, err)
		return changed, err
	}
	if changed && i.asWanted[p.artifact] {
		i.report.Metrics.Healed(p.artifact, i.now().Sub(began))
	}
	i.asWanted[p.artifact] = true
	i.report.Health.Ready(p.name)
	return changed, nil
}

// oneOrAll joins errors and returns a single one unchanged. It omits a WaitingError if another part failed.
func oneOrAll(errs []error) error {
	failed := slices.DeleteFunc(slices.Clone(errs), waits)
	if len(failed) == 0 && len(errs) > 0 || len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(failed...)
}

// usable returns an error unless the program and the kubeconfig exist, which the plugin needs for every pod.
func (i *Installation) usable() error {
	for _, dir := range i.target.AllBins() {
		if file := filepath.Join(dir, cniconf.PluginType); !executable(file) {
			return &WaitingError{For: fmt.Sprintf("waiting for the program %q before the stanza is put in", file)}
		}
	}
	if file, err := i.config.KubeconfigFile(); err != nil || !exists(file) {
		return &WaitingError{For: fmt.Sprintf("waiting for the kubeconfig %q before the stanza is put in", file)}
	}
	return nil
}

func executable(file string) bool {
	info, err := os.Stat(file)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}

// syncAgain calls fsync on the directories of a part after an earlier attempt wrote a change and failed to sync it.
func (i *Installation) syncAgain(p part) error {
	for _, dir := range p.dirs {
		if err := i.disk.SyncDir(dir); err != nil {
			return withHint(err)
		}
	}
	delete(i.unsynced, p.name)
	return nil
}

func (i *Installation) failed(p part, err error) {
	i.report.Health.NotReady(p.name, err.Error())
	switch {
	case waits(err) || waitOf(err) > 0:
	case errors.Is(err, errServiceAccount):
		i.report.Metrics.Installed(metrics.ReadServiceAccountFailure)
	default:
		i.report.Metrics.Installed(p.failure)
	}
}

// binaries copies the program and links its other names to it.
func (i *Installation) binaries() (changed bool, err error) {
	names := append([]string{cniconf.PluginType}, Links()...)
	var errs []error
	for _, dir := range i.target.AllBins() {
		i.sweep(dir, names...)
		for _, name := range names {
			file := filepath.Join(dir, name)
			did, err := i.programFile(name, file)
			if err != nil {
				errs = append(errs, withHint(fmt.Errorf("installing %q: %w", file, err)))
				break
			}
			if did {
				i.did("installed program", slog.String("file", file))
			}
			changed = changed || did
		}
	}
	return changed, errors.Join(errs...)
}

const programMode = 0o755

// programFile writes the program or one of its links, unless Skip, Update or Reinstall forbid the write.
func (i *Installation) programFile(name, file string) (changed bool, err error) {
	main := name == cniconf.PluginType
	if slices.Contains(i.config.Skip, name) || !i.config.Update && exists(file) || !i.mayWrite(metrics.Binary) {
		if main && !executable(file) {
			return false, &WaitingError{For: fmt.Sprintf("waiting for the program %q, which is not to be written", file)}
		}
		return false, nil
	}
	write := func() error { return i.disk.Symlink(cniconf.PluginType, file) }
	target, _ := os.Readlink(file)
	same := target == cniconf.PluginType
	if main {
		write = func() error { return i.disk.Copy(i.config.Source, file, programMode) }
		same, err = i.copies.Identical(i.config.Source, file, programMode)
	}
	if err != nil || same {
		return false, err
	}
	return true, i.rewriteFile(metrics.Binary, file, write)
}

// mayWrite returns false after the first installation if Reinstall is false.
func (i *Installation) mayWrite(a metrics.Artifact) bool { return i.config.Reinstall || !i.asWanted[a] }

func exists(file string) bool {
	_, _, err := hostfs.ReadFile(file, 0)
	return err == nil || errors.Is(err, hostfs.ErrTooLarge)
}

// withHint appends the remedy to an error.
func withHint(err error) error {
	if hint := hostfs.Hint(err); hint != "" {
		return fmt.Errorf("%w (%s)", err, hint)
	}
	return err
}

// did logs and counts a change of a file.
func (i *Installation) did(change string, object slog.Attr, others ...any) {
	i.log.With(object).Info(change, others...) //nolint:sloglint // the message is the caller's
	i.changes++
}
