package installation

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"path/filepath"
	"strings"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// Bounds of what is read.
const (
	maxCredential = 1 << 20
	maxConf       = 4 << 20
)

// errServiceAccount marks what is wrong with token or authority.
var errServiceAccount = errors.New("reading the service account")

// kubeconfig writes the file where the stanza sends the plugin to look for it.
func (i *Installation) kubeconfig() (bool, error) {
	file, err := i.config.kubeconfigFile()
	if err != nil {
		return false, err
	}
	text, trust, err := i.kubeconfigText()
	if err != nil {
		return false, err
	}
	if !bytes.Equal(text, i.credentials) {
		i.credentials, i.asWanted[metrics.Kubeconfig] = text, false // a rotation is not the work of another program
	}
	if err = i.disk.MkdirAll(i.config.RunDir, i.config.RunDirMode); err != nil {
		return false, withHint(err)
	}
	i.sweep(filepath.Dir(file), filepath.Base(file))
	now, mode, err := hostfs.ReadFile(file, maxCredential)
	if err == nil && bytes.Equal(now, text) && mode.Perm() == i.config.KubeconfigMode {
		return false, nil
	}
	write := func() error { return withHint(i.disk.WriteFile(file, text, i.config.KubeconfigMode)) }
	if err := i.rewriteFile(metrics.Kubeconfig, file, write); err != nil {
		return false, err
	}
	server := net.JoinHostPort(i.config.Server.Host, i.config.Server.Port)
	i.log.Info("wrote kubeconfig", slog.String("file", file), slog.String("server", server),
		slog.Int("ca_bytes", len(trust.CA)))
	return true, nil
}

// kubeconfigText is the file's content for the credentials as they are now.
func (i *Installation) kubeconfigText() (text []byte, trust kube.Trust, err error) {
	trust.SkipVerify = i.config.CA == ""
	if !trust.SkipVerify {
		if trust.CA, _, err = hostfs.ReadFile(i.config.CA, maxCredential); err != nil {
			return nil, trust, serviceAccount(err)
		}
	}
	token, _, err := hostfs.ReadFile(i.config.Token, maxCredential)
	if err != nil {
		return nil, trust, serviceAccount(err)
	}
	text, err = kube.KubeconfigText(i.config.Server, trust, token)
	if err != nil {
		return nil, trust, fmt.Errorf("making the kubeconfig: %w", err)
	}
	return text, trust, nil
}

// serviceAccount says what is missing; the kubelet brings it.
func serviceAccount(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return &WaitingError{For: fmt.Sprintf("waiting for the service account: %v", err)}
	}
	return fmt.Errorf("%w: %w", errServiceAccount, err)
}

// kubeconfigFile is where the plugin looks, as this process sees it.
func (c Config) kubeconfigFile() (string, error) {
	conf, err := cniconf.Parse(c.Want.Stanza.Single())
	if err != nil {
		return "", err
	}
	switch file := conf.Kubeconfig; {
	case within(file, c.RunDir):
		return file, nil
	case within(file, c.HostNetDir):
		return filepath.Join(c.NetDir, strings.TrimPrefix(file, c.HostNetDir)), nil
	default:
		return "", fmt.Errorf("the stanza sends the plugin to %q for its kubeconfig, which is neither in the run directory %q nor in the "+
			"configuration directory %q", file, c.RunDir, c.HostNetDir)
	}
}

// Check reports what cannot work whatever the node is like.
func (c Config) Check() error {
	_, err := c.kubeconfigFile()
	return err
}

func within(file, dir string) bool {
	return strings.HasPrefix(filepath.Clean(file), filepath.Clean(dir)+"/")
}

// dropOldKubeconfig removes what versions before 1.23 left in the configuration directory.
func (i *Installation) dropOldKubeconfig() error {
	old := i.config.OldKubeconfig
	if file, err := i.config.kubeconfigFile(); old == "" || err != nil || filepath.Clean(file) == filepath.Clean(old) || !exists(old) {
		return err
	}
	if err := i.disk.Remove(old); err != nil {
		return withHint(err)
	}
	i.log.Info("removed the kubeconfig of an older version", slog.String("file", old))
	return nil
}
