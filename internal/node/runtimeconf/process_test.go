package runtimeconf_test

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/meshcni/istio-cni/internal/node/runtimeconf"
)

// TestRead_RunningContainerd: its --config goes before the usual file of its socket, and that of a pod's process does not.
func TestRead_RunningContainerd(t *testing.T) {
	t.Parallel()
	const other, sock = "/data/k3s/agent/etc/containerd/config.toml", "/run/k3s/containerd/containerd.sock"
	k3sArgs := "containerd\x00-c\x00" + other + "\x00-a\x00" + sock + "\x00--state\x00/run/k3s/containerd\x00"
	for name, tc := range map[string]struct {
		args, mounts, comm string
		uid                int
		want               string
	}{
		"k3s":                  {args: k3sArgs, mounts: "mnt:[1]", comm: "containerd\n", want: "/data/bin"},
		"with an equals sign":  {args: "containerd\x00--config=" + other + "\x00--address=/var" + sock + "\x00", mounts: "mnt:[1]", comm: "containerd\n", want: "/data/bin"},
		"in a pod":             {args: k3sArgs, mounts: "mnt:[2]", comm: "containerd\n", want: "/opt/cni/bin"},
		"of another user":      {args: k3sArgs, mounts: "mnt:[1]", comm: "containerd\n", uid: 1000, want: "/opt/cni/bin"},
		"of another name":      {args: k3sArgs, mounts: "mnt:[1]", comm: "containerd-shim\n", want: "/opt/cni/bin"},
		"of another socket":    {args: "containerd\x00-c\x00" + other + "\x00", mounts: "mnt:[1]", comm: "containerd\n", want: "/opt/cni/bin"},
		"a relative file":      {args: "containerd\x00-c\x00config.toml\x00-a\x00" + sock, mounts: "mnt:[1]", comm: "containerd\n", want: "/opt/cni/bin"},
		"a flag without value": {args: "containerd\x00-a\x00" + sock + "\x00-c", mounts: "mnt:[1]", comm: "containerd\n", want: "/opt/cni/bin"},
	} {
		root := node(t, map[string]string{
			sock: "", "/proc/1/ns/mnt": "->mnt:[1]", "/proc/77/ns/mnt": "->" + tc.mounts, "/proc/77/comm": tc.comm, "/proc/77/cmdline": tc.args,
			other: "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.cni]\nbin_dirs = ['/data/bin']\n",
		})
		if err := os.Chown(root+"/proc/77", tc.uid, 0); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{tc.want}, runtimeconf.Read(root).BinDirs, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s, -want +got:\n%s", name, diff)
		}
	}
}
