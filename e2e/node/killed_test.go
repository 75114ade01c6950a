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

// hold makes the test binary start another cluster of two nodes with a pod each in a directory, and wait to be killed.
const hold = "NODE_TEST_HOLD"

func holdNodes(dir string, found artifacts.Artifacts) error {
	ctx := context.Background()
	c, err := cluster.Start(ctx, cluster.Options{
		Kube: found.Kube, Tier: cluster.Node, Dir: dir, Images: []string{found.BoxImage, found.Image}, Pause: lab.BoxImage, Log: os.Stderr,
	})
	if err != nil {
		return err
	}
	second, err := c.Join(ctx)
	if err != nil {
		return err
	}
	fmt.Println(c.Dir(), second.Dir())
	if err := c.Namespace(ctx, lab.App); err != nil {
		return err
	}
	pods := c.Client().CoreV1().Pods(lab.App)
	for _, m := range c.Machines() {
		pod := &core.Pod{ObjectMeta: meta.ObjectMeta{Name: m.Node()}, Spec: lab.Plain(lab.On(m.Node())).Spec}
		if _, err := pods.Create(ctx, pod, meta.CreateOptions{}); err != nil {
			return err
		}
	}
	for _, m := range c.Machines() {
		err := cluster.Until(ctx, m.Node(), func() (bool, error) {
			now, err := pods.Get(ctx, m.Node(), meta.GetOptions{})
			return lab.Ready(now), err
		})
		if err != nil {
			return err
		}
	}
	fmt.Println("ready")
	select {}
}

// TestAKilledTestLeavesNoContainer kills a test process that has started two nodes, and checks that no process, container, cgroup, mount or link remains.
func TestAKilledTestLeavesNoContainer(t *testing.T) {
	parent, before := t.TempDir(), links(t)
	found, err := artifacts.Find()
	if err != nil {
		t.Fatal(err)
	}
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
	if second, _ := out.ReadString('\n'); second != "ready\n" || len(words) != 2 {
		t.Fatalf("output %q and %q", line, second)
	}
	first, second := filepath.Base(words[0]), filepath.Base(words[1])
	if n := processes(t, first); n < 8 {
		t.Fatalf("%d processes: the servers, a shim and two containers are more", n)
	}
	if n := processes(t, second); n < 5 {
		t.Fatalf("%d processes: containerd, kubelet, a shim and two containers are more", n)
	}
	if err = command.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = command.Wait()
	l := lab.Test{T: t}
	l.Until("the end of all processes", func() bool { return processes(t, first)+processes(t, second) == 0 })
	l.Until("the end of their links", func() bool { return links(t) == before })
	// The next Start with this Dir removes the rest.
	c, err := cluster.Start(t.Context(), cluster.Options{Kube: found.Kube, Tier: cluster.ControlPlane, Dir: parent})
	if err != nil {
		t.Fatal(err)
	}
	if err = c.Stop(); err != nil {
		t.Error(err)
	}
	if groups := append(cgroups(t, first), cgroups(t, second)...); len(groups) != 0 {
		t.Errorf("control groups are left: %q", groups)
	}
	if left, _ := os.ReadDir(parent); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(mounts), first) || strings.Contains(string(mounts), second) {
		t.Errorf("mounts are left, or %v", err)
	}
}

// links counts the links of clusters to the network namespace of the test.
func links(t *testing.T) int {
	t.Helper()
	text, err := exec.CommandContext(t.Context(), "ip", "-oneline", "link").CombinedOutput()
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(text), "kube-e2e-")
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
