package lab

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/artifacts"
	"github.com/meshcni/istio-cni/e2e/cluster"
)

// The images of the reference and, as in the chart's defaults, of this program.
const (
	ReferenceHub   = "localhost/reference"
	ReferenceTag   = "e2e"
	ReferenceImage = ReferenceHub + "/install-cni:" + ReferenceTag
	OursHub        = "localhost/istio-cni"
	OursTag        = "0.1.0"
)

// Release is the name of the Helm release.
const Release = "istio-cni"

// Beside is a Lab whose node has the image of the reference, too, and whose test has the reference's chart and programs.
type Beside struct {
	*Lab

	Reference artifacts.Reference
}

// NodeBeside starts a node that is ready, as Node does.
func NodeBeside(t *testing.T, o cluster.Options) *Beside {
	t.Helper()
	reference, err := artifacts.FindReference()
	if err != nil {
		t.Fatal(err)
	}
	o.Images = append(o.Images, reference.Image)
	b := &Beside{Lab: Node(t, o), Reference: reference}
	b.UntilNodeReady()
	return b
}

// With returns the fixture of a subtest.
func (b *Beside) With(t *testing.T) *Beside {
	t.Helper()
	return &Beside{Lab: b.Lab.With(t), Reference: b.Reference}
}

// Helm runs Helm in namespace Mesh and returns its output.
func (b *Beside) Helm(args ...string) string {
	b.Helper()
	text, err := b.Program(b.Reference.Helm, append(args, "--namespace="+Mesh, "--kubeconfig="+b.Kubeconfig())...)
	b.Must(err)
	return text
}

// Program runs a program with an empty home directory, logs its output and returns it.
func (b *Beside) Program(path string, args ...string) (string, error) {
	b.Helper()
	home := filepath.Join(b.Dir(), "home")
	command := exec.CommandContext(b.Context(), path, args...)
	command.Env = append(os.Environ(), "HOME="+home, "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home)
	text, err := command.CombinedOutput()
	b.Step("%s %s\n%s", filepath.Base(path), strings.Join(args, " "), text)
	return string(text), err
}

// UntilRolledOut waits until the only agent pod is ready and has this image. Helm's --wait does not: with one node and
// maxUnavailable 1 it requires no ready pod.
func (b *Beside) UntilRolledOut(image string) {
	b.Helper()
	b.Until("the agent", func() bool {
		agents, err := b.Client().CoreV1().Pods(Mesh).List(b.Context(), meta.ListOptions{})
		return err == nil && len(agents.Items) == 1 && Ready(&agents.Items[0]) && agents.Items[0].Spec.Containers[0].Image == image &&
			b.RolledOut()
	})
}

// Pods creates injected pods and waits until they are ready.
func (b *Beside) Pods(names ...string) {
	b.Helper()
	for _, name := range names {
		b.Pod(name, Injected())
	}
	b.UntilReady(names...)
}

// Rules returns iptables-save of a pod, without counters.
func (b *Beside) Rules(name string) (all string) {
	b.Helper()
	for line := range strings.Lines(b.InPod(name, "iptables-save")) {
		if line[0] != '#' {
			all += strings.TrimSpace(strings.Split(line, " [")[0]) + "\n"
		}
	}
	return all
}

// InPod runs a program of the node in the network namespace of a pod, and returns its output.
func (b *Beside) InPod(name string, command ...string) string {
	b.Helper()
	id := strings.TrimPrefix(b.Get(App, name).Status.ContainerStatuses[0].ContainerID, "containerd://")
	for line := range strings.Lines(b.OnNode("ctr", "--namespace", "k8s.io", "task", "ls")) {
		task := strings.Fields(line)
		if task[0] == id {
			return b.OnNode("nsenter", append([]string{"--net=/proc/" + task[1] + "/ns/net", "--"}, command...)...)
		}
	}
	b.Fatalf("the runtime has no task of %s", name)
	return ""
}

// Files returns the file names in a directory of the node.
func (b *Beside) Files(dir string) []string {
	b.Helper()
	return strings.Fields(b.OnNode("ls", "-A", dir))
}

// RemoveReleased deletes pods, waits until they are gone, and until their addresses are released.
func (b *Beside) RemoveReleased(names ...string) {
	b.Helper()
	began := time.Now()
	addresses := map[string]bool{}
	for _, name := range names {
		addresses[b.Get(App, name).Status.PodIP] = true
	}
	b.Remove(names...)
	b.Until("their addresses to be free", func() bool {
		for _, taken := range b.Files("/run/cni-ipam/e2e") {
			if addresses[taken] {
				return false
			}
		}
		return true
	})
	b.Step("%q are gone after %s", names, time.Since(began).Round(100*time.Millisecond))
}

// NetworkList is a CNI network configuration list.
type NetworkList struct {
	CNIVersion, Name string
	Plugins          []map[string]any
}

// Network reads the node's primary CNI configuration.
func (b *Beside) Network() (n NetworkList) {
	b.Helper()
	b.Must(json.Unmarshal([]byte(b.NetworkFile("10-e2e.conflist")), &n))
	return n
}
