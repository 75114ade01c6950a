// Package cluster runs a real Kubernetes for a test on this machine, isolated from it by namespaces.
//
// It promises, of a cluster returned by Start:
//
//   - Tier ControlPlane runs etcd and kube-apiserver, and kube-controller-manager if Options ask for it; tier Node also runs
//     containerd, kubelet, kube-controller-manager and kube-scheduler. All are the real programs. Start returns when the API
//     server is ready; the node takes some seconds more, and tests wait for the parts that they need.
//   - All processes run in mount, net, pid, uts and ipc namespaces of their own (and cgroup in tier Node), below one first
//     process, in one directory. When the first process exits, the kernel kills all others, containers included, and removes
//     the network and the mounts. It exits by Stop, and with the test process, also after SIGKILL. Only the directory and
//     empty cgroups remain of a killed test; the next Start removes them. No process is looked up by name.
//   - Join adds a machine: a second containerd and kubelet in namespaces and a directory of their own, which end in the same
//     ways. Nodes and pods reach each other by their own addresses, without translation.
//   - Several clusters can run at once. Each machine has a veth link kube-e2e-N and the network 10.99.N.0/24 in the network
//     namespace of Start's caller; the API server listens at https://10.99.N.2:443 of the first machine.
//   - PowerOff and PowerOn simulate a power failure of one machine: processes and memory are lost, files remain, and the
//     kubelet reports another boot ID.
//   - Kill ends a server with SIGKILL; Restart starts it again at the same address and with the same data.
//   - Requests returns each request of a service account to the API server since Start, from the audit log, with the bodies
//     of patches, creates and updates of nodes and leases.
//   - CollectLogs copies the log of each server, and the audit log.
//
// It never skips a test and never waits without a bound: a missing program is an error that names the package to install, and
// a server that exits while Start waits for it is an error with the end of its log. It changes nothing on the machine besides
// the directory, the cgroups and the link: /etc, /opt, /var, /run and the sysctls that a kubelet writes are private.
//
// The caller's TestMain must call Main first, because the first process of the namespaces is the test binary itself. It needs
// root.
//
// Start reading at Start and Join; pidone.go is the first process.
package cluster
