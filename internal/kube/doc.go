// Package kube is the program's client of the API server. A [Client] wraps client-go's REST client. The plugin uses it to fetch one
// pod with the kubeconfig that the node agent wrote; the agent and the controllers use it for all their requests.
//
// It promises that a successful look-up of a pod costs one connection and one GET (two with the namespace, in ambient mode), that a look-up ends within its budget and any
// other request within Config.Timeout whatever the server does, that a reflector runs until the caller's context ends, and that a
// failure is an [Error] with the request, the server and the response. No error contains a credential.
//
// It never changes anything in the cluster except for the taint controller ([Client.PatchTaints], [Client.PatchCondition], the
// Lease of [Client.WriteLease]), race repair ([Client.DeletePod], [Client.EvictPod], [Client.LabelPod]), the audit
// ([Client.SetPodCondition]), ambient mode ([Client.PatchRedirection]) and events ([Client.CreateEvent], [Client.CountEvent]). It follows no redirect (net/http would
// forward the token), logs nothing, lets client-go log nothing, and returns a pod as a [Pod] with [sidecar.Facts], other watched
// objects as small structs. It links no typed or dynamic client because that would slow down each start of the plugin.
//
// Start reading at [Client] in client.go for the requests, and at [Client.Lookup] in lookup.go for the retries. error.go has the
// classes of failures, kubeconfig.go the file. watch.go has client-go's reflector and its bounds, objects.go the reduced objects,
// write.go the changes, lease.go the lock, events.go events, access.go the rights of the identity.
package kube
