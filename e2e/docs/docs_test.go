// Package docs runs the commands of the documentation that need a cluster: all blocks of the runner "cluster" of README.md and
// docs/, with the kubectl, the kubectl plugin and the Helm that users have, and "istio-cni" as on a node. See package pages.
//
// A page that has "helm install" begins on a cluster without the agent, and if it creates that namespace, too, without
// istio-system; all others have the agent, and namespace shop with the pods of
// world. Variables that the pages name are in env. "kind load" imports the archive on the node as kind does.
//
// Start reading at TestDocs.
package docs

import (
	"context"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
	"github.com/meshcni/istio-cni/e2e/pages"
)

func TestMain(m *testing.M) {
	cluster.Main()
	os.Exit(m.Run())
}

const (
	root = "../.."
	shop = "shop"
	// busybox is the image of that name, packed by hack/e2e.sh, which the quickstart's pod pulls elsewhere.
	busybox = root + "/bin/e2e-images/busybox.tar"
	// longest bounds all commands of a page.
	longest = 4 * time.Minute
)

// scenario is the cluster, and the directory of programs in PATH.
type scenario struct {
	*lab.Beside
	bin, home string
}

// TestDocs runs the blocks page by page.
func TestDocs(t *testing.T) {
	all, err := pages.Read(root)
	if err != nil {
		t.Fatal(err)
	}
	blocks := pages.Of(all, "cluster")
	if len(blocks) == 0 {
		t.Fatal("no page has commands to run")
	}
	s := newScenario(t)
	// Pages that install come first: what they leave serves the others.
	order := slices.SortedFunc(maps.Keys(blocks), func(a, b string) int {
		if installs(blocks[a]) != installs(blocks[b]) {
			return map[bool]int{true: -1, false: 1}[installs(blocks[a])]
		}
		return strings.Compare(a, b)
	})
	for _, name := range order {
		t.Run(filepath.Base(name), func(t *testing.T) {
			s.with(t).page(append(spoken(all, name), blocks[name]...))
		})
	}
	t.Run("uids", func(t *testing.T) { s.with(t).uids() })
}

// uids makes both cases of the runbook's row about foreign-listener: a proxy whose uid is not the usual one and has the rules, and a
// proxy as root, for which the rules are those of the usual uid.
func (s *scenario) uids() {
	s.Helper()
	s.installed()
	text, err := os.ReadFile(root + "/manifests/examples/quickstart.yaml")
	s.Must(err)
	pod, containers, _ := strings.Cut(string(text), "  containers:\n")
	defer s.kubectl("delete namespace demo")
	// why returns what the command says, without its line breaks.
	why := func(args ...string) string {
		return strings.Join(strings.Fields(s.Kubectl(append([]string{"istio-cni", "why", "-n", "demo"}, args...)...).Stdout), " ")
	}
	for uid, want := range map[string]struct{ page, packet string }{
		"2000": {"the pod is in the mesh", "the proxy itself is never captured"},
		"0":    {"uid 0 listens on 127.0.0.1:15001, to which", "redirected to port 15001"},
	} {
		name, validation := "web-"+uid, pod
		if uid != "0" { // as root it would not be redirected
			validation = strings.ReplaceAll(pod, "1337", uid)
		}
		text := strings.ReplaceAll(validation, "name: web\n", "name: "+name+"\n") + "  containers:\n" + strings.ReplaceAll(containers, "1337", uid)
		file := filepath.Join(s.TempDir(), uid)
		s.Must(os.WriteFile(file, []byte(text), 0o600))
		s.kubectl("apply -f " + file)
		s.Until(name, func() bool { return lab.Ready(s.Get("demo", name)) })
		s.Until("what is wanted of "+name, func() bool {
			s.Kubectl("istio-cni", "pods", "--check")
			return strings.Contains(why(name), want.page)
		})
		if text := why(name, "--to", "10.9.0.7:80", "--uid", uid, "--gid", uid); !strings.Contains(text, want.packet) {
			s.Errorf("%s: %s", name, text)
		}
	}
}

func installs(blocks []pages.Block) bool {
	return slices.ContainsFunc(blocks, func(b pages.Block) bool { return strings.Contains(b.Text, "helm install") })
}

