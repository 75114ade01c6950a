package kube

import (
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/client-go/transport"
	"sigs.k8s.io/yaml"
)

// maxFile bounds every file that is read here: a kubeconfig, a token, a certificate.
const maxFile = 1 << 20

// The kubeconfig's wire form, cut down to what leads to one server. Names and meaning are those of
// k8s.io/client-go/tools/clientcmd/api/v1; a test holds the outcome to clientcmd's own.
type (
	wireConfig struct {
		Kind           string        `json:"kind"`
		APIVersion     string        `json:"apiVersion"`
		CurrentContext string        `json:"current-context"`
		Contexts       []wireContext `json:"contexts"`
		Clusters       []wireCluster `json:"clusters"`
		Users          []wireUser    `json:"users"`
	}
	wireContext struct {
		Name    string `json:"name"`
		Context struct {
			Cluster string `json:"cluster"`
			User    string `json:"user"`
		} `json:"context"`
	}
	wireCluster struct {
		Name    string  `json:"name"`
		Cluster cluster `json:"cluster"`
	}
	wireUser struct {
		Name string `json:"name"`
		User user   `json:"user"`
	}
	cluster struct {
		Server        string `json:"server"`
		TLSServerName string `json:"tls-server-name"`
		Insecure      bool   `json:"insecure-skip-tls-verify"`
		CAFile        string `json:"certificate-authority"`
		CAData        []byte `json:"certificate-authority-data"`
		ProxyURL      string `json:"proxy-url"`
	}
	user struct {
		CertFile     string              `json:"client-certificate"`
		CertData     []byte              `json:"client-certificate-data"`
		KeyFile      string              `json:"client-key"`
		KeyData      []byte              `json:"client-key-data"`
		Token        string              `json:"token"`
		TokenFile    string              `json:"tokenFile"`
		Username     string              `json:"username"`
		Password     string              `json:"password"`
		As           string              `json:"as"`
		AsUID        string              `json:"as-uid"`
		AsGroups     []string            `json:"as-groups"`
		AsExtra      map[string][]string `json:"as-user-extra"`
		AuthProvider any                 `json:"auth-provider"`
		Exec         any                 `json:"exec"`
	}
)

func (c wireContext) named() string { return c.Name }
func (c wireCluster) named() string { return c.Name }
func (u wireUser) named() string    { return u.Name }

// settings is all that a kubeconfig says about reaching one server, with every file it names already read: so an
// unreadable file is an error that names it, and no background reloading is started for a process that asks once.
// Two equal settings give interchangeable connections.
type settings struct {
	server    *url.URL
	proxy     *url.URL // nil: the environment's, as everywhere in client-go
	transport transport.Config
}

// loadSettings reads a kubeconfig file. Every error is a [ConfigError].
func loadSettings(file string) (settings, error) {
	loaded, err := readSettings(file)
	if err != nil {
		return settings{}, &ConfigError{File: file, Err: err}
	}
	return loaded, nil
}

func readSettings(file string) (settings, error) {
	data, err := readFile(file)
	if err != nil {
		return settings{}, err
	}
	chosen, who, err := parseKubeconfig(data)
	if err != nil {
		return settings{}, err
	}
	// Relative paths are relative to the kubeconfig, as for kubectl.
	return settle(chosen, who, filepath.Dir(file))
}

// settle reads the files that a cluster and a user name, those with a relative path in dir.
func settle(chosen cluster, who user, dir string) (settings, error) {
	var err error
	result := settings{}
	if result.server, err = parseServer(chosen.Server); err != nil {
		return settings{}, err
	}
	if result.proxy, err = parseProxy(chosen.ProxyURL); err != nil {
		return settings{}, err
	}
	result.transport.UserAgent = userAgent
	// Impersonation does not depend on TLS, credentials do: as kubectl, none is sent in clear.
	if err := who.impersonate(&result.transport); err != nil {
		return settings{}, err
	}
	if result.server.Scheme != "https" {
		return result, nil
	}
	if err := chosen.trust(&result.transport, dir); err != nil {
		return settings{}, err
	}
	if err := who.authenticate(&result.transport, dir); err != nil {
		return settings{}, err
	}
	return result, nil
}

// parseKubeconfig follows the current context to its cluster and user.
func parseKubeconfig(data []byte) (cluster, user, error) {
	var config wireConfig
	if err := yaml.Unmarshal(data, &config); err != nil {
		return cluster{}, user{}, fmt.Errorf("decoding YAML: %w", err)
	}
	if (config.Kind != "" && config.Kind != "Config") || (config.APIVersion != "" && config.APIVersion != "v1") {
		return cluster{}, user{}, fmt.Errorf("the file is a %q of %q, not a Config of v1", config.Kind, config.APIVersion)
	}
	if config.CurrentContext == "" {
		return cluster{}, user{}, errors.New("no current-context is set")
	}
	current, err := only("context", config.CurrentContext, config.Contexts)
	if err != nil {
		return cluster{}, user{}, err
	}
	chosen, err := only("cluster", current.Context.Cluster, config.Clusters)
	if err != nil {
		return cluster{}, user{}, err
	}
	if chosen.Cluster.Server == "" {
		return cluster{}, user{}, fmt.Errorf("cluster %q has no server", chosen.Name)
	}
	who, err := only("user", current.Context.User, config.Users)
	if err != nil {
		return cluster{}, user{}, err
	}
	return chosen.Cluster, who.User, nil
}

