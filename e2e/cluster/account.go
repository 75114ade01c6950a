package cluster

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	authentication "k8s.io/api/authentication/v1"
	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientapi "k8s.io/client-go/tools/clientcmd/api"
)

// Namespace creates a namespace with the named service accounts and "default", without which the API server admits no
// pod. Existing objects are kept.
func (c *Cluster) Namespace(ctx context.Context, name string, accounts ...string) error {
	_, err := c.client.CoreV1().Namespaces().Create(ctx, &core.Namespace{ObjectMeta: meta.ObjectMeta{Name: name}}, meta.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("making namespace %q: %w", name, err)
	}
	for _, account := range append([]string{"default"}, accounts...) {
		_, err := c.client.CoreV1().ServiceAccounts(name).Create(ctx,
			&core.ServiceAccount{ObjectMeta: meta.ObjectMeta{Name: account}}, meta.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("making service account %s/%s: %w", name, account, err)
		}
	}
	return nil
}

// AccountKubeconfig requests a token of an existing service account, valid for an hour, writes a kubeconfig with it
// and returns its path.
func (c *Cluster) AccountKubeconfig(ctx context.Context, namespace, account string) (string, error) {
	seconds := int64(3600)
	request := &authentication.TokenRequest{Spec: authentication.TokenRequestSpec{ExpirationSeconds: &seconds}}
	answer, err := c.client.CoreV1().ServiceAccounts(namespace).CreateToken(ctx, account, request, meta.CreateOptions{})
	if err != nil {
		return "", fmt.Errorf("asking for a token of %s/%s: %w", namespace, account, err)
	}
	ca, err := os.ReadFile(filepath.Join(c.run.pki(), "ca.crt"))
	if err != nil {
		return "", fmt.Errorf("reading the certificate authority: %w", err)
	}
	path := filepath.Join(c.run.pki(), "account-"+namespace+"-"+account+".kubeconfig")
	return path, writeKubeconfig(path, c.address.url(), ca, &clientapi.AuthInfo{Token: answer.Status.Token})
}

// CollectLogs creates a directory and copies the logs of all servers and the audit log into it, and the logs of machines that
// have joined into directories below it.
func (c *Cluster) CollectLogs(dir string) error {
	for _, m := range c.machines {
		to := dir
		if m.number > 0 {
			to = filepath.Join(dir, m.name)
		}
		if err := m.collectLogs(to); err != nil {
			return err
		}
	}
	return nil
}

func (m *Machine) collectLogs(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("collecting logs: %w", err)
	}
	entries, err := os.ReadDir(m.run.logs())
	if err != nil {
		return fmt.Errorf("collecting logs: %w", err)
	}
	for _, entry := range entries {
		text, err := os.ReadFile(filepath.Join(m.run.logs(), entry.Name()))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, entry.Name()), text, 0o644)
		}
		if err != nil {
			return fmt.Errorf("collecting logs: %w", err)
		}
	}
	return nil
}