// complete is a command in a sentence or a table that is complete with the variables of env.
var complete = regexp.MustCompile(`^kubectl .*\$(NS|POD|NODE|AGENT)\b`)

// spoken are such commands of a page. They may exit with 3: a pod that is past the mesh. A taint that is removed has to be there.
func spoken(all []pages.Page, name string) (blocks []pages.Block) {
	for _, page := range all {
		for _, span := range page.Spans {
			if page.Name == name && complete.MatchString(span.Text) {
				if taint, removed := strings.CutSuffix(span.Text, "-"); removed {
					span.Text = taint + "=true:NoSchedule && " + span.Text
				}
				blocks = append(blocks, pages.Block{Page: name, Line: span.Line, Language: "sh", Text: span.Text + " || [[ $? -eq 3 ]]\n"})
			}
		}
	}
	return blocks
}

func newScenario(t *testing.T) *scenario {
	t.Helper()
	s := &scenario{Beside: lab.NodeBeside(t, cluster.Options{}), bin: t.TempDir(), home: t.TempDir()}
	for name, path := range map[string]string{
		"kubectl": s.Kube, "kubectl-istio_cni": s.Artifacts.Kubectl, "helm": s.Reference.Helm, "istioctl": s.Reference.Istioctl,
	} {
		s.Must(os.Symlink(path, filepath.Join(s.bin, name)))
	}
	// On the node the program is where the agent has put it.
	node := s.Command(t.Context(), "/opt/cni/bin/istio-cni").Args
	s.Must(os.WriteFile(filepath.Join(s.bin, "istio-cni"), []byte("#!/bin/sh\nexec "+strings.Join(node, " ")+" \"$@\"\n"), 0o755))
	imports := strings.Join(s.Command(t.Context(), "ctr", "--namespace=k8s.io", "images", "import", "--all-platforms", "--digests", "-").Args, " ")
	s.Must(os.WriteFile(filepath.Join(s.bin, "kind"), []byte("#!/bin/sh\n[ \"$1 $2\" = 'load image-archive' ] && exec "+imports+" <\"$3\" >/dev/null\n"), 0o755))
	s.Must(exec.CommandContext(t.Context(), filepath.Join(s.bin, "kind"), "load", "image-archive", busybox).Run())
	return s
}

func (s *scenario) with(t *testing.T) *scenario {
	t.Helper()
	return &scenario{Beside: s.With(t), bin: s.bin, home: s.home}
}

// page runs the blocks of a page in a directory with the files of the repository that pages name.
func (s *scenario) page(blocks []pages.Block) {
	s.Helper()
	work := s.TempDir()
	tree, err := filepath.Abs(root)
	s.Must(err)
	for _, name := range []string{"manifests", "hack", "docs", "bin"} {
		s.Must(os.Symlink(filepath.Join(tree, name), filepath.Join(work, name)))
	}
	if installs(blocks) {
		s.uninstall(!slices.ContainsFunc(blocks, func(b pages.Block) bool { return strings.Contains(b.Text, "create namespace "+lab.Mesh) }))
	} else {
		s.installed()
	}
	ctx, cancel := context.WithTimeout(s.Context(), longest)
	defer cancel()
	shell := pages.Shell{Start: []string{"bash"}, Env: s.env(), Dir: work, Varies: varies}
	results, err := shell.Run(ctx, s.TempDir(), blocks)
	s.Must(err)
	s.kubectl("delete namespace demo --ignore-not-found") // the quickstart ends with its cluster
	for _, r := range results {
		s.Step("%s:%d: %s%s", r.Block.Page, r.Command.Line, r.Command.Text, r.Output)
		if r.Fault != "" {
			s.Errorf("%s:%d: %s%s", r.Block.Page, r.Command.Line, r.Command.Text, r.Fault)
		}
	}
}

// varies are the addresses of pods, the hashes in their names, and the node of kind.
var varies = []*regexp.Regexp{
	regexp.MustCompile(`\b10\.(88|244)\.\d+\.\d+\b`),
	regexp.MustCompile(`\b(` + cluster.NodeName + `|kind-control-plane)\b`),
	regexp.MustCompile(`\bistio-cni-node-[a-z0-9]{5}\b`),
}

