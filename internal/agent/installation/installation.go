// Package installation is the plugin on a node: its program, its kubeconfig and its stanza in the CNI configuration.
//
// It promises that a node without it comes to have it, in an order in which no pod meets a stanza without a program; that
// what others change is put back; that what others own is not changed; that a crash at any instant leaves a
// configuration which the runtime can load; and that Uninstall gives the node back. What is as it should be is not
// written. It asks nobody but the node's files.
//
// It never talks to the API server, and it decides nothing about when to leave.
//
// Start at Installation.Reconcile. Run repeats it; conf.go has the configuration, cache.go the sandboxes that still need
// the program.
package installation

import (
	"bytes"
	"context"
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
	// Linger is how long the program stays after its stanza is gone, for pods that are being made just now.
	Linger time.Duration
}

// Links are the other names of the program beside it.
func Links() []string { return []string{"istio-iptables", "istio-cni-taint", "istio-cni-repair"} }

// Report is told what others should know. Every field may be nil.
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
	nudge  chan struct{}

	mu     sync.Mutex
	config Config
	// settled has the artifacts that were as wanted before, so that a difference is somebody else's doing.
	settled map[metrics.Artifact]bool
	fights  map[metrics.Artifact]*fight
	// unsynced has the parts that failed: what is as wanted in them now may not be on the disk.
	unsynced map[string]bool
	// last is what was said about the configuration, which is not repeated.
	last string
	left bool
	// credentials is the kubeconfig as it was wanted last.
	credentials []byte
	// links are the files of the configuration that are symbolic links.
	links []string
	// mounts is where the node's directories came from at the start.
	mounts map[string]string
	// dropIn is the directory of the network that has a drop-in file.
	dropIn string
}

// New makes an Installation; nothing is touched yet. A nil now is the system's clock.
func New(log *slog.Logger, disk hostfs.Disk, config Config, report Report, now func() time.Time) *Installation {
	if now == nil {
		now = time.Now //nolint:forbidigo // the clock that others are given instead of
	}
	if disk.Compared == nil {
		disk.Compared = &hostfs.Comparisons{}
	}
	return &Installation{
		log: log, disk: disk, now: now, report: report, config: config, nudge: make(chan struct{}, 1),
		settled: map[metrics.Artifact]bool{}, unsynced: map[string]bool{}, fights: map[metrics.Artifact]*fight{},
	}
}

// Update changes what the plugin is told. Run makes it so.
func (i *Installation) Update(stanza cniconf.Stanza) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if bytes.Equal(i.config.Want.Stanza.Single(), stanza.Single()) {
		return
	}
	i.config.Want.Stanza = stanza
	i.settled[metrics.Config] = false
	i.wake()
}

// DropIns says whether the node's runtime loads drop-in files, which decides in mode auto.
func (i *Installation) DropIns(known cniconf.Support) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.config.Want.DropIns = known
	i.settled[metrics.Config] = false
	i.wake()
}

func (i *Installation) wake() {
	select {
	case i.nudge <- struct{}{}:
	default:
	}
}

// WaitingError is an installation that goes on by itself as soon as something is there.
type WaitingError struct{ For string }

func (e *WaitingError) Error() string { return e.For }

// Outcome is what one comparison found.
type Outcome struct {
	// Changed are the artifacts that were written.
	Changed []metrics.Artifact
	// Again is when to compare again although nothing happened; 0 is not at all.
	Again time.Duration
}

// Reconcile compares the node with what is wanted and makes it so: program, kubeconfig, configuration, each of them
// whatever became of the others, but that no stanza is put in before there are a program and a kubeconfig: it would stop
// every pod of the node. What is there already stays. The error joins those of the parts; those that are a WaitingError
// go on by themselves.
func (i *Installation) Reconcile(ctx context.Context) (Outcome, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	var out Outcome
	if i.left {
		return out, errors.New("the installation was taken back")
	}
	var errs []error
	for _, p := range i.parts() {
		if err := i.reconcilePart(ctx, p, &out); err != nil {
			errs = append(errs, err)
		}
	}
	if len(errs) > 0 {
		return out, oneOrAll(errs)
	}
	if len(out.Changed) > 0 && i.report.Metrics != nil {
		i.report.Metrics.Installed(metrics.InstallSuccess)
	}
	return out, nil
}

// part is one of the three things that are kept on the node.
type part struct {
	name     string
	artifact metrics.Artifact
	failure  metrics.InstallResult
	run      func(context.Context) (bool, error)
}

