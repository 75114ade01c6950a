package cluster_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/cluster"
)

// hold makes the test binary start a cluster, print its PID and directory, and wait to be killed.
const hold = "CLUSTER_TEST_HOLD"

func TestMain(m *testing.M) {
	cluster.Main()
	if dir := os.Getenv(hold); dir != "" {
		holdCluster(dir)
	}
	os.Exit(m.Run())
}

func holdCluster(dir string) {
	found, err := artifacts.Find()
	if err == nil {
		var c *cluster.Cluster
		if c, err = cluster.Start(context.Background(), cluster.Options{Kube: found.Kube, Tier: cluster.ControlPlane, Dir: dir}); err == nil {
			fmt.Println(c.Pid(), c.Dir())
			select {}
		}
	}
	fmt.Println("failed:", err)
	os.Exit(1)
}

// start starts a control plane, which ends with the test.
func start(t *testing.T, dir string) *cluster.Cluster {
	t.Helper()
	found, err := artifacts.Find()
	if err != nil {
		t.Fatal(err)
	}
	c, err := cluster.Start(t.Context(), cluster.Options{Kube: found.Kube, Tier: cluster.ControlPlane, Dir: dir, Log: t.Output()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			if err := c.CollectLogs(filepath.Join(found.Logs, t.Name())); err != nil {
				t.Error(err)
			}
		}
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// inside counts the processes in a PID namespace, given as the target of /proc/PID/ns/pid.
func inside(t *testing.T, namespace string) (count int) {
	t.Helper()
	links, err := filepath.Glob("/proc/[0-9]*/ns/pid")
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if at, err := os.Readlink(link); err == nil && at == namespace {
			count++
		}
	}
	return count
}

func namespaceOf(t *testing.T, pid int) string {
	t.Helper()
	at, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid))
	if err != nil {
		t.Fatal(err)
	}
	return at
}

