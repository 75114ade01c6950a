package kubetest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"math/big"
	"net"
	"testing"
	"time"
)

// authority signs certificates.
type authority struct {
	tb          testing.TB
	key         *ecdsa.PrivateKey
	certificate *x509.Certificate
	pem         []byte
}

// Certificates are valid from long ago until long after; no test depends on the date of its run.
func longAgo() time.Time   { return time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC) }
func longAfter() time.Time { return time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC) }

func newAuthority(tb testing.TB) *authority {
	tb.Helper()
	key := newKey(tb)
	template := &x509.Certificate{
		SerialNumber:          big.NewInt(1),
		Subject:               pkix.Name{CommonName: "kubernetes"},
		NotBefore:             longAgo(),
		NotAfter:              longAfter(),
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		tb.Fatalf("making an authority: %v", err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		tb.Fatalf("reading back an authority: %v", err)
	}
	return &authority{tb: tb, key: key, certificate: certificate, pem: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
}

// server signs a certificate for an address.
func (a *authority) server(address net.IP, until time.Time) tls.Certificate {
	a.tb.Helper()
	key := newKey(a.tb)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2),
		Subject:      pkix.Name{CommonName: "kube-apiserver"},
		NotBefore:    longAgo(),
		NotAfter:     until,
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:     []string{ServerName},
		IPAddresses:  []net.IP{address},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, &key.PublicKey, a.key)
	if err != nil {
		a.tb.Fatalf("signing a certificate: %v", err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// ServerName is the DNS name in every certificate of a [Server], besides its address.
const ServerName = "kubernetes.default.svc"

// certificates gives the one to present: the good one unless a fault asks for another. It is asked for a whole
// configuration because the certificate callback is not consulted for a client that calls an address rather than a name.
func (s *Server) certificates(at net.Addr) func(*tls.ClientHelloInfo) (*tls.Config, error) {
	host, _, err := net.SplitHostPort(at.String())
	if err != nil {
		s.tb.Fatal(err)
	}
	address := net.ParseIP(host)
	good := s.issuer.server(address, longAfter())
	bad := map[Fault]tls.Certificate{
		ExpiredCertificate:   s.issuer.server(address, longAgo().AddDate(1, 0, 0)),
		WrongHostCertificate: s.issuer.server(net.IPv4(192, 0, 2, 1), longAfter()),
		UnknownCA:            s.other.server(address, longAfter()),
	}
	return func(*tls.ClientHelloInfo) (*tls.Config, error) {
		present := good
		if fault, found := s.next("", Fault.ofConnection); found {
			present = bad[fault]
		}
		return &tls.Config{
			MinVersion:   tls.VersionTLS12,
			Certificates: []tls.Certificate{present},
			NextProtos:   []string{"h2", "http/1.1"},
		}, nil
	}
}

func newKey(tb testing.TB) *ecdsa.PrivateKey {
	tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		tb.Fatalf("making a key: %v", err)
	}
	return key
}

func base64Of(data []byte) string { return base64.StdEncoding.EncodeToString(data) }