func (i *Installation) parts() []part {
	return []part{
		{PartBinaries, metrics.Binary, metrics.CopyBinariesFailure, i.binaries},
		{PartKubeconfig, metrics.Kubeconfig, metrics.CreateKubeconfigFailure, i.kubeconfig},
		{PartConf, metrics.Config, metrics.CreateCNIConfigFailure, i.conf},
	}
}

func (i *Installation) reconcilePart(ctx context.Context, p part, out *Outcome) error {
	began := i.now()
	changed, err := p.run(ctx)
	if changed {
		out.Changed = append(out.Changed, p.artifact)
	}
	if err == nil && i.unsynced[p.name] {
		err = i.syncAgain(p.name)
	}
	if err == nil {
		i.succeeded(p.name, p.artifact, changed, began)
		return nil
	}
	i.unsynced[p.name] = i.unsynced[p.name] || !waits(err)
	i.failed(p.name, p.failure, err)
	if again := i.again(p.artifact); again > 0 && (out.Again == 0 || again < out.Again) {
		out.Again = again
	}
	return err
}

// oneOrAll joins errors; a single one stays what it is. The last one waits for those before it, and is no news then.
func oneOrAll(errs []error) error {
	if len(errs) == 1 {
		return errs[0]
	}
	var kept []error
	for _, err := range errs {
		if !waits(err) {
			kept = append(kept, err)
		}
	}
	if len(kept) == 0 {
		return errs[0]
	}
	return errors.Join(kept...)
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
func (i *Installation) syncAgain(part string) error {
	dirs := map[string][]string{
		PartBinaries: i.config.BinDirs, PartKubeconfig: {i.config.RunDir}, PartConf: {i.config.NetDir},
	}[part]
	for _, dir := range dirs {
		if err := i.disk.SyncDir(dir); err != nil {
			return withHint(err)
		}
	}
	delete(i.unsynced, part)
	return nil
}

func (i *Installation) failed(part string, result metrics.InstallResult, err error) {
	if i.report.Health != nil {
		i.report.Health.NotReady(part, err.Error())
	}
	var waiting *WaitingError
	var fighting *fightError
	if i.report.Metrics == nil || errors.As(err, &waiting) || errors.As(err, &fighting) {
		return
	}
	if part == PartKubeconfig && errors.Is(err, errServiceAccount) {
		result = metrics.ReadServiceAccountFailure
	}
	i.report.Metrics.Installed(result)
}

func (i *Installation) succeeded(part string, a metrics.Artifact, changed bool, began time.Time) {
	if changed && i.settled[a] && i.report.Metrics != nil {
		i.report.Metrics.Healed(a, i.now().Sub(began))
	}
	i.settled[a] = true
	if i.report.Health != nil {
		i.report.Health.Ready(part)
	}
}

// binaries copies the program and links its other names to it.
func (i *Installation) binaries(context.Context) (bool, error) {
	var errs []error
	changed := false
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

// programFile makes the program or one of its other names, unless it is not to be written.
func (i *Installation) programFile(name, file string) (bool, error) {
	main := name == cniconf.PluginType
	leave := slices.Contains(i.config.Skip, name) || !i.config.Update && exists(file) || !i.mayWrite(metrics.Binary)
	switch {
	case leave && main && !executable(file):
		return false, &WaitingError{For: fmt.Sprintf("waiting for the program %q, which is not to be written", file)}
	case leave:
		return false, nil
	case main:
		return i.guarded(metrics.Binary, func() (bool, error) { return i.copyProgram(file) })
	}
	return i.guarded(metrics.Binary, func() (bool, error) { return i.link(file) })
}

const programMode = 0o755

func (i *Installation) copyProgram(file string) (bool, error) {
	same, err := i.disk.Identical(i.config.Source, file, programMode)
	if err == nil && same {
		return false, nil
	}
	if err := i.contendOver(metrics.Binary, file); err != nil {
		return false, err
	}
	return i.disk.Copy(i.config.Source, file, programMode)
}

func (i *Installation) link(file string) (bool, error) {
	if target, err := os.Readlink(file); err == nil && target == cniconf.PluginType {
		return false, nil
	}
	if err := i.contendOver(metrics.Binary, file); err != nil {
		return false, err
	}
	return i.disk.Symlink(cniconf.PluginType, file)
}

// guarded remembers a write for the count of fights.
func (i *Installation) guarded(a metrics.Artifact, work func() (bool, error)) (bool, error) {
	did, err := work()
	if did {
		i.wrote(a)
	}
	return did, err
}

// mayWrite is false after the first installation when nothing is to be put back.
func (i *Installation) mayWrite(a metrics.Artifact) bool { return i.config.Reinstall || !i.settled[a] }

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
