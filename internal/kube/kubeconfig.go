package kube

import (
	"crypto/x509"
	"encoding/pem"
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

// readKubeconfig reads a kubeconfig by client-go's rules, and every file that it names: an unreadable one is an error that
// names it, and equal configurations are those with equal content. Every error is a [ConfigError].
func readKubeconfig(file string) (*rest.Config, error) {
	config, err := parseKubeconfig(file)
	if err == nil {
		err = inline(config)
	}
	if err != nil {
		return nil, &ConfigError{File: file, Err: err}
	}
	return config, nil
}

func parseKubeconfig(file string) (*rest.Config, error) {
	data, err := readFile(file)
	if err != nil {
		return nil, err
	}
	config, err := clientcmd.Load(data)
	if err != nil {
		return nil, errNoConfig // the cause may repeat the file, tokens included
	}
	current := config.Contexts[config.CurrentContext]
	if current == nil {
		return nil, fmt.Errorf("there is no context %q, which current-context names", config.CurrentContext)
	}
	cluster, user := config.Clusters[current.Cluster], config.AuthInfos[current.AuthInfo]
	switch {
	case cluster == nil || user == nil:
		return nil, fmt.Errorf("there is no cluster %q or no user %q, which the context %q names", current.Cluster,
			current.AuthInfo, config.CurrentContext)
	case user.Exec != nil || user.AuthProvider != nil:
		return nil, errors.New("the user wants a credential plugin (exec, auth-provider), which is not supported here: " +
			"use token, tokenFile or a client certificate")
	case user.Username != "" && user.Token+user.TokenFile != "":
		return nil, errors.New("the user has both a token and a username")
	}
	for key, text := range map[string]string{"server": cluster.Server, "proxy-url": cluster.ProxyURL} {
		// What cannot be parsed is not repeated: a password may stand in it.
		if _, err = url.Parse(text); err != nil && strings.Contains(text, "://") {
			return nil, fmt.Errorf("the %s is not a URL that can be used", key)
		}
	}
	// Relative paths are relative to the kubeconfig, as for kubectl.
	cluster.LocationOfOrigin, user.LocationOfOrigin = file, file
	if err = clientcmd.ResolveLocalPaths(config); err != nil {
		return nil, err
	}
	preferInline(cluster, user)
	here := clientcmd.NewNonInteractiveClientConfig(*config, config.CurrentContext, &clientcmd.ConfigOverrides{}, nil)
	result, err := here.ClientConfig()
	if err != nil && cluster.ProxyURL != "" && strings.Contains(err.Error(), cluster.ProxyURL) {
		return nil, errors.New("the proxy-url is not a URL that can be used")
	}
	return result, err
}

// errNoConfig is a file that client-go cannot decode.
var errNoConfig = errors.New("decoding: it is not a Config of v1 in YAML in which each name stands once")

// preferInline leaves out files whose content stands in the kubeconfig, and a token file that cannot be read when there is
// a token.
func preferInline(cluster *clientcmdapi.Cluster, user *clientcmdapi.AuthInfo) {
	for _, pair := range []struct {
		data []byte
		file *string
	}{
		{cluster.CertificateAuthorityData, &cluster.CertificateAuthority},
		{user.ClientCertificateData, &user.ClientCertificate},
		{user.ClientKeyData, &user.ClientKey},
	} {
		if len(pair.data) > 0 {
			*pair.file = ""
		}
	}
	if _, err := readFile(user.TokenFile); err != nil && user.Token != "" {
		user.TokenFile = ""
	}
}

// inline reads the files of a configuration into it. A file that is named but empty is an error: without an authority the
// system's would be trusted, without a token the request would be anonymous.
func inline(config *rest.Config) error {
	var token []byte
	for _, one := range []struct {
		key  string
		file *string
		data *[]byte
	}{
		{"certificate-authority", &config.CAFile, &config.CAData},
		{"client-certificate", &config.CertFile, &config.CertData},
		{"client-key", &config.KeyFile, &config.KeyData},
		{"tokenFile", &config.BearerTokenFile, &token},
	} {
		if *one.file == "" {
			continue
		}
		data, err := readFile(*one.file)
		if err != nil {
			return fmt.Errorf("reading %s %q: %w", one.key, *one.file, err)
		}
		*one.file, *one.data = "", data
	}
	if token != nil {
		config.BearerToken = string(token)
	}
	if (config.CertData == nil) != (config.KeyData == nil) {
		return errors.New("client-certificate and client-key need each other")
	}
	var err error
	config.BearerToken, err = tokenText(config.BearerToken)
	return err
}

// tokenText takes the blanks and line breaks from around a token and refuses those inside.
func tokenText(token string) (string, error) {
	token = strings.TrimSpace(token)
	for i := range len(token) {
		if token[i] <= ' ' || token[i] > '~' {
			return "", errors.New("the token holds a character that no token has: the file is damaged")
		}
	}
	return token, nil
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
	if address, err := netip.ParseAddr(host); (err != nil || address.Zone() != "") && !validSegment(host) {
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
		if err = validAuthority(trust.CA); err != nil {
			return nil, err
		}
		cluster.CertificateAuthorityData = trust.CA
	}
	user := clientcmdapi.NewAuthInfo()
	if user.Token, err = tokenText(string(token)); err != nil {
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

// validAuthority refuses what a reader of the kubeconfig would refuse: an authority without a certificate.
func validAuthority(authority []byte) error {
	rest := authority
	for {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			return errors.New("the authority holds no certificate in PEM")
		}
		if block.Type != "CERTIFICATE" {
			continue
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			return fmt.Errorf("parsing the authority's certificate: %w", err)
		}
		return nil
	}
}
