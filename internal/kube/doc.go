// Package kube is the program's hands on the API server, of two sorts. [Client] is for the plugin, which asks once for
// one pod by the kubeconfig that the node agent wrote. [API] is for the node agent itself, which stays, with the account
// of its own pod.
//
// It promises that a pod's good answer costs one connection and one GET, that a look-up ends within its [Budget] and a
// request of an [API] within its Access.Attempt whatever the server does, that what is followed is followed until the
// caller's context ends, and that a failure is an [Error], a [ConfigError] or a [CallError]: what was asked, of whom,
// what came back. No credential is ever part of an error.
//
// It never changes anything in the cluster but what the taint controller is for ([API.PatchTaints], [API.PatchCondition],
// the Lease of [API.WriteLease]), what race repair is for ([API.DeletePod], [API.EvictPod], [API.LabelPod]) and events,
// which an [EventRecorder] creates and counts. It follows no redirect (the token
// would go along), logs nothing but events that are lost, and hands out no type of the Kubernetes libraries: a pod leaves it as [sidecar.Facts],
// other objects as small structs. Of those libraries it links the transport alone, because whatever is linked is paid for
// by every start of the plugin: a REST client with a scheme and the kubeconfig loader made the whole look-up cost 1.6 times
// as much, the typed client 2.4 times. So kubeconfig and objects are decoded by small structs here, a watch is a loop of
// its own, and tests hold them to the libraries' readers.
//
// Start reading at [Client.Pod] in pod.go: the loop, and what is tried again. error.go has the vocabulary of failures,
// kubeconfig.go the file, facts.go the pod. Of the agent's side, api.go has how a request is sent and its failure
// classed, follow.go how a collection is kept in sight, events.go how events are counted, bounded and sent, placement.go where
// a DaemonSet wants its pods to be. Of the taint controller's, nodes.go has what is kept of nodes and agent pods, patch.go
// how they are changed, lease.go the lock, requirement.go what a ConfigMap requires. kubeconfigtext.go writes what
// kubeconfig.go reads.
package kube
