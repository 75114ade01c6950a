package sandbox

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/internal/node/hostpath"
	"github.com/meshcni/istio-cni/internal/node/netns"
)

func TestCgroup_Pod(t *testing.T) {
	t.Parallel()
	const uid, other = "0f5d3a52-4d64-4b2b-9d5a-6d1d2a3b4c5d", "99999999-4d64-4b2b-9d5a-6d1d2a3b4c5d"
	const under = "0f5d3a52_4d64_4b2b_9d5a_6d1d2a3b4c5d"
	for text, want := range map[string]string{
		"": "", "0::/": "", "0::/system.slice/containerd.service": "", "no line": "", "0::/../..": "",
		"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + under + ".slice/cri-containerd-1.scope": uid,
		"0::/kubepods.slice/kubepods-pod" + under + ".slice":                                                           uid,
		"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod" + under + ".slice/x":                           uid,
		"0::/../../kubepods-besteffort-pod" + under + ".slice/crio-1.scope/container":                                  uid,
		"0::/kubepods/besteffort/pod" + uid + "/0123":                                                                  uid,
		"2:cpu,cpuacct:/kubepods/pod" + uid + "/1\n1:name=systemd:/kubepods/pod" + uid + "/1\n0::/\n":                  uid,
		// A cgroup that a container makes below its own has no effect.
		"0::/kubepods/pod" + uid + "/1/kubepods/pod" + other + "/2": uid,
		// Contradictory lines and static pods name no pod.
		"2:cpu:/kubepods/pod" + uid + "/1\n1:memory:/kubepods/pod" + other + "/1":             "",
		"0::/kubepods/pod0123456789abcdef0123456789abcdef/1":                                  "",
		"0::/kubepods/podman-" + uid:                                                          "",
		"0::/user.slice/pod" + uid[1:] + "z":                                                  "",
		"0::/machine.slice/libpod-" + uid + ".scope":                                          "",
		"0::/kubepods/pod" + uid + "-x/1":                                                     "",
		"0::/a/" + string(make([]byte, 100)) + "/kubepods-pod" + under + ".slice.slice.slice": "",
	} {
		if got := podOfCgroups(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

func TestMounts_NetworkNamespaces(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		mount hostpath.Mount
		want  netns.Inode
	}{
		{hostpath.Mount{Device: "0:4", Root: "net:[4026532281]", Type: "nsfs"}, netns.Inode{Dev: unix.Mkdev(0, 4), Ino: 4026532281}},
		{hostpath.Mount{Device: "0:4", Root: "uts:[4026532281]", Type: "nsfs"}, netns.Inode{}},
		{hostpath.Mount{Device: "0:4", Root: "net:[x]", Type: "nsfs"}, netns.Inode{}},
		{hostpath.Mount{Device: "zero", Root: "net:[1]", Type: "nsfs"}, netns.Inode{}},
		{hostpath.Mount{Device: "0:31", Root: "net:[1]", Type: "tmpfs"}, netns.Inode{}},
		{hostpath.Mount{Device: "0:21", Root: "/", Type: "proc"}, netns.Inode{}},
	} {
		if inode, is := mountedNetNS(tc.mount); inode != tc.want || is != (tc.want != netns.Inode{}) {
			t.Errorf("%+v: got %+v, %v", tc.mount, inode, is)
		}
	}
}