// env are the variables that pages name.
func (s *scenario) env() []string {
	s.Helper()
	all := []string{
		"PATH=" + s.bin + ":" + os.Getenv("PATH"), "LANG=C.UTF-8", "KUBECONFIG=" + s.Kubeconfig(),
		"HOME=" + s.home, "HELM_CACHE_HOME=" + s.home, "HELM_CONFIG_HOME=" + s.home, "HELM_DATA_HOME=" + s.home,
		"HUB=" + lab.OursHub, "TAG=" + lab.OursTag, "NODE=" + cluster.NodeName, "NS=" + shop, "POD=web-0",
	}
	if agent := s.Agent(); agent != nil {
		all = append(all, "AGENT="+agent.Name)
	}
	return all
}

// kubectl runs kubectl, which must succeed.
func (s *scenario) kubectl(line string) {
	s.Helper()
	if r := s.Kubectl(strings.Fields(line)...); r.Code != 0 {
		s.Fatalf("kubectl %s: %s", line, r)
	}
}

// uninstall removes the agent, by whatever it was installed, and makes its namespace anew, or leaves that to the page.
func (s *scenario) uninstall(remake bool) {
	s.Helper()
	s.kubectl("delete --ignore-not-found -f " + root + "/manifests/istio-cni.yaml")
	s.Until("the agent to go", func() bool { return s.Agent() == nil })
	s.kubectl("delete namespace " + lab.Mesh)
	if remake {
		s.Must(s.Namespace(s.Context(), lab.Mesh))
	}
}

// installed has the agent be there as a release of Helm, and the pods.
func (s *scenario) installed() {
	s.Helper()
	if _, err := s.Program(s.Reference.Helm, "status", lab.Release, "--namespace="+lab.Mesh, "--kubeconfig="+s.Kubeconfig()); err != nil {
		s.uninstall(true)
		s.Helm("install", lab.Release, filepath.Join(root, "manifests", "istio-cni"))
	}
	s.Until("the agent", func() bool { return lab.Ready(s.Agent()) && s.RolledOut() })
	s.world()
}

// world has the pods of the pages' examples: web-0 and web are as they should be, orders-5c9 excludes a port, cart-0 has a rule
// that is not the mesh's, and plain has a proxy, but was not injected.
func (s *scenario) world() {
	s.Helper()
	s.Must(s.Namespace(s.Context(), shop))
	unlabelled := lab.Injected()
	unlabelled.Annotations = nil
	unlabelled.Spec.InitContainers = nil
	injected := func(changes ...lab.Change) core.PodTemplateSpec {
		return lab.Injected(append(changes, lab.Annotated(map[string]string{lab.StatusKey: `{"containers":["istio-proxy"],"revision":"default"}`}))...)
	}
	for name, template := range map[string]core.PodTemplateSpec{
		"web-0": injected(), "web": injected(), "cart-0": injected(), "plain": unlabelled,
		"orders-5c9": injected(lab.Annotated(map[string]string{"traffic.sidecar.istio.io/excludeOutboundPorts": "5432"})),
	} {
		if s.Get(shop, name) != nil {
			continue
		}
		template.Name = name
		_, err := s.Client().CoreV1().Pods(shop).Create(s.Context(), &core.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}, meta.CreateOptions{})
		s.Must(err)
		s.Until(name, func() bool { return lab.Ready(s.Get(shop, name)) })
		if name == "cart-0" {
			s.inPod(name, "iptables -t nat -I OUTPUT 1 -p tcp --dport 80 -j RETURN")
			s.Until("the audit", func() bool { return strings.Contains(s.Kubectl("istio-cni", "pods", "--check").Stdout, "foreign-rule") })
		}
	}
}

// inNamespaceOf runs a command on the node in the network namespace with an address.
const inNamespaceOf = `address=$1; shift; for n in /run/netns/*; do
  if nsenter --net=$n ip -o addr | grep -qF "inet $address/"; then exec nsenter --net=$n -- "$@"; fi
done; exit 1`

// inPod runs a command on the node in the network namespace of a pod.
func (s *scenario) inPod(name, line string) {
	s.Helper()
	s.OnNode("sh", append([]string{"-c", inNamespaceOf, "sh", s.Get(shop, name).Status.PodIP}, strings.Fields(line)...)...)
}