// only finds the one entry of a name; two of them are an error because either could be meant.
func only[T interface{ named() string }](kind, name string, entries []T) (T, error) {
	var found []T
	for _, entry := range entries {
		if entry.named() == name {
			found = append(found, entry)
		}
	}
	switch {
	case name == "":
		return *new(T), fmt.Errorf("the context names no %s", kind)
	case len(found) == 0:
		return *new(T), fmt.Errorf("there is no %s %q", kind, name)
	case len(found) > 1:
		return *new(T), fmt.Errorf("there is more than one %s %q", kind, name)
	}
	return found[0], nil
}

// parseServer accepts a URL, or host and port, which means plain HTTP as it does to kubectl. What cannot be parsed is
// not repeated: a password may stand in it.
func parseServer(text string) (*url.URL, error) {
	server, err := url.Parse(text)
	if err != nil || server.Scheme == "" || server.Host == "" {
		if strings.Contains(text, "://") {
			return nil, errors.New("the server is not a URL")
		}
		if server, err = url.Parse("http://" + text); err != nil || (server.Path != "" && server.Path != "/") {
			return nil, errors.New("the server is neither a URL nor a host and port")
		}
	}
	if server.Scheme != "http" && server.Scheme != "https" {
		return nil, fmt.Errorf("the server's scheme %q is neither http nor https", server.Scheme)
	}
	server.RawQuery, server.Fragment = "", ""
	return server, nil
}

// parseProxy accepts what kubectl accepts; nil stands for none given.
func parseProxy(text string) (*url.URL, error) {
	if text == "" {
		return nil, nil //nolint:nilnil // absence is a value here
	}
	proxy, err := url.Parse(text)
	if err != nil {
		return nil, errors.New("proxy-url is not a URL")
	}
	switch proxy.Scheme {
	case "http", "https", "socks5":
		return proxy, nil
	}
	return nil, fmt.Errorf("the scheme %q of proxy-url is not http, https or socks5", proxy.Scheme)
}

// trust sets how the server proves itself.
func (c *cluster) trust(config *transport.Config, dir string) error {
	authority, err := dataOrFile("certificate-authority", c.CAData, c.CAFile, dir)
	if err != nil {
		return err
	}
	config.TLS.CAData = authority
	config.TLS.Insecure = c.Insecure
	config.TLS.ServerName = c.TLSServerName
	return nil
}

func (u *user) impersonate(config *transport.Config) error {
	if u.As == "" && (u.AsUID != "" || len(u.AsGroups) > 0 || len(u.AsExtra) > 0) {
		return errors.New("as-uid, as-groups and as-user-extra need as")
	}
	config.Impersonate = transport.ImpersonationConfig{UserName: u.As, UID: u.AsUID, Groups: u.AsGroups, Extra: u.AsExtra}
	return nil
}

// authenticate sets how the client proves itself.
func (u *user) authenticate(config *transport.Config, dir string) error {
	if u.Exec != nil || u.AuthProvider != nil {
		return errors.New("the user wants a credential plugin (exec, auth-provider), which is not supported here: " +
			"use token, tokenFile or a client certificate")
	}
	var err error
	if config.TLS.CertData, err = dataOrFile("client-certificate", u.CertData, u.CertFile, dir); err != nil {
		return err
	}
	if config.TLS.KeyData, err = dataOrFile("client-key", u.KeyData, u.KeyFile, dir); err != nil {
		return err
	}
	if (config.TLS.CertData == nil) != (config.TLS.KeyData == nil) {
		return errors.New("client-certificate and client-key need each other")
	}
	if config.BearerToken, err = u.bearer(dir); err != nil {
		return err
	}
	config.Username, config.Password = u.Username, u.Password
	if config.BearerToken != "" && config.HasBasicAuth() {
		return errors.New("the user has both a token and a username")
	}
	return nil
}

// bearer is the token. That of tokenFile, when it can be read, comes before the one in the kubeconfig.
func (u *user) bearer(dir string) (string, error) {
	token := strings.TrimSpace(u.Token)
	if u.TokenFile != "" {
		data, err := dataOrFile("tokenFile", nil, u.TokenFile, dir)
		if err != nil && token == "" {
			return "", err
		}
		if err == nil {
			token = strings.TrimSpace(string(data))
		}
	}
	return tokenText(token)
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

// dataOrFile prefers the inline data. A file that is named but empty is an error: without an authority the system's
// would be trusted, without a token the request would be anonymous.
func dataOrFile(key string, data []byte, file, dir string) ([]byte, error) {
	if len(data) > 0 || file == "" {
		return data, nil
	}
	if !filepath.IsAbs(file) {
		file = filepath.Join(dir, file)
	}
	data, err := readFile(file)
	if err != nil {
		return nil, fmt.Errorf("reading %s %q: %w", key, file, err)
	}
	return data, nil
}

// errEmptyFile is what a power loss in the middle of a write leaves behind.
var errEmptyFile = errors.New("the file is empty")

func readFile(name string) ([]byte, error) {
	file, err := os.Open(name) //nolint:gosec // the path is the operator's
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
