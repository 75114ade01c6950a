package cluster

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientapi "k8s.io/client-go/tools/clientcmd/api"
)

// lifetime is the validity of certificates, longer than any test.
const lifetime = 48 * time.Hour

// authority signs the certificates of one cluster. It keeps the first error and does nothing after it.
type authority struct {
	// dir is where files are written.
	dir    string
	key    *ecdsa.PrivateKey
	cert   *x509.Certificate
	pem    []byte
	serial int64
	err    error
}

// controlPlane writes keys, certificates and kubeconfigs of the servers and of the administrator to dir, and the same for the
// first kubelet.
func (a *authority) controlPlane(dir string, at address) error {
	a.dir = dir
	a.issue("apiserver", &x509.Certificate{
		Subject: pkix.Name{CommonName: "kube-apiserver"}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:    []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"},
		IPAddresses: addresses("127.0.0.1", at.node(), at.node6(), serviceIP, serviceIP6),
	})
	for name, subject := range map[string]pkix.Name{
		"apiserver-kubelet": {CommonName: "kube-apiserver-kubelet-client", Organization: []string{"system:masters"}},
		"admin":             {CommonName: "e2e-admin", Organization: []string{"system:masters"}},
		"kcm":               {CommonName: "system:kube-controller-manager"},
		"scheduler":         {CommonName: "system:kube-scheduler"},
	} {
		a.client(name, subject, at.url())
	}
	a.signingKey()
	return a.kubelet(dir, NodeName, at, at.url())
}

// kubelet writes the certificates and the kubeconfig of a node's kubelet to dir.
func (a *authority) kubelet(dir, node string, at address, server string) error {
	a.dir = dir
	a.write("ca.crt", a.pem)
	a.issue("kubelet-server", &x509.Certificate{
		Subject: pkix.Name{CommonName: node}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames: []string{node, "localhost"}, IPAddresses: addresses("127.0.0.1", at.node(), at.node6()),
	})
	a.client("kubelet", pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}}, server)
	return a.err
}

// client writes a client certificate and a kubeconfig with it.
func (a *authority) client(name string, subject pkix.Name, server string) {
	cert, key := a.issue(name, &x509.Certificate{Subject: subject, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	user := &clientapi.AuthInfo{ClientCertificateData: cert, ClientKeyData: key}
	a.remember(writeKubeconfig(filepath.Join(a.dir, name+".kubeconfig"), server, a.pem, user))
}

func addresses(texts ...string) []net.IP {
	var all []net.IP
	for _, text := range texts {
		all = append(all, net.ParseIP(text))
	}
	return all
}

func newAuthority() *authority {
	a := &authority{}
	a.key, a.err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if a.err != nil {
		return a
	}
	a.cert = &x509.Certificate{
		SerialNumber: big.NewInt(0), Subject: pkix.Name{CommonName: "e2e"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(lifetime),
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, a.cert, a.cert, a.key.Public(), a.key)
	a.remember(err)
	a.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return a
}

func (a *authority) remember(err error) {
	if a.err == nil && err != nil {
		a.err = fmt.Errorf("making credentials: %w", err)
	}
}

func (a *authority) write(name string, text []byte) {
	a.remember(os.WriteFile(filepath.Join(a.dir, name), text, 0o600))
}

// issue completes and signs a certificate, and writes name.crt and name.key.
func (a *authority) issue(name string, cert *x509.Certificate) (certPEM, keyPEM []byte) {
	if a.err != nil {
		return nil, nil
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.remember(err)
		return nil, nil
	}
	a.serial++
	cert.SerialNumber, cert.KeyUsage = big.NewInt(a.serial), x509.KeyUsageDigitalSignature
	cert.NotBefore, cert.NotAfter = a.cert.NotBefore, a.cert.NotAfter
	der, err := x509.CreateCertificate(rand.Reader, cert, a.cert, key.Public(), a.key)
	a.remember(err)
	certPEM, keyPEM = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), a.encode(key)
	a.write(name+".crt", certPEM)
	a.write(name+".key", keyPEM)
	return certPEM, keyPEM
}

func (a *authority) encode(key crypto.PrivateKey) []byte {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	a.remember(err)
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

// signingKey writes the key pair that signs service account tokens.
func (a *authority) signingKey() {
	const bits = 2048
	key, err := rsa.GenerateKey(rand.Reader, bits)
	if err != nil {
		a.remember(err)
		return
	}
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	a.remember(err)
	a.write("sa.key", a.encode(key))
	a.write("sa.pub", pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}))
}

// writeKubeconfig writes a kubeconfig with embedded credentials.
func writeKubeconfig(path, server string, ca []byte, user *clientapi.AuthInfo) error {
	const name = "e2e"
	config := clientapi.NewConfig()
	config.Clusters[name] = &clientapi.Cluster{Server: server, CertificateAuthorityData: ca}
	config.AuthInfos[name] = user
	config.Contexts[name] = &clientapi.Context{Cluster: name, AuthInfo: name}
	config.CurrentContext = name
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		return fmt.Errorf("writing kubeconfig %q: %w", path, err)
	}
	return nil
}
