// Package installation keeps the plugin installed on a node: its program, its kubeconfig and its stanza in the CNI
// configuration.
//
// It promises that a node without the plugin gets it, in an order in which no pod meets a stanza without a program; that
// what other programs change is restored; that what they own is not changed; that a crash at any instant leaves a
// configuration which the runtime can load; and that Uninstall removes all of it. What is as wanted is not written. It
// reads nothing but the node's files.
//
// It never talks to the API server, and never decides when to uninstall.
//
// Start at Installation.Reconcile. Run repeats it; conf.go has the configuration, conflict.go other writers, cache.go the
// sandboxes that still need the program.
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

	"github.com/meshcni/istio-cni/internal/agent/health"
	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// Parts of the installation in the health state.
const (
	PartBinaries   = "binaries"
	PartKubeconfig = "kubeconfig"
	PartConf       = "cni-config"
)

// Config says what is installed where. Paths are as this process sees them unless said otherwise.
type Config struct {
	// Source is the program to copy, BinDirs are the directories that get it.
	Source  string
	BinDirs []string
	// Skip names files that are not written; Update false leaves those that are there alone.
	Skip   []string
	Update bool
	// Reinstall false leaves what others do after the first installation alone.
	Reinstall bool

	// NetDir is the directory of CNI configurations, HostNetDir the same as the plugin sees it.
	NetDir, HostNetDir string
	// RunDir is the same path for the plugin.
	RunDir     string
	RunDirMode fs.FileMode
	// Want is the stanza and how it gets into the configuration.
	Want cniconf.Want

	// Server and Trust lead to the API server; Token and CA are files, CA is empty when the server is not verified.
	Server         kube.Address
	Token, CA      string
	KubeconfigMode fs.FileMode
	// OldKubeconfig is the file of versions before 1.23. It is removed unless the stanza names it.
	OldKubeconfig string

	// HostRoots are prefixes under which paths of the host may be seen; CacheDir is libcni's cache, a path of the host.
	HostRoots []string
	CacheDir  string
	// GracePeriod is how long the program stays after its stanza is gone, for pods that are being created.
	GracePeriod time.Duration
}

// Links are the other names of the program beside it.
func Links() []string { return []string{"istio-iptables", "istio-cni-taint", "istio-cni-repair"} }

// Report receives the state of the installation. Every field may be nil.
type Report struct {
	Health  *health.State
	Metrics *metrics.Metrics
	// Warn makes an event on the node.
	Warn func(reason, message string)
}

// Installation is the plugin on this node. Its methods may be called from several goroutines.
type Installation struct {
	log    *slog.Logger
	disk   hostfs.Disk
	now    func() time.Time
	report Report
	wake   chan struct{}

	mu     sync.Mutex
	config Config
	// asWanted has the artifacts that were as wanted before, so that a difference is the work of another program.
	asWanted map[metrics.Artifact]bool
	rewrites map[metrics.Artifact]*rewrites
	// unsynced has the parts that failed: what is as wanted in them now may not be on the disk.
	unsynced map[string]bool
	// logged is what the log says of the configuration, which is not repeated.
	logged      string
	uninstalled bool
	// credentials is the last kubeconfig that was wanted.
	credentials []byte
	// links are the files of the configuration that are symbolic links.
	links []string
	// mounts is where the node's directories were mounted from at the start.
	mounts map[string]string
	// dropIn is the directory of the network that has a drop-in file.
	dropIn string
}

// New makes an Installation; nothing is touched yet. A nil now is the system's clock.
func New(log *slog.Logger, disk hostfs.Disk, config Config, report Report, now func() time.Time) *Installation {
	if now == nil {
		now = time.Now //nolint:forbidigo // the clock that tests replace
	}
	if disk.Compared == nil {
		disk.Compared = &hostfs.Comparisons{}
	}
	if report.Health == nil {
		report.Health = health.NewState(health.Options{})
	}
	if report.Metrics == nil {
		report.Metrics = metrics.New("")
	}
	if report.Warn == nil {
		report.Warn = func(string, string) {}
	}
	return &Installation{
		log: log, disk: disk, now: now, report: report, config: config, wake: make(chan struct{}, 1),
		asWanted: map[metrics.Artifact]bool{}, unsynced: map[string]bool{}, rewrites: map[metrics.Artifact]*rewrites{},
	}
}

// Update changes the settings in the stanza. Run writes them.
func (i *Installation) Update(stanza cniconf.Stanza) {
	i.change(func(w *cniconf.Want) { w.Stanza = stanza })
}

// DropIns sets whether the node's runtime loads drop-in files, which decides in mode auto.
func (i *Installation) DropIns(known cniconf.Support) {
	i.change(func(w *cniconf.Want) { w.DropIns = known })
}

