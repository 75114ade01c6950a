package node

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// hold makes the test binary start a second node with a pod in a directory, and wait to be killed.
const hold = "NODE_TEST_HOLD"

func holdNode(dir string, found artifacts.Artifacts) error {
	ctx := context.Background()
	c, err := start(ctx, dir, found)
	if err != nil {
		return err
	}
	fmt.Println(c.Pid(), c.Dir(), c.Kubeconfig())
	for {
		accounts := c.Client().CoreV1().ServiceAccounts("default")
		if _, err := accounts.Get(ctx, "default", meta.GetOptions{}); err == nil {
			break
		}
	}
	pod := &core.Pod{ObjectMeta: meta.ObjectMeta{Name: "held"}, Spec: core.PodSpec{
		NodeName: cluster.NodeName, Containers: []core.Container{container("c", lab.BoxImage)}, Tolerations: anyTaint(),
	}}
	if _, err := c.Client().CoreV1().Pods("default").Create(ctx, pod, meta.CreateOptions{}); err != nil {
		return err
	}
	for {
		now, err := c.Client().CoreV1().Pods("default").Get(ctx, "held", meta.GetOptions{})
		if err == nil && ready(now) {
			fmt.Println("ready")
			select {}
		}
	}
}

// TestAKilledTestLeavesNoContainer kills a test process that has started a second node, next to the node of the other
// tests, and checks that no process, container, cgroup or mount remains.
func TestAKilledTestLeavesNoContainer(t *testing.T) {
	parent := t.TempDir()
	command := exec.CommandContext(t.Context(), os.Args[0])
	command.Env = append(os.Environ(), hold+"="+parent)
	command.Stderr = t.Output()
	pipe, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err = command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = command.Process.Kill() })
	out := bufio.NewReader(pipe)
	line, _ := out.ReadString('\n')
	words := strings.Fields(line)
	if second, _ := out.ReadString('\n'); second != "ready\n" || len(words) != 3 {
		t.Fatalf("output %q and %q", line, second)
	}
	base := filepath.Base(words[1])
	if n := processes(t, base); n < 8 {
		t.Fatalf("%d processes: the servers, a shim and two containers are more", n)
	}
	if err = command.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = command.Wait()
	l := lab.Test{T: t}
	l.Until("the end of all processes", func() bool { return processes(t, base) == 0 })
	// The next Start with this Dir removes the rest.
	c, err := cluster.Start(t.Context(), cluster.Options{Kube: shared.Kube, Tier: cluster.ControlPlane, Dir: parent})
	if err != nil {
		t.Fatal(err)
	}
	if err = c.Stop(); err != nil {
		t.Error(err)
	}
	if groups := cgroups(t, base); len(groups) != 0 {
		t.Errorf("control groups are left: %q", groups)
	}
	if left, _ := os.ReadDir(parent); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(mounts), base) {
		t.Errorf("mounts are left, or %v", err)
	}
}

// processes counts the processes in a cluster's cgroups. Containers have namespaces of their own, but their cgroups
// are below.
func processes(t *testing.T, base string) int {
	t.Helper()
	found := map[string]bool{}
	for _, top := range cgroups(t, base) {
		err := filepath.WalkDir(top, func(path string, entry os.DirEntry, err error) error {
			if err == nil && entry.Name() == "cgroup.procs" {
				text, _ := os.ReadFile(path)
				for pid := range strings.FieldsSeq(string(text)) {
					found[pid] = true
				}
			}
			return nil // cgroups are created and removed meanwhile
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return len(found)
}

// cgroups returns the cgroups of a cluster in all hierarchies.
func cgroups(t *testing.T, base string) []string {
	t.Helper()
	var found []string
	err := filepath.WalkDir("/sys/fs/cgroup", func(path string, entry os.DirEntry, err error) error {
		if err == nil && entry.IsDir() && entry.Name() == base {
			found = append(found, path)
			return filepath.SkipDir
		}
		return nil // cgroups are created and removed meanwhile
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}
