package kube

import (
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"
)

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
	// SkipVerify accepts whoever answers; CA is left out then.
	SkipVerify bool
}

// The kubeconfig's written form. The encoder sorts keys, which is the order of the reference.
type (
	textConfig struct {
		APIVersion     string        `json:"apiVersion"`
		Clusters       []textCluster `json:"clusters"`
		Contexts       []textContext `json:"contexts"`
		CurrentContext string        `json:"current-context"`
		Kind           string        `json:"kind"`
		Users          []textUser    `json:"users"`
	}
	textCluster struct {
		Cluster struct {
			CAData   []byte `json:"certificate-authority-data,omitempty"`
			Insecure bool   `json:"insecure-skip-tls-verify,omitempty"`
			Server   string `json:"server"`
		} `json:"cluster"`
		Name string `json:"name"`
	}
	textContext struct {
		Context struct {
			Cluster string `json:"cluster"`
			User    string `json:"user"`
		} `json:"context"`
		Name string `json:"name"`
	}
	textUser struct {
		Name string `json:"name"`
		User struct {
			Token string `json:"token"`
		} `json:"user"`
	}
)

// KubeconfigText is the kubeconfig by which the plugin reaches the API server: what [NewClient] and kubectl read, with
// authority and token inside. The token is taken as it is, but for a line break or blanks around it: kubectl would
// send those along and be refused. An error never holds the token.
func KubeconfigText(server Address, trust Trust, token []byte) ([]byte, error) {
	at, err := server.URL()
	if err != nil {
		return nil, err
	}
	var config textConfig
	config.APIVersion, config.Kind, config.CurrentContext = "v1", "Config", contextName
	config.Clusters = make([]textCluster, 1)
	config.Clusters[0].Name = clusterName
	config.Clusters[0].Cluster.Server = at.String()
	config.Clusters[0].Cluster.Insecure = trust.SkipVerify
	if !trust.SkipVerify {
		if err = validAuthority(trust.CA); err != nil {
			return nil, err
		}
		config.Clusters[0].Cluster.CAData = trust.CA
	}
	config.Contexts = make([]textContext, 1)
	config.Contexts[0].Name = contextName
	config.Contexts[0].Context.Cluster, config.Contexts[0].Context.User = clusterName, userName
	config.Users = make([]textUser, 1)
	config.Users[0].Name = userName
	if config.Users[0].User.Token, err = tokenText(string(token)); err != nil {
		return nil, err
	}
	if config.Users[0].User.Token == "" {
		return nil, errors.New("the token is empty")
	}
	return yaml.Marshal(config)
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

// Redacted is a kubeconfig for the log: nothing of a user but the names of what is known, the authority as a length.
// Text that is no kubeconfig is not shown at all.
func Redacted(kubeconfig []byte) []byte {
	var config map[string]any
	if err := yaml.Unmarshal(kubeconfig, &config); err != nil || config == nil {
		return fmt.Appendf(nil, "[not a kubeconfig, %d bytes]\n", len(kubeconfig))
	}
	users := hide(config["users"], "user", func(string, any) any { return "[redacted]" })
	clusters := hide(config["clusters"], "cluster", func(key string, value any) any {
		text, isText := value.(string)
		switch {
		case key == "certificate-authority-data" && isText:
			return fmt.Sprintf("[%d characters]", len(text))
		case (key == "server" || key == "proxy-url") && isText:
			if at, err := url.Parse(text); err == nil {
				return at.Redacted()
			}
			return "[not a URL]"
		}
		return value
	})
	text, err := yaml.Marshal(map[string]any{
		"apiVersion": config["apiVersion"], "kind": config["kind"], "current-context": config["current-context"],
		"clusters": clusters, "contexts": config["contexts"], "users": users,
	})
	if err != nil {
		return fmt.Appendf(nil, "[not a kubeconfig, %d bytes]\n", len(kubeconfig))
	}
	return text
}

// hide replaces the values under one key of each entry of a list. What is of another shape is hidden as a whole: nobody
// knows what stands in it.
func hide(list any, under string, replace func(key string, value any) any) any {
	entries, isList := list.([]any)
	if !isList {
		return "[redacted]"
	}
	for i := range entries {
		entry, isMap := entries[i].(map[string]any)
		if !isMap {
			entries[i] = "[redacted]"
			continue
		}
		for key := range entry {
			if key != "name" && key != under {
				entry[key] = "[redacted]"
			}
		}
		values, isMap := entry[under].(map[string]any)
		if !isMap && entry[under] != nil {
			entry[under] = "[redacted]"
			continue
		}
		for key, value := range values {
			values[key] = replace(key, value)
		}
	}
	return entries
}
