package kube

import (
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// maxFile bounds every file that is read here: a kubeconfig, a token, a certificate.
const maxFile = 1 << 20

// readKubeconfig reads a kubeconfig by client-go's rules, and gives its content as well. No error repeats a credential.
func readKubeconfig(file string) (*rest.Config, []byte, error) {
	content, err := readFile(file)
	if err != nil {
		return nil, nil, err
	}
	parsed, err := clientcmd.Load(content)
	if err != nil {
		return nil, nil, errNoConfig // the cause may repeat the file, tokens included
	}
	if parsed.Contexts[parsed.CurrentContext] == nil {
		return nil, nil, fmt.Errorf("there is no context %q, which current-context names", parsed.CurrentContext)
	}
	for _, cluster := range parsed.Clusters {
		cluster.LocationOfOrigin = file // relative paths are relative to the kubeconfig, as for kubectl
		if _, err = url.Parse(cluster.ProxyURL); err != nil {
			return nil, nil, errors.New("the proxy-url is not a URL that can be used")
		}
	}
	for _, user := range parsed.AuthInfos {
		user.LocationOfOrigin = file
	}
	if err = clientcmd.ResolveLocalPaths(parsed); err != nil {
		return nil, nil, err
	}
	config, err := clientcmd.NewDefaultClientConfig(*parsed, nil).ClientConfig()
	switch {
	case err != nil:
		return nil, nil, err
	case config.ExecProvider != nil || config.AuthProvider != nil:
		return nil, nil, errors.New("the user wants a credential plugin (exec, auth-provider), which is not supported here: " +
			"use token, tokenFile or a client certificate")
	}
	config.BearerToken = strings.TrimSpace(config.BearerToken) // it may be of a file
	return config, content, checkToken(config.BearerToken)
}

// errNoConfig is a file that client-go cannot decode.
var errNoConfig = errors.New("decoding: it is not a Config of v1 in YAML in which each name stands once")

// inline reads the files of a configuration into it, but for the token file, which client-go reads again each minute. It gives the
// content of all. A file that is named but empty is an error: without an authority the system's would be trusted.
func inline(config *rest.Config) (content []byte, err error) {
	var token []byte
	tokenFile := config.BearerTokenFile
	for _, one := range []struct {
		key  string
		file *string
		data *[]byte
	}{
		{"certificate-authority", &config.CAFile, &config.CAData},
		{"client-certificate", &config.CertFile, &config.CertData},
		{"client-key", &config.KeyFile, &config.KeyData},
		{"tokenFile", &tokenFile, &token},
	} {
		if *one.file == "" {
			continue
		}
		data, err := readFile(*one.file)
		if err != nil {
			return nil, fmt.Errorf("reading %s %q: %w", one.key, *one.file, err)
		}
		*one.file, *one.data = "", data
		content = append(content, data...)
	}
	return content, checkToken(strings.TrimSpace(string(token)))
}

// checkToken refuses a character that no token has.
func checkToken(token string) error {
	if strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return errors.New("the token holds a character that no token has: the file is damaged")
	}
	return nil
}

// errEmptyFile is what a power loss in the middle of a write leaves behind.
var errEmptyFile = errors.New("the file is empty")

func readFile(name string) ([]byte, error) {
	file, err := os.Open(filepath.Clean(name))
	if err != nil {
		return nil, err
	}
	defer file.Close() //nolint:errcheck // only read from
	data, err := io.ReadAll(io.LimitReader(file, maxFile+1))
	switch {
	case err != nil:
		return nil, err
	case len(data) > maxFile:
		return nil, fmt.Errorf("the file is larger than %d bytes", maxFile)
	case strings.TrimSpace(string(data)) == "":
		return nil, errEmptyFile
	}
	return data, nil
}

// Names in the kubeconfig for the plugin, as in every version of the reference.
const (
	clusterName = "local"
	userName    = "istio-cni"
	contextName = "istio-cni-context"
)

// Address is where the API server listens, as the kubelet tells every container in KUBERNETES_SERVICE_PROTOCOL, _HOST
// and _PORT.
type Address struct {
	// Protocol is https or http; empty means https.
	Protocol string
	// Host is a name or an IP address; brackets around the latter may be there or not.
	Host string
	// Port is a number from 1 to 65535.
	Port string
}

// What an address lacks, outside of a cluster above all.
var (
	ErrNoHost = errors.New("the API server's host (KUBERNETES_SERVICE_HOST) is not set")
	ErrNoPort = errors.New("the API server's port (KUBERNETES_SERVICE_PORT) is not set")
)

// URL is the address with an IPv6 host in brackets. An empty host is [ErrNoHost], which is found before an empty port,
// [ErrNoPort].
func (a Address) URL() (*url.URL, error) {
	switch {
	case a.Host == "":
		return nil, ErrNoHost
	case a.Port == "":
		return nil, ErrNoPort
	case a.Protocol != "" && a.Protocol != "https" && a.Protocol != "http":
		return nil, fmt.Errorf("the API server's protocol %q is neither https nor http", a.Protocol)
	}
	host := a.Host
	if inner, found := strings.CutPrefix(host, "["); found {
		host = strings.TrimSuffix(inner, "]")
	}
	if address, err := netip.ParseAddr(host); (err != nil || address.Zone() != "") && !validName(strings.ToLower(host)) {
		return nil, fmt.Errorf("the API server's host %q is neither a name nor an address", a.Host)
	}
	if port, err := strconv.ParseUint(a.Port, 10, 16); err != nil || port == 0 {
		return nil, fmt.Errorf("the API server's port %q is not a number from 1 to 65535", a.Port)
	}
	scheme := "https"
	if a.Protocol != "" {
		scheme = a.Protocol
	}
	return &url.URL{Scheme: scheme, Host: net.JoinHostPort(host, a.Port)}, nil
}

// Trust is how the API server proves itself: by an authority, or not at all.
type Trust struct {
	// CA is the authority's certificates in PEM.
	CA []byte
	// SkipVerify accepts any server's certificate; CA is left out then.
	SkipVerify bool
}

// KubeconfigText is the kubeconfig by which the plugin reaches the API server: what [NewClient] and kubectl read, with
// authority and token inside. The token is taken as it is, but for a line break or blanks around it: kubectl would
// send those along and be refused. An error never holds the token.
func KubeconfigText(server Address, trust Trust, token []byte) ([]byte, error) {
	at, err := server.URL()
	if err != nil {
		return nil, err
	}
	cluster := clientcmdapi.NewCluster()
	cluster.Server, cluster.InsecureSkipTLSVerify = at.String(), trust.SkipVerify
	if !trust.SkipVerify {
		if !x509.NewCertPool().AppendCertsFromPEM(trust.CA) {
			return nil, errors.New("the authority holds no certificate in PEM")
		}
		cluster.CertificateAuthorityData = trust.CA
	}
	user := clientcmdapi.NewAuthInfo()
	user.Token = strings.TrimSpace(string(token))
	if err = checkToken(user.Token); err != nil {
		return nil, err
	}
	if user.Token == "" {
		return nil, errors.New("the token is empty")
	}
	here := clientcmdapi.NewContext()
	here.Cluster, here.AuthInfo = clusterName, userName
	config := clientcmdapi.NewConfig()
	config.Clusters[clusterName], config.AuthInfos[userName], config.Contexts[contextName] = cluster, user, here
	config.CurrentContext = contextName
	return clientcmd.Write(*config)
}
