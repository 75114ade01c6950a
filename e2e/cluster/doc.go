// Package cluster runs a real Kubernetes for a test, on this machine and beside it.
//
// It promises, of what Start gives:
//
//   - In tier ControlPlane etcd and kube-apiserver, and the controller manager if asked for; in tier Node containerd,
//     kubelet, controller manager and scheduler as well. All are the real programs. Start returns when the API server is
//     ready; what a node needs takes some seconds more, and tests wait for what they need of it.
//   - Everything runs in namespaces of its own (mount, net, pid, uts, ipc; cgroup in tier Node) below one process, in one
//     directory. When that process ends the kernel ends all others, containers included, and takes the network and the
//     mounts along. It ends by Stop, and when the test's process ends in whatever way, SIGKILL included. Only the
//     directory and empty cgroups outlive a killed test; the next Start removes them. No process is ever looked up by name.
//   - Clusters run beside each other. Each has a link kube-e2e-N and the network 10.99.N.0/24 in the namespace that Start
//     was called in, where the API server answers at https://10.99.N.2:443.
//   - PowerOff and PowerOn are a node that loses power: all processes and what is in memory go, disks stay, and the kubelet
//     reports another boot.
//   - Kill ends a server as a crash would, and Restart starts it again, at the same address and with the same data. Pause and
//     Resume make it hang for a while.
//   - Requests tells what each service account asked of the API server since the start, from its audit log: exactly, with
//     the bodies of patches and of writes of leases.
//   - CollectLogs keeps the log of each server, and the audit log.
//
// It never skips or waits without end: what is missing on the machine is an error that says what to install, and a server
// that dies while it is waited for is an error with the end of its log. It changes nothing on the machine besides that
// directory, those cgroups and that link: /etc, /opt, /var, /run and the sysctls that a kubelet writes are private.
//
// The caller's TestMain must call Main first: the process of the namespaces is the test's own program. Needs root.
//
// Start reading at Start; pidone.go is the inside.
package cluster
