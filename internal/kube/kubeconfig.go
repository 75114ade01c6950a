package kube

import (
	"cmp"
	"errors"
	"fmt"
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

var errNoKubeconfig = errors.New("decoding: it is not a v1 Config in YAML with unique names")

// readKubeconfig reads a kubeconfig by client-go's rules. It also returns the content. No error contains a credential.
func readKubeconfig(file string) (*rest.Config, []byte, error) {
	content, err := readFile(file)
	if err != nil {
		return nil, nil, err
	}
	// Relative paths are relative to the kubeconfig, as for kubectl.
	parsed, err := (&clientcmd.ClientConfigLoadingRules{ExplicitPath: file}).Load()
	if err != nil {
		// The cause may quote the file, tokens included.
		return nil, nil, errNoKubeconfig
	}
	if parsed.Contexts[parsed.CurrentContext] == nil {
		return nil, nil, fmt.Errorf("there is no context %q, which current-context names", parsed.CurrentContext)
	}
	for _, cluster := range parsed.Clusters {
		if _, err = url.Parse(cluster.ProxyURL); err != nil {
			return nil, nil, errors.New("the proxy-url is not a URL that can be used")
		}
	}
	config, err := clientcmd.NewDefaultClientConfig(*parsed, nil).ClientConfig()
	switch {
	case err != nil:
		return nil, nil, err
	case config.ExecProvider != nil || config.AuthProvider != nil:
		return nil, nil, errors.New("the user has a credential plugin (exec, auth-provider), which is not supported here: " +
			"use token, tokenFile or a client certificate")
	}
	config.BearerToken = strings.TrimSpace(config.BearerToken) // a token file may end with a newline
	return config, content, nil
}

// inline reads the files of a configuration into the configuration, except the token file, which client-go reads each minute.
// It returns the content of all files. An empty file is an error because client-go would then trust the system's authorities.
func inline(config *rest.Config) (content []byte, err error) {
	tokenFile, token := config.BearerTokenFile, []byte(nil)
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
	return content, nil
}

// readFile reads a file and rejects an empty file, which a power loss during a write leaves behind, and a pipe or device, which has no end.
func readFile(name string) ([]byte, error) {
	if info, err := os.Stat(name); err == nil && !info.Mode().IsRegular() {
		return nil, errors.New("it is not a regular file")
	}
	data, err := os.ReadFile(filepath.Clean(name))
	if err == nil && strings.TrimSpace(string(data)) == "" {
		err = errors.New("the file is empty")
	}
	return data, err
}

// Address is the API server's address from the variables that the kubelet sets in each container: KUBERNETES_SERVICE_PROTOCOL,
// _HOST and _PORT.
type Address struct {
	// Protocol is https or http; empty means https.
	Protocol string
	// Host is a name or an IP address; an IP address may have brackets.
	Host string
	// Port is a number from 1 to 65535.
	Port string
}

// URL returns the address with an IPv6 host in brackets.
func (a Address) URL() (*url.URL, error) {
	switch {
	case a.Host == "":
		return nil, errors.New("the API server's host (KUBERNETES_SERVICE_HOST) is not set")
	case a.Port == "":
		return nil, errors.New("the API server's port (KUBERNETES_SERVICE_PORT) is not set")
	case a.Protocol != "" && a.Protocol != "https" && a.Protocol != "http":
		return nil, fmt.Errorf("the API server's protocol %q is neither https nor http", a.Protocol)
	}
	host := strings.TrimSuffix(strings.TrimPrefix(a.Host, "["), "]")
	if address, err := netip.ParseAddr(host); (err != nil || address.Zone() != "") && !validName(strings.ToLower(host)) {
		return nil, fmt.Errorf("the API server's host %q is neither a name nor an address", a.Host)
	}
	if port, err := strconv.ParseUint(a.Port, 10, 16); err != nil || port == 0 {
		return nil, fmt.Errorf("the API server's port %q is not a number from 1 to 65535", a.Port)
	}
	return &url.URL{Scheme: cmp.Or(a.Protocol, "https"), Host: net.JoinHostPort(host, a.Port)}, nil
}

// WithoutCredentials returns a kubeconfig for a bug report: clusters, contexts, and users with the names of files and a mark in place
// of each credential. secrets has the removed tokens and passwords. No error contains a credential.
func WithoutCredentials(text []byte, mark string) (clean []byte, secrets []string, err error) {
	parsed, err := clientcmd.Load(text)
	if err != nil {
		return nil, nil, errNoKubeconfig // the cause may quote the file
	}
	hide := func(secret string) string {
		if secret == "" {
			return ""
		}
		secrets = append(secrets, secret)
		return mark
	}
	config := clientcmdapi.NewConfig()
	config.CurrentContext = parsed.CurrentContext
	for name, c := range parsed.Contexts {
		config.Contexts[name] = &clientcmdapi.Context{Cluster: c.Cluster, AuthInfo: c.AuthInfo, Namespace: c.Namespace}
	}
	for name, c := range parsed.Clusters {
		config.Clusters[name] = &clientcmdapi.Cluster{
			Server: withoutUser(c.Server), ProxyURL: withoutUser(c.ProxyURL), TLSServerName: c.TLSServerName,
			InsecureSkipTLSVerify: c.InsecureSkipTLSVerify, CertificateAuthority: c.CertificateAuthority,
		}
	}
	for name, u := range parsed.AuthInfos {
		config.AuthInfos[name] = &clientcmdapi.AuthInfo{
			Token: hide(u.Token), Password: hide(u.Password), Username: u.Username, TokenFile: u.TokenFile,
			ClientCertificate: u.ClientCertificate, ClientKey: u.ClientKey,
		}
	}
	clean, err = clientcmd.Write(*config)
	return clean, secrets, err
}

// withoutUser returns a URL without its user and password, or "" for an invalid URL.
func withoutUser(text string) string {
	at, err := url.Parse(text)
	if err != nil {
		return ""
	}
	at.User = nil
	return at.String()
}
