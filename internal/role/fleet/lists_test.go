package fleet_test

import (
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/audit"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// TestPods_Named: pods with a name or of a workload are listed in any state; a name that no node knows is an error.
func TestPods_Named(t *testing.T) {
	t.Parallel()
	all := "[" + pod("a", audit.Captured) + "," + pod("b", audit.Outside) + "," + pod("c", audit.Drifted) + "]"
	kubectl := standIn(t, fleetOf(1,
		answer{For: of(1, "pods -o json --all --namespace=shop", "").For, Out: all, Code: 3},
		answer{For: of(1, "pods -o json --all", "").For, Out: all, Code: 3},
		of(1, "pods -o json --namespace=shop --selector=app=web", "["+pod("w", audit.Captured)+"]"),
		answer{For: "get -o json deployments.apps -n shop -- web", Out: `{"metadata":{"namespace":"shop","name":"web"},"spec":{"selector":{"matchLabels":{"app":"web"}}}}`},
	))
	for args, want := range map[string]struct {
		code         int
		pods, stderr string
	}{
		"pods b":                   {0, "b", ""},
		"pods shop/a pod/c":        {3, "c a", ""},
		"pods a -n shop":           {0, "a", ""},
		"pods a c --state drifted": {3, "c", ""},
		"pods a nobody":            {1, "a", "error: no pod \"nobody\" with a network of its own on the nodes that answered\n"},
		"pods other/a":             {1, "", "error: no pod \"other/a\" with a network of its own on the nodes that answered\n"},
		"pods deploy/web -n shop":  {0, "w", ""},
	} {
		r := call(kubectl, nil, strings.Fields(args)...)
		var names []string
		for line := range strings.Lines(r.stdout) {
			if _, name, found := strings.Cut(line, "shop/"); found {
				names = append(names, strings.Fields(name)[0])
			}
		}
		if got := strings.Join(names, " "); r.code != want.code || got != want.pods || r.stderr != want.stderr {
			t.Errorf("%s: %+v", args, r)
		}
	}
}

// TestPods_LeftOut: pods that a check left out are counted and named, and make the exit code 1.
func TestPods_LeftOut(t *testing.T) {
	t.Parallel()
	old := strings.Replace(pod("old", audit.Captured), `{`, `{"leftOut":true,`, 1)
	kubectl := standIn(t, fleetOf(2,
		answer{For: of(1, "pods -o json --check", "").For, Out: "[" + old + "," + pod("a", audit.Drifted) + "]", Code: 1, Err: "error: --check left out\n"},
		of(2, "pods -o json --check", "["+pod("b", audit.Captured)+","+pod("c", audit.Outside)+"]"),
	))
	const text = "error: --check left out 1 of 3 pods, which are listed with older results: shop/old; an agent inspects all pods for 45s at most"
	call(kubectl, nil, "pods", "--check").want(t, 1, "n1    shop/old  captured", text)
	call(kubectl, nil, "pods", "--check", "-o", "yaml").want(t, 1, "leftOut: true\n", text)
	call(kubectl, nil, "pods", "--check", "--node=n2").want(t, 0, "n2    shop/b  captured", "")
}

// TestPods_Watch: a watch ends with Ctrl-C, after the table.
func TestPods_Watch(t *testing.T) {
	kubectl := standIn(t, fleetOf(2, of(1, "pods -o json --namespace=shop", "["+pod("a", audit.Drifted)+"]")))
	stdout := check.Output{First: func() { _ = syscall.Kill(os.Getpid(), syscall.SIGINT) }}
	r := callInto(&stdout, kubectl, nil, "pods", "-wn", "shop")
	r.stdout = stdout.String()
	r.want(t, 0, "n1    shop/a  drifted", "node n2: no answer: ")
	check.Equal(t, strings.Count(r.stderr, "node n2: no answer: "), 1, r.stderr)
}

func TestCompletion_Cluster(t *testing.T) {
	t.Parallel()
	kubectl := standIn(t, []answer{
		{For: "--context=east get namespaces -o name", Out: "namespace/shop\nnamespace/shipping\nnamespace/other\n"},
		{For: "get nodes -o name", Out: "node/n1\nnode/n2\n\n"},
		{For: "config get-contexts -o name", Out: "arn:aws:eks:eu:1:cluster/prod\nkind\n"},
		{For: "get pods -n shop -o name", Out: "pod/web-0\npod/web-1\npod/x\x1b[2J\n"},
		{For: "get pods -o name", Out: "pod/mine\n"},
		{For: "get deployments.apps -n shop -o name", Out: "deployment.apps/web\n"},
	})
	for args, want := range map[string]string{
		"":                                   "pods why trace decisions doctor bundle dashboard completion version",
		"wh":                                 "why",
		"help d":                             "decisions doctor dashboard",
		"pods --na":                          "--namespace",
		"pods --agent-s":                     "--agent-selector",
		"why --p":                            "--port",
		"pods --state=not":                   "--state=not-inspected",
		"--context east why -n sh":           "shop shipping",
		"pods --context=east --namespace=sh": "--namespace=shop --namespace=shipping",
		"doctor --node n":                    "n1 n2",
		"doctor --node ":                     "n1 n2",
		"pods --context ":                    "arn:aws:eks:eu:1:cluster/prod kind",
		"why -n shop we":                     "web-0 web-1",
		"why shop/":                          `shop/web-0 shop/web-1 shop/x\u001b[2J`,
		"trace -n shop deploy/":              "deploy/web",
		"trace ":                             "mine",
		"doctor ":                            "",
		"completion z":                       "zsh",
		"pods -o ":                           "table json yaml",
		"why x --timeout ":                   "",
	} {
		r := call(kubectl, nil, append([]string{"__complete"}, strings.Split(args, " ")...)...)
		var got []string
		for line := range strings.Lines(r.stdout) {
			word, _, _ := strings.Cut(strings.TrimSpace(line), "\t")
			got = append(got, word)
		}
		check.Equal(t, strings.Join(got, " "), strings.TrimSpace(want+" :4"), args)
		check.Equal(t, r.stderr, "", args)
	}
}
