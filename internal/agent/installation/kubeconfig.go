package installation

import (
	"bytes"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"path/filepath"
	"strings"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/hostfs"
)

// Bounds of the files that are read, in bytes.
const (
	maxCredential = 1 << 20
	maxConf       = 4 << 20
)

// errServiceAccount marks an error of the service account's token or certificate authority.
var errServiceAccount = errors.New("reading the service account")

// kubeconfig writes the file that the stanza refers to.
func (i *Installation) kubeconfig() (bool, error) {
	file, err := i.config.KubeconfigFile()
	if err != nil {
		return false, err
	}
	text, authority, err := i.kubeconfigText()
	if err != nil {
		return false, err
	}
	if !bytes.Equal(text, i.credentials) {
		i.credentials, i.asWanted[metrics.Kubeconfig] = text, false // a rotation is not another program's change
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
	i.did("wrote kubeconfig", slog.String("file", file), slog.String("server", server), slog.Int("ca_bytes", len(authority)))
	return true, nil
}

// Names in the kubeconfig for the plugin, equal in every version of Istio.
const (
	clusterName = "local"
	userName    = "istio-cni"
	contextName = "istio-cni-context"
)

// kubeconfigText returns the file's content for the present credentials, and the certificate authority in it.
func (i *Installation) kubeconfigText() (text, authority []byte, err error) {
	if i.config.CA != "" {
		if authority, _, err = hostfs.ReadFile(i.config.CA, maxCredential); err != nil {
			return nil, nil, serviceAccount(err)
		}
	}
	token, _, err := hostfs.ReadFile(i.config.Token, maxCredential)
	if err != nil {
		return nil, nil, serviceAccount(err)
	}
	if text, err = encodeKubeconfig(i.config.Server, i.config.CA == "", authority, token); err != nil {
		return nil, nil, fmt.Errorf("making the kubeconfig: %w", err)
	}
	return text, authority, nil
}

// encodeKubeconfig encodes a kubeconfig for the plugin and kubectl, with authority and token inline. White space around the
// token is trimmed: kubectl would send it, and the API server would reject the token. An error never holds the token.
func encodeKubeconfig(server kube.Address, skipVerify bool, authority, token []byte) ([]byte, error) {
	at, err := server.URL()
	trimmed := strings.TrimSpace(string(token))
	switch {
	case err != nil:
		return nil, err
	case !skipVerify && !x509.NewCertPool().AppendCertsFromPEM(authority):
		return nil, errors.New("the authority holds no certificate in PEM")
	case trimmed == "":
		return nil, errors.New("the token is empty")
	case strings.ContainsFunc(trimmed, func(r rune) bool { return r <= ' ' || r > '~' }):
		return nil, errors.New("the token holds a character that no token has: the file is damaged")
	}
	config := clientcmdapi.NewConfig()
	config.Clusters[clusterName] = &clientcmdapi.Cluster{
		Server: at.String(), InsecureSkipTLSVerify: skipVerify, CertificateAuthorityData: authority,
	}
	config.AuthInfos[userName] = &clientcmdapi.AuthInfo{Token: trimmed}
	config.Contexts[contextName] = &clientcmdapi.Context{Cluster: clusterName, AuthInfo: userName}
	config.CurrentContext = contextName
	return clientcmd.Write(*config)
}

// serviceAccount wraps the error of a service account file; an absent file is a WaitingError: the kubelet writes it.
func serviceAccount(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return &WaitingError{For: fmt.Sprintf("waiting for the service account: %v", err)}
	}
	return fmt.Errorf("%w: %w", errServiceAccount, err)
}

// KubeconfigFile returns the path of the stanza's kubeconfig as this process sees it. An error means settings that no node
// can meet.
func (c Config) KubeconfigFile() (string, error) {
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

func within(file, dir string) bool {
	return strings.HasPrefix(filepath.Clean(file), filepath.Clean(dir)+"/")
}

// dropOldKubeconfig removes the kubeconfig that versions before 1.23 wrote into the configuration directory.
func (c confDir) dropOldKubeconfig() error {
	file, err := c.config.KubeconfigFile()
	if err != nil || filepath.Clean(file) == filepath.Clean(c.oldKubeconfig()) {
		return err
	}
	return c.remove(c.oldKubeconfig())
}

// oldKubeconfig returns the path of the kubeconfig of versions before 1.23: the configured path only in the configured directory.
func (c confDir) oldKubeconfig() string {
	if c.path == c.config.NetDir || c.config.OldKubeconfig == "" {
		return c.config.OldKubeconfig
	}
	return filepath.Join(c.path, filepath.Base(c.config.OldKubeconfig))
}
