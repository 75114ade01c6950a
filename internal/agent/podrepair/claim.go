package podrepair

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/meshcni/istio-cni/internal/node/podns"
)

// claimed makes sure that no other pod has the addresses by which a namespace was found, as the API server has it.
func (j *job) claimed(found *podns.Namespace) error {
	if found.Source() == podns.FromCache {
		return nil // by its UID
	}
	if other := j.namesake(); other != "" {
		return fmt.Errorf("%w: pod %s has the same ones", podns.ErrClaimed, other)
	}
	return nil
}

// namesake is another pod that has one of the pod's addresses and has not ended, "" if there is none.
func (j *job) namesake() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	for k, e := range j.pods {
		shared := slices.ContainsFunc(e.pod.Addresses, func(a netip.Addr) bool { return slices.Contains(j.pod.Addresses, a) })
		if shared && k != j.pod.Key() && !podOf(e.pod).Ended && !e.pod.Facts.HostNetwork {
			return k.String()
		}
	}
	return ""
}
