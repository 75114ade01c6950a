package installer_test

import (
	"fmt"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
)

// notYet is what a condition says while it is not met.
func notYet(format string, args ...any) error { return fmt.Errorf(format, args...) }

func configMap(data map[string]string) []byte {
	return kubetest.ConfigMap(nodetest.Namespace, "istio-cni-config", data)
}