func TestAPIServer_KilledAndRestarted(t *testing.T) {
	c := start(t, t.TempDir())
	client := c.Client().CoreV1().ConfigMaps("default")
	config := &core.ConfigMap{ObjectMeta: meta.ObjectMeta{Name: "kept"}, Data: map[string]string{"k": "v"}}
	if _, err := client.Create(t.Context(), config, meta.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	host := c.REST().Host
	if err := c.Kill(cluster.APIServer); err != nil {
		t.Fatal(err)
	}
	address := strings.TrimPrefix(host, "https://")
	if conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(t.Context(), "tcp", address); err == nil {
		_ = conn.Close()
		t.Error("the killed API server accepts connections")
	}
	if err := c.Restart(t.Context(), cluster.APIServer); err != nil {
		t.Fatal(err)
	}
	got, err := client.Get(t.Context(), "kept", meta.GetOptions{})
	if err != nil || got.Data["k"] != "v" || c.REST().Host != host {
		t.Errorf("%v, %v at %s", got, err, c.REST().Host)
	}
	if err := c.Restart(t.Context(), cluster.APIServer); err == nil {
		t.Error("a server that runs was started a second time")
	}
	if err := c.Restart(t.Context(), cluster.Kubelet); err == nil {
		t.Error("a server that was never started was started again")
	}
}

func TestRequests_AuthorizedAndAudited(t *testing.T) {
	c := start(t, t.TempDir())
	if err := c.Namespace(t.Context(), "shop", "clerk", "other"); err != nil {
		t.Fatal(err)
	}
	client := map[string]kubernetes.Interface{}
	for _, account := range []string{"clerk", "other"} {
		path, err := c.AccountKubeconfig(t.Context(), "shop", account)
		if err != nil {
			t.Fatal(err)
		}
		config, err := clientcmd.BuildConfigFromFlags("", path)
		if err != nil {
			t.Fatal(err)
		}
		if client[account], err = kubernetes.NewForConfig(config); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := client["clerk"].CoreV1().Pods("shop").List(t.Context(), meta.ListOptions{LabelSelector: "a=b"}); !apierrors.IsForbidden(err) {
		t.Errorf("want a refusal, got %v", err)
	}
	requests, err := c.Requests("shop", "clerk")
	if err != nil {
		t.Fatal(err)
	}
	if len(requests) != 1 || requests[0].Verb != "list" || requests[0].Resource != "pods" || requests[0].Status != 403 ||
		!strings.Contains(requests[0].URI, "labelSelector=a%3Db") || requests[0].Namespace != "shop" {
		t.Errorf("requests of the clerk: %+v", requests)
	}
	if requests, err := c.Requests("shop", "other"); err != nil || len(requests) != 0 {
		t.Errorf("requests of the other: %+v, %v", requests, err)
	}
}

func TestStop_LeavesNothing(t *testing.T) {
	parent := t.TempDir()
	c := start(t, parent)
	namespace := namespaceOf(t, c.Pid())
	if n := inside(t, namespace); n < 3 {
		t.Fatalf("%d processes, want the first one, etcd and the API server", n)
	}
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	if n := inside(t, namespace); n != 0 {
		t.Errorf("%d processes are left", n)
	}
	if left, _ := os.ReadDir(parent); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

// TestStop_KilledTest kills a test process that has started a cluster, while another cluster runs.
func TestStop_KilledTest(t *testing.T) {
	parent := t.TempDir()
	neighbour := start(t, parent)
	command := exec.CommandContext(t.Context(), os.Args[0])
	command.Env = append(os.Environ(), hold+"="+parent)
	command.Stderr = t.Output()
	out, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err = command.Start(); err != nil {
		t.Fatal(err)
	}
	line, _ := bufio.NewReader(out).ReadString('\n')
	number, dir, _ := strings.Cut(strings.TrimSpace(line), " ")
	pid, err := strconv.Atoi(number)
	if err != nil {
		t.Fatalf("output %q", line)
	}
	namespace := namespaceOf(t, pid)
	if n := inside(t, namespace); n < 3 {
		t.Fatalf("%d processes", n)
	}
	if err = command.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = command.Wait()
	err = cluster.Until(t.Context(), "the end of all processes", func() (bool, error) { return inside(t, namespace) == 0, nil })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir); err != nil {
		t.Errorf("the directory does not exist any more, so the next checks show nothing: %v", err)
	}
	// The next Start removes the directory of the killed test and leaves the running cluster alone.
	start(t, parent)
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory is still there: %v", err)
	}
	if _, err := neighbour.Client().CoreV1().Nodes().List(t.Context(), meta.ListOptions{}); err != nil {
		t.Errorf("the neighbour: %v", err)
	}
	if err := unix.Kill(neighbour.Pid(), 0); err != nil {
		t.Errorf("the neighbour: %v", err)
	}
}

func TestStart_MissingPrerequisites(t *testing.T) {
	_, err := cluster.Start(t.Context(), cluster.Options{Kube: "/nonexistent", Tier: "huge"})
	if err == nil || !strings.Contains(err.Error(), "hack/kube.sh") || !strings.Contains(err.Error(), `not "huge"`) {
		t.Errorf("got %v", err)
	}
	t.Setenv("PATH", t.TempDir())
	found, _ := artifacts.Find()
	_, err = cluster.Start(t.Context(), cluster.Options{Kube: found.Kube, Tier: cluster.Node})
	for _, want := range []string{"install containerd", "install runc", "install iproute2", "Options.Images"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error lacks %q: %v", want, err)
		}
	}
}

func TestStart_ServerExits(t *testing.T) {
	script := filepath.Join(t.TempDir(), "kube")
	// Only etcd exits: of two servers that exit, either may be found first.
	text := "#!/bin/sh\n[ $1 = etcd ] || exec sleep 600\necho \"$1 has no licence\"\nexit 3\n"
	if err := os.WriteFile(script, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	parent := t.TempDir()
	_, err := cluster.Start(t.Context(), cluster.Options{Kube: script, Tier: cluster.ControlPlane, Dir: parent})
	if err == nil || !strings.Contains(err.Error(), "etcd has ended (exit status 3): etcd has no licence") {
		t.Errorf("got %v", err)
	}
	if left, _ := os.ReadDir(parent); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}
