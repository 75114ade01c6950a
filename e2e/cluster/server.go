package cluster

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Server is the name of a server of the cluster.
type Server string

// Servers.
const (
	Etcd              Server = "etcd"
	APIServer         Server = "kube-apiserver"
	ControllerManager Server = "kube-controller-manager"
	Scheduler         Server = "kube-scheduler"
	Kubelet           Server = "kubelet"
	Containerd        Server = "containerd"
)

// begin starts a server of the kube binary with flags.
func (m *Machine) begin(server Server, flags ...string) error {
	return m.launch(server, append([]string{m.cluster.options.Kube, string(server)}, flags...)...)
}

func (c *Cluster) configureControlPlane() error {
	if err := os.WriteFile(c.run.auditPolicy(), []byte(auditPolicy), 0o600); err != nil {
		return fmt.Errorf("writing the audit policy: %w", err)
	}
	return nil
}

// startControlPlane starts etcd and the API server and does not wait for them.
func (c *Cluster) startControlPlane() error {
	const client, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
	err := c.begin(Etcd, "--name=e2e", "--data-dir="+c.run.path("state", "etcd"),
		"--listen-client-urls="+client, "--advertise-client-urls="+client, "--listen-peer-urls="+peer,
		"--initial-advertise-peer-urls="+peer, "--initial-cluster=e2e="+peer, "--unsafe-no-fsync", "--log-level=warn")
	if err != nil {
		return err
	}
	pki := func(name string) string { return filepath.Join(c.run.pki(), name) }
	bind, services := "0.0.0.0", serviceCIDR
	if c.options.Families == IPv6 {
		bind, services = "::", serviceCIDR6 // also accepts IPv4, which the test uses
	}
	return c.begin(APIServer, "--etcd-servers="+client,
		"--bind-address="+bind, "--advertise-address="+c.nodeIP(), "--secure-port="+apiPort,
		"--service-cluster-ip-range="+services,
		// There is no kube-proxy: webhooks are called at the endpoints of their Services.
		"--enable-aggregator-routing",
		"--tls-cert-file="+pki("apiserver.crt"), "--tls-private-key-file="+pki("apiserver.key"), "--client-ca-file="+pki("ca.crt"),
		// By default the API server connects to kubelets (logs, exec) by the node's host name, which does not resolve here.
		"--kubelet-preferred-address-types=InternalIP", "--kubelet-certificate-authority="+pki("ca.crt"),
		"--kubelet-client-certificate="+pki("apiserver-kubelet.crt"), "--kubelet-client-key="+pki("apiserver-kubelet.key"),
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+pki("sa.pub"),
		"--service-account-signing-key-file="+pki("sa.key"),
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged",
		"--audit-policy-file="+c.run.auditPolicy(), "--audit-log-path="+c.run.audit(), "--audit-log-maxsize=1000")
}

// startControllers starts the controller manager and the scheduler. The API server must be ready.
func (c *Cluster) startControllers() error {
	kubeconfig := func(name string) string { return "--kubeconfig=" + filepath.Join(c.run.pki(), name+".kubeconfig") }
	flags := []string{
		kubeconfig("kcm"), "--use-service-account-credentials",
		"--service-account-private-key-file=" + filepath.Join(c.run.pki(), "sa.key"), "--root-ca-file=" + filepath.Join(c.run.pki(), "ca.crt"),
		"--leader-elect=false", "--bind-address=127.0.0.1", "--flex-volume-plugin-dir=" + c.run.path("state", "volumeplugins"),
		// With the default limits the controllers take seconds to start.
		"--kube-api-qps=500", "--kube-api-burst=1000",
	}
	if grace := c.options.NodeMonitorGracePeriod; grace > 0 {
		flags = append(flags, "--node-monitor-grace-period="+grace.String())
	}
	if err := c.begin(ControllerManager, flags...); err != nil || c.options.Tier != Node {
		return err
	}
	return c.begin(Scheduler, kubeconfig("scheduler"), "--leader-elect=false", "--bind-address=127.0.0.1")
}

// launch starts a program under the name of a server and keeps its arguments for Restart.
func (m *Machine) launch(server Server, args ...string) error {
	m.mu.Lock()
	m.commands[server] = args
	m.mu.Unlock()
	_, err := m.inside.send(command{
		Verb: verbStart, Name: string(server), Args: args, Log: m.run.log(server),
		// The kubelet exits if the runtime is not ready yet.
		Respawn: server == Kubelet,
	})
	return err
}

// Kill kills a server with SIGKILL and waits for its exit.
func (m *Machine) Kill(server Server) error {
	_, err := m.inside.send(command{Verb: verbKill, Name: string(server)})
	return err
}

// Restart starts an exited server again with the same flags, address and data, and waits until the API server is
// ready if that was restarted.
func (m *Machine) Restart(ctx context.Context, server Server) error {
	m.mu.Lock()
	args := m.commands[server]
	m.mu.Unlock()
	if args == nil {
		return fmt.Errorf("server %q was never started", server)
	}
	if err := m.launch(server, args...); err != nil {
		return err
	}
	if server != APIServer {
		return nil
	}
	return m.cluster.waitReady(ctx)
}

// alive returns an error with the end of the log if a server has exited.
func (m *Machine) alive(server Server) error {
	answer, err := m.inside.send(command{Verb: verbAlive, Name: string(server)})
	if err == nil && !answer.Alive {
		err = fmt.Errorf("%s has ended (%s): %s", server, answer.Status, tail(m.run.log(server)))
	}
	return err
}

// waitReady polls /readyz of the API server. It uses a connection of its own: those opened before a restart may hang.
func (c *Cluster) waitReady(ctx context.Context) error {
	config := rest.CopyConfig(c.config)
	config.Timeout = 2 * time.Second
	// Clients share connections unless their dial functions differ.
	config.Dial = (&net.Dialer{}).DialContext
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	return Until(ctx, "the API server", func() (bool, error) {
		for _, server := range []Server{Etcd, APIServer} {
			if err := c.alive(server); err != nil {
				return false, err
			}
		}
		return client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error() == nil, nil
	})
}
