// Command kube has the servers of Kubernetes, etcd and kubectl in one binary, for the tests in e2e.
//
// It promises that the program is named by the first argument, as in "kube kubelet --help", or by the name of the executable
// (a link named kube-apiserver), and that it has all its flags. It never selects one by itself.
//
// It is a module of its own because k8s.io/kubernetes requires its 31 staging modules at v0.0.0, which needs replace
// directives (see mkmod.sh), and these should not affect other modules. Module oldest builds this file with the oldest Kubernetes
// that the chart supports; what differs between the two is in kubelet.go. Start reading at main.
package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	client "k8s.io/kubectl/pkg/cmd"
	clientutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
)

// Programs that are not run as the servers are.
const (
	etcd    = "etcd"
	kubectl = "kubectl"
)

// servers returns the cobra commands of the servers; etcd has none.
func servers() map[string]func() *cobra.Command {
	return map[string]func() *cobra.Command{
		"kube-apiserver":          apiserver.NewAPIServerCommand,
		"kube-controller-manager": controllermanager.NewControllerManagerCommand,
		"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
		"kube-proxy":              proxy.NewProxyCommand,
		"kubelet":                 kubeletCommand,
	}
}

func main() {
	known := servers()
	name := filepath.Base(os.Args[0])
	if known[name] == nil && name != etcd && name != kubectl && len(os.Args) > 1 {
		os.Args = os.Args[1:]
		name = os.Args[0]
	}
	switch command := known[name]; {
	case command != nil:
		os.Exit(cli.Run(command()))
	case name == etcd:
		etcdmain.Main(os.Args)
	case name == kubectl:
		// It prints its errors itself, and its exit code can come from a command in a container.
		clientutil.CheckErr(cli.RunNoErrOutput(client.NewDefaultKubectlCommand()))
	default:
		fmt.Fprintf(os.Stderr, "usage: kube PROGRAM [flags], with one of %s, %s, %s\n",
			etcd, kubectl, strings.Join(slices.Sorted(maps.Keys(known)), ", "))
		os.Exit(2)
	}
}
