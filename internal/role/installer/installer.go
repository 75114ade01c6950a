package installer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/installation"
	"github.com/meshcni/istio-cni/internal/agent/selector"
	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// maxTemplate bounds a template and other files of the configuration.
const maxTemplate = 1 << 20

// linger is how long the program stays on the node after its stanza: the runtimes take a configuration up within a second,
// and a pod that is being made has read the old one.
const linger = 2 * time.Second

// Run is the role. It ends when the work is done or, for the agent, when it is told to.
func Run(c applet.Call) int {
	return service.Run(c, "install", help, func() (service.Service, error) {
		in, err := parse(c.Args, systemEnvironment(c))
		if err != nil {
			return service.Service{}, err
		}
		cfg, err := in.config()
		if err == nil && cfg.Install && cfg.Action != Uninstall {
			err = cfg.installationConfig().Check()
		}
		if err != nil {
			return service.Service{}, err
		}
		log := logger(c.Stderr, cfg.Log)
		return service.Service{
			Config: cfg, Warnings: cfg.Warnings, Log: log,
			Work: func(ctx context.Context) error { return act(ctx, c, in, cfg, log) },
		}, nil
	})
}

// systemEnvironment is what the configuration is read from outside of tests.
func systemEnvironment(c applet.Call) environment {
	return environment{
		getenv: c.Getenv,
		readFile: func(file string) ([]byte, error) {
			text, _, err := hostfs.ReadFile(file, maxTemplate)
			return text, err
		},
		hostname: os.Hostname, executable: os.Executable, selectors: selector.Enablement,
	}
}

func logger(w io.Writer, l Log) *slog.Logger {
	options := &slog.HandlerOptions{Level: slog.Level(l.Agent)}
	if l.JSON {
		return slog.New(slog.NewJSONHandler(w, options))
	}
	return slog.New(slog.NewTextHandler(w, options))
}

func act(ctx context.Context, c applet.Call, in input, cfg Config, log *slog.Logger) error {
	switch {
	case cfg.DryRun:
		return dryRun(c.Stdout, cfg, log)
	case cfg.Action == Once:
		return once(ctx, cfg, log)
	case cfg.Action == Uninstall:
		return uninstall(ctx, cfg, log)
	}
	return stay(ctx, in, cfg, log)
}

// installationConfig is what the installation needs of the configuration.
func (c Config) installationConfig() installation.Config {
	mode, _ := cniconf.ParseMode(string(c.Conf.Mode)) // one of the same words
	out := installation.Config{
		Source: c.Binaries.Source, BinDirs: c.Binaries.Dirs, Skip: c.Binaries.Skip, Update: c.Binaries.Update, Reinstall: c.Reinstall,
		NetDir: c.Conf.Dir, HostNetDir: c.Conf.HostDir, RunDir: c.RunDir, RunDirMode: c.RunDirMode,
		Want: cniconf.Want{
			Mode: mode, Stanza: c.Stanza, ConfName: c.Conf.Name, OwnedName: c.Conf.OwnedName, FileMode: uint32(c.Conf.FileMode),
		},
		Server: kube.Address{Protocol: c.Kubeconfig.Protocol, Host: c.Kubeconfig.Host, Port: fmt.Sprint(c.Kubeconfig.Port)},
		Token:  c.Kubeconfig.Token(), CA: c.Kubeconfig.CA(), KubeconfigMode: c.Kubeconfig.Mode,
		OldKubeconfig: c.Kubeconfig.Historic,
		HostRoots:     c.HostRoots, CacheDir: c.Conf.CacheDir, Linger: linger,
	}
	if c.Kubeconfig.SkipTLSVerify {
		out.CA = ""
	}
	return out
}

// dryRun prints what the installation would do.
func dryRun(w io.Writer, cfg Config, log *slog.Logger) error {
	i := installation.New(log, hostfs.Disk{}, cfg.installationConfig(), installation.Report{}, nil)
	plan := i.Plan
	if cfg.Action == Uninstall {
		plan = i.PlanUninstall
	}
	lines, err := plan()
	if len(lines) == 0 && err == nil {
		lines = []string{"nothing to do"}
	}
	_, _ = fmt.Fprintln(w, strings.Join(lines, "\n"))
	return err
}

// alone makes sure that no agent works on the node at the same time.
func alone(cfg Config) (*hostfs.FileLock, error) {
	if err := (hostfs.Disk{}).MkdirAll(cfg.RunDir, cfg.RunDirMode); err != nil {
		return nil, remedied(err)
	}
	// The kubelet makes the directory of a volume readable for everybody, and it is to hold sockets and a token.
	if info, err := os.Stat(cfg.RunDir); err == nil && info.Mode().Perm() != cfg.RunDirMode.Perm() {
		if err := os.Chmod(cfg.RunDir, cfg.RunDirMode); err != nil {
			return nil, remedied(fmt.Errorf("setting the mode of the run directory: %w", err))
		}
	}
	return hostfs.Lock(lockFile(cfg))
}

// forget removes what is in the run directory besides the installation: the self-test's verdict, a socket that a killed
// agent left, and the lock.
func forget(cfg Config) error {
	var errs []error
	for _, file := range []string{cfg.verdictFile(), cfg.podSocket(), lockFile(cfg)} {
		errs = append(errs, (hostfs.Disk{}).Remove(file))
	}
	return errors.Join(errs...)
}

func lockFile(cfg Config) string { return cfg.RunDir + "/install.lock" }

func remedied(err error) error {
	if hint := hostfs.Hint(err); hint != "" {
		return fmt.Errorf("%w (%s)", err, hint)
	}
	return err
}

// once installs and ends. It waits for what comes by itself, as an init container must, and for nothing else.
func once(ctx context.Context, cfg Config, log *slog.Logger) error {
	if !cfg.Install {
		log.InfoContext(ctx, "nothing is installed (CNI_ENABLE_INSTALL=false)")
		return nil
	}
	held, err := alone(cfg)
	if err != nil {
		return fmt.Errorf("another node agent is at work here: %w", err)
	}
	defer func() { _ = held.Close() }()
	i := installation.New(log, hostfs.Disk{}, cfg.installationConfig(), installation.Report{}, nil)
	if err := i.Until(ctx); err != nil {
		return err
	}
	log.InfoContext(ctx, "installed")
	return nil
}

// uninstall gives the node back by hand.
func uninstall(ctx context.Context, cfg Config, log *slog.Logger) error {
	held, err := alone(cfg)
	if busy := (*hostfs.HeldError)(nil); errors.As(err, &busy) {
		return fmt.Errorf("a node agent is at work here and would install again: %w", err)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.EROFS) {
		return err
	}
	i := installation.New(log, hostfs.Disk{}, cfg.installationConfig(), installation.Report{}, nil)
	_, err = i.Uninstall(ctx)
	if held != nil {
		err = errors.Join(err, held.Close(), forget(cfg))
	}
	if err == nil {
		log.InfoContext(ctx, "the node is given back")
	}
	return err
}
