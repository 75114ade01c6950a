package nodeagent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/meshcni/istio-cni/internal/agent/installation"
	"github.com/meshcni/istio-cni/internal/kube"
)

// renewalTimeout bounds the request that tries the plugin's token.
const renewalTimeout = 5 * time.Second

// RenewCredentials gives the plugin of an earlier agent, ours or Istio's, this agent's token if the API server refuses the plugin's
// own: a token ends with its pod, and the node's pods would fail until an agent starts. It changes nothing else, and nothing on a
// node without a kubeconfig.
func (o Options) RenewCredentials(ctx context.Context) error {
	file, err := o.Config.KubeconfigFile()
	if err != nil {
		return err
	}
	if _, err = os.Lstat(file); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, renewalTimeout)
	defer cancel()
	api, err := kube.NewClient(kube.Config{Kubeconfig: file})
	if err == nil {
		defer api.Close()
		_, err = api.Pod(ctx, kube.PodRef{Namespace: o.Config.Namespace, Name: o.Config.PodName})
	}
	if kube.ClassOf(err) != kube.Unauthorized {
		return nil
	}
	if err = o.installation(installation.Report{}).RenewKubeconfig(); err != nil {
		return fmt.Errorf("renewing the plugin's credentials: %w", err)
	}
	return nil
}
