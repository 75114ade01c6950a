// The CustomResourceDefinitions that other projects publish in these modules.
// There is no Go code here: hack/e2e.sh copies the files, and go.sum pins their
// content.
module github.com/meshcni/istio-cni/e2e/renderings/crds

go 1.26.0

require (
	github.com/k8snetworkplumbingwg/network-attachment-definition-client v1.7.7
	github.com/prometheus-operator/prometheus-operator v0.85.0
)