func (i *Installation) change(change func(*cniconf.Want)) {
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

// WaitingError is an installation that goes on by itself as soon as something is there.
type WaitingError struct{ For string }

func (e *WaitingError) Error() string { return e.For }

// Reconcile compares the node with what is wanted and makes it so: program, kubeconfig, configuration, each of them
// whatever became of the others, but no stanza is inserted before there are a program and a kubeconfig: it would stop
// every pod of the node. What is there already stays. The error joins those of the parts; those that are a WaitingError
// need no action.
func (i *Installation) Reconcile() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.uninstalled {
		return errors.New("the plugin was uninstalled")
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
	if len(errs) == 0 && anyChanged {
		i.report.Metrics.Installed(metrics.InstallSuccess)
	}
	return oneOrAll(errs)
}

// part is one of the three things that are kept on the node.
type part struct {
	name     string
	artifact metrics.Artifact
	failure  metrics.InstallResult
	dirs     []string
	run      func() (changed bool, err error)
}

func (i *Installation) parts() []part {
	c := i.config
	return []part{
		{PartBinaries, metrics.Binary, metrics.CopyBinariesFailure, c.BinDirs, i.binaries},
		{PartKubeconfig, metrics.Kubeconfig, metrics.CreateKubeconfigFailure, []string{c.RunDir}, i.kubeconfig},
		{PartConf, metrics.Config, metrics.CreateCNIConfigFailure, []string{c.NetDir}, i.conf},
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

// oneOrAll joins errors; a single one stays what it is. A part that waits for another one that failed is left out.
func oneOrAll(errs []error) error {
	failed := slices.DeleteFunc(slices.Clone(errs), waits)
	if len(failed) == 0 && len(errs) > 0 || len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(failed...)
}

// usable reports whether a pod that meets the stanza finds what it needs.
func (i *Installation) usable() error {
	for _, dir := range i.config.BinDirs {
		if file := filepath.Join(dir, cniconf.PluginType); !executable(file) {
			return &WaitingError{For: fmt.Sprintf("waiting for the program %q before the stanza is put in", file)}
		}
	}
	if file, err := i.config.kubeconfigFile(); err != nil || !exists(file) {
		return &WaitingError{For: fmt.Sprintf("waiting for the kubeconfig %q before the stanza is put in", file)}
	}
	return nil
}

func executable(file string) bool {
	info, err := os.Stat(file)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}

// syncAgain makes durable what a try before this one changed and failed to sync.
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
	var errs []error
	for _, dir := range i.config.BinDirs {
		did, err := i.bin(dir)
		changed = changed || did
		errs = append(errs, err)
	}
	return changed, errors.Join(errs...)
}

func (i *Installation) bin(dir string) (changed bool, err error) {
	names := append([]string{cniconf.PluginType}, Links()...)
	i.sweep(dir, names...)
	for _, name := range names {
		file := filepath.Join(dir, name)
		did, err := i.programFile(name, file)
		if err != nil {
			return changed, withHint(fmt.Errorf("installing %q: %w", file, err))
		}
		if did {
			i.log.Info("installed program", slog.String("file", file))
		}
		changed = changed || did
	}
	return changed, nil
}

const programMode = 0o755

// programFile makes the program or one of its other names, unless it is not to be written.
func (i *Installation) programFile(name, file string) (changed bool, err error) {
	main := name == cniconf.PluginType
	if slices.Contains(i.config.Skip, name) || !i.config.Update && exists(file) || !i.mayWrite(metrics.Binary) {
		if main && !executable(file) {
			return false, &WaitingError{For: fmt.Sprintf("waiting for the program %q, which is not to be written", file)}
		}
		return false, nil
	}
	write := func() (err error) {
		changed, err = i.disk.Symlink(cniconf.PluginType, file)
		return err
	}
	target, _ := os.Readlink(file)
	same := target == cniconf.PluginType
	if main {
		write = func() (err error) {
			changed, err = i.disk.Copy(i.config.Source, file, programMode)
			return err
		}
		same, err = i.disk.Identical(i.config.Source, file, programMode)
	}
	if err == nil && !same {
		err = i.rewriteFile(metrics.Binary, file, write)
	}
	return changed, err
}

// mayWrite is false after the first installation when nothing is to be put back.
func (i *Installation) mayWrite(a metrics.Artifact) bool { return i.config.Reinstall || !i.asWanted[a] }

func exists(file string) bool {
	_, _, err := hostfs.ReadFile(file, 0)
	return err == nil || errors.Is(err, hostfs.ErrTooLarge)
}

// withHint adds the remedy.
func withHint(err error) error {
	if hint := hostfs.Hint(err); hint != "" {
		return fmt.Errorf("%w (%s)", err, hint)
	}
	return err
}

func errAttr(err error) slog.Attr {
	if err == nil {
		return slog.Attr{}
	}
	return slog.String("error", err.Error())
}
