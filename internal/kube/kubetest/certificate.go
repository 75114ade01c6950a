package kubetest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/test/check"
)

// sign returns a self-signed certificate for an address. It is valid from 2000 to 2100, so that no test depends on the date.
func sign(tb testing.TB, address net.IP) tls.Certificate {
	tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check.OK(tb, err, "making a key")
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kube-apiserver"},
		NotBefore: time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC), NotAfter: time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, IPAddresses: []net.IP{address},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	check.OK(tb, err, "signing a certificate")
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// certificates selects the certificate: the valid one unless a fault selects one of another authority. It returns a whole configuration
// because crypto/tls does not call GetCertificate for a client that dials an address rather than a name.
func (s *Server) certificates() func(*tls.ClientHelloInfo) (*tls.Config, error) {
	host, _ := s.Address()
	address := net.ParseIP(host)
	s.certificate = sign(s.tb, address)
	other := sign(s.tb, address)
	return func(*tls.ClientHelloInfo) (*tls.Config, error) {
		present := s.certificate
		if _, found := s.next("", Fault.ofConnection); found {
			present = other
		}
		return &tls.Config{
			MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{present}, NextProtos: []string{"h2", "http/1.1"},
		}, nil
	}
}

// CA returns the server's certificate authority in PEM.
func (s *Server) CA() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.certificate.Certificate[0]})
}
