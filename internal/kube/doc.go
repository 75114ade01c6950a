// Package kube is the program's hands on the API server: it reads a kubeconfig file and asks for one pod.
//
// It promises that a good answer costs one connection and one GET, that a look-up ends within its [Budget] whatever
// the server does, and that a failure is an [Error] or a [ConfigError]: what was asked, of whom, how often, what came
// back, and what to do about it. No credential is ever part of an error.
//
// It never writes to the API server, sends no other request than GET /api/v1/namespaces/NAMESPACE/pods/NAME, follows no
// redirect (the token would go along), logs nothing, and hands out no type of the Kubernetes libraries: a pod leaves it
// as [sidecar.Facts]. Of those libraries it links the transport alone, because whatever is linked is paid for by every
// start of the plugin: a REST client with a scheme and the kubeconfig loader made the whole look-up cost 1.6 times as
// much, the typed client 2.4 times. So the kubeconfig and the pod are decoded by small structs here, and tests hold
// those to the libraries' own readers.
//
// Start reading at [Client.Pod] in pod.go: the loop, and what is tried again. error.go has the vocabulary of failures,
// kubeconfig.go the file, facts.go the pod.
package kube
