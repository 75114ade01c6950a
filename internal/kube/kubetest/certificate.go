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

// pair is a certificate and its key.
type pair struct {
	key         *ecdsa.PrivateKey
	certificate *x509.Certificate
}

// Certificates are valid from long ago until long after; no test depends on the date of its run.
func longAgo() time.Time   { return time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC) }
func longAfter() time.Time { return time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC) }

// newAuthority creates an authority that signs certificates, its own among them.
func newAuthority(tb testing.TB) pair {
	tb.Helper()
	return pair{}.sign(tb, &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kubernetes"}, NotAfter: longAfter(),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	})
}

func (p pair) sign(tb testing.TB, template *x509.Certificate) pair {
	tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check.OK(tb, err, "making a key")
	if p.key == nil {
		p = pair{key, template}
	}
	template.NotBefore = longAgo()
	der, err := x509.CreateCertificate(rand.Reader, template, p.certificate, &key.PublicKey, p.key)
	check.OK(tb, err, "signing a certificate")
	certificate, err := x509.ParseCertificate(der)
	check.OK(tb, err, "reading back a certificate")
	return pair{key, certificate}
}

// server signs a certificate for an address.
func (p pair) server(tb testing.TB, address net.IP, until time.Time) tls.Certificate {
	tb.Helper()
	signed := p.sign(tb, &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "kube-apiserver"}, NotAfter: until,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		IPAddresses: []net.IP{address},
	})
	return tls.Certificate{Certificate: [][]byte{signed.certificate.Raw}, PrivateKey: signed.key}
}

// certificates returns the certificate to present: the valid one unless a fault selects another. It returns a whole
// configuration because crypto/tls does not call GetCertificate for a client that dials an address rather than a name.
func (s *Server) certificates() func(*tls.ClientHelloInfo) (*tls.Config, error) {
	host, _ := s.Address()
	address := net.ParseIP(host)
	good := s.issuer.server(s.tb, address, longAfter())
	bad := map[Fault]tls.Certificate{
		ExpiredCertificate:   s.issuer.server(s.tb, address, longAgo().AddDate(1, 0, 0)),
		WrongHostCertificate: s.issuer.server(s.tb, net.IPv4(192, 0, 2, 1), longAfter()),
		UnknownCA:            newAuthority(s.tb).server(s.tb, address, longAfter()),
	}
	return func(*tls.ClientHelloInfo) (*tls.Config, error) {
		present := good
		if fault, found := s.next("", Fault.ofConnection); found {
			present = bad[fault]
		}
		return &tls.Config{
			MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{present}, NextProtos: []string{"h2", "http/1.1"},
		}, nil
	}
}

// CA returns the server's authority in PEM.
func (s *Server) CA() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.issuer.certificate.Raw})
}
