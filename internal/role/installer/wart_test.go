package installer

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/nodeagent"
)

// prepared is a directory like a node's, and the flags that say so. Ports are off.
func prepared(t *testing.T) (root string, args []string) {
	t.Helper()
	root = t.TempDir()
	for _, dir := range []string{"bin", "net.d", "sa"} {
		if err := os.Mkdir(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(t, "program", root, "source")
	write(t, "token", root, "sa", "token")
	write(t, authority(t), root, "sa", "ca.crt")
	write(t, `{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"bridge"}]}`, root, "net.d", "10-bridge.conflist")
	for flag, name := range map[string]string{
		"cni-source-binary": "source", "mounted-cni-bin-dirs": "bin", "mounted-cni-net-dir": "net.d", "service-account-dir": "sa",
		"cni-agent-run-dir": "run", "cni-cache-dir": "cache",
	} {
		args = append(args, "--"+flag+"="+filepath.Join(root, name))
	}
	return root, append(args, "--health-port=0", "--monitoring-port=0", "--ctrlz_port=0", "--uninstall-on-exit=never")
}

// authority is a certificate in PEM.
func authority(t *testing.T) string {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

// stay runs the agent until its context ends.
func stay(ctx context.Context, t *testing.T, env map[string]string, args []string) error {
	t.Helper()
	in := started(t, env, args...)
	d, err := in.build()
	if err != nil {
		t.Fatal(err)
	}
	return nodeagent.Run(ctx, nodeagent.Options{Config: d.Config, Log: slog.New(slog.DiscardHandler), Reload: in.reload})
}

// TestW12NothingWaitsForTheAPIServer installs while nobody listens where the API server should be, and while somebody does
// who never answers.
func TestW12NothingWaitsForTheAPIServer(t *testing.T) {
	t.Parallel()
	silent, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = silent.Close() })
	for name, port := range map[string]int{"nobody listens": 1, "nobody answers": silent.Addr().(*net.TCPAddr).Port} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root, args := prepared(t)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() {
				done <- stay(ctx, t, cluster("KUBERNETES_SERVICE_HOST=127.0.0.1", fmt.Sprintf("KUBERNETES_SERVICE_PORT=%d", port),
					"NODE_NAME=n1", "CNI_CONF_MODE=auto"), args)
			}()
			list := filepath.Join(root, "net.d", "10-bridge.conflist")
			deadline := time.Now().Add(20 * time.Second)
			for {
				text, err := os.ReadFile(list)
				if err == nil && bytes.Contains(text, []byte("istio-cni")) {
					break
				}
				if time.Now().After(deadline) {
					t.Errorf("not installed: %s, %v", text, err)
					break
				}
				time.Sleep(2 * time.Millisecond)
			}
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}

// TestW29APortThatIsTakenIsToldBeforeAnythingIsTouched: an agent that never becomes ready and does not say why is worse
// than one that does not start.
func TestW29APortThatIsTakenIsToldBeforeAnythingIsTouched(t *testing.T) {
	t.Parallel()
	taken, err := new(net.ListenConfig).Listen(t.Context(), "tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = taken.Close() })
	port := taken.Addr().(*net.TCPAddr).Port
	for _, flag := range []string{"--health-port", "--monitoring-port", "--ctrlz_port"} {
		root, args := prepared(t)
		err := stay(t.Context(), t, cluster(), append(args, fmt.Sprintf("%s=%d", flag, port)))
		if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%s %d: address already in use", flag, port)) {
			t.Errorf("%s: %v", flag, err)
		}
		for _, dir := range []string{"bin", "run"} {
			if entries, _ := os.ReadDir(filepath.Join(root, dir)); len(entries) > 0 {
				t.Errorf("%s: %s was touched: %v", flag, dir, entries)
			}
		}
		if text, _ := os.ReadFile(filepath.Join(root, "net.d", "10-bridge.conflist")); strings.Contains(string(text), "istio-cni") {
			t.Errorf("%s: the stanza is there", flag)
		}
	}
}
