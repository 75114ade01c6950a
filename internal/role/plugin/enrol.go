package plugin

import (
	"cmp"
	"context"
	"fmt"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
)

// enrol has the node agent put the pod into the ambient mesh: only the agent programs namespaces of such pods. The prefix of the
// reference's plugin is in the error, for those who search for it.
func (c *call) enrol(ctx context.Context, before types.Result) error {
	action := fmt.Sprintf("istio-cni cannot enrol pod %s in the ambient mesh", c.pod)
	at, err := c.enter(action)
	if err != nil {
		return err
	}
	at.Close() // the agent opens it by its path
	addresses, err := eventIPs(before)
	if err != nil {
		return failure(types.ErrDecodingFailure, action, err)
	}
	err = agentapi.PostEvent(ctx, cmp.Or(c.conf.RunDir, cniconf.DefaultRunDir), agentapi.Event{
		Netns: c.args.Netns, PodName: c.report.Pod, PodNamespace: c.report.Namespace, PodUID: c.uid, IPs: addresses,
	})
	c.phase(agentapi.PhaseProgram)
	if err != nil {
		return failure(types.ErrTryAgainLater, action, fmt.Errorf("istio-cni cmdAdd failed to contact node Istio CNI agent: %w", err))
	}
	c.log.InfoContext(ctx, "enrolled the pod in the ambient mesh")
	return nil
}

// eventIPs returns the addresses of a CNI result, in their order.
func eventIPs(result types.Result) (all []agentapi.EventIP, err error) {
	current, err := types100.NewResultFromResult(result)
	if err != nil {
		return nil, err
	}
	for _, ip := range current.IPs {
		if ip != nil { // null in the list
			all = append(all, agentapi.EventIP{Interface: ip.Interface, Address: ip.Address, Gateway: ip.Gateway})
		}
	}
	return all, nil
}
