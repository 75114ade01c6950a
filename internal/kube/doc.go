// Package kube is the program's way to the API server. A [Client] is built on client-go's REST client: for the plugin, which
// asks once for one pod by the kubeconfig that the node agent wrote, and for the agent and the controllers.
//
// It promises that a pod's good answer costs one connection and one GET, that a look-up ends within its budget and any
// other request within Config.Timeout whatever the server does, that a reflector runs until the caller's context ends, and
// that a failure is an [Error]: what was asked, of what server, what came back. No credential is ever
// part of an error.
//
// It never changes anything in the cluster but what the taint controller is for ([Client.PatchTaints],
// [Client.PatchCondition], the Lease of [Client.WriteLease]), what race repair is for ([Client.DeletePod],
// [Client.EvictPod], [Client.LabelPod]) and events ([Client.CreateEvent], [Client.CountEvent]). It follows no redirect (the
// token would go along), logs nothing, lets client-go log nothing, and hands out no type of the
// Kubernetes libraries: a pod leaves it as a [Pod] with [sidecar.Facts], other objects as small structs. It links no typed or
// dynamic client, as each start of the plugin would pay for it.
//
// Start reading at [Client] in client.go: the requests, and [Client.Lookup] in lookup.go: the retries.
// error.go is the vocabulary of failures, kubeconfig.go reads the file. watch.go has client-go's reflector and what bounds
// it, objects.go the reduced objects, write.go the changes, lease.go the lock, events.go events.
package kube
