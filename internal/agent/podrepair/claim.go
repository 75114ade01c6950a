package podrepair

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/podns"
)

// errClaimed is a namespace that has the pod's addresses and seems to be another pod's. The API server tells the addresses of a
// sandbox for some time after its end, above all after a restart of the node, when others are given the same ones.
var errClaimed = errors.New("the network namespace with its addresses may be another pod's")

// claimed makes sure that nobody else lays claim to a namespace that was found by its addresses alone.
func (j *job) claimed(ctx context.Context, found *podns.Namespace) error {
	if found.Source() == podns.FromCache {
		return nil // by its UID
	}
	if other := j.namesake(); other != "" {
		return fmt.Errorf("%w: pod %s has the same ones", errClaimed, other)
	}
	other, err := j.owner(ctx, found.Inode())
	if err == nil && other != "" {
		err = fmt.Errorf("%w: libcni's cache has it as that of pod %s", errClaimed, other)
	}
	return err
}

// namesake is another pod that has one of the pod's addresses and has not ended, "" if there is none.
func (j *job) namesake() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	for k, e := range j.pods {
		shared := slices.ContainsFunc(e.pod.Addresses, func(a netip.Addr) bool { return slices.Contains(j.pod.Addresses, a) })
		if shared && k != keyOf(j.pod) && !podOf(e.pod).Ended && !e.pod.Facts.HostNetwork {
			return k.String()
		}
	}
	return ""
}

// maxEntry bounds an entry of the cache, which holds one network configuration and one result.
const maxEntry = 4 << 20

// owner is the pod of another UID that the cache says a namespace to be of, "" if there is none. Entries that cannot be read lay no
// claim.
func (j *job) owner(ctx context.Context, inode netns.Inode) (string, error) {
	if j.places.Cache == "" {
		return "", nil
	}
	names, err := hostfs.List(j.places.Cache, nil)
	if err != nil {
		return "", nil //nolint:nilerr // there is no cache
	}
	for _, name := range names {
		data, _, err := hostfs.ReadFile(filepath.Join(j.places.Cache, name), maxEntry)
		if err != nil || !j.mentioned(data) {
			continue
		}
		if box, ok := podns.ReadSandbox(data); ok && box.UID != "" && box.UID != j.pod.Facts.UID && j.isOf(ctx, box, inode) {
			return box.Namespace + "/" + box.Name, nil
		}
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
	}
	return "", nil
}

// isOf tells whether a namespace is that of another pod's sandbox.
func (j *job) isOf(ctx context.Context, box podns.Sandbox, inode netns.Inode) bool {
	only := podns.Places{Cache: j.places.Cache, Proc: j.places.Proc, HostRoots: j.places.HostRoots}
	theirs, err := only.Find(ctx, podns.Pod{Namespace: box.Namespace, Name: box.Name, UID: box.UID, Addresses: j.pod.Addresses})
	if err != nil {
		return false
	}
	defer theirs.Close()
	return theirs.Source() == podns.FromCache && theirs.Inode() == inode
}

// mentioned tells whether an entry's result has one of the pod's addresses.
func (j *job) mentioned(entry []byte) bool {
	return slices.ContainsFunc(j.pod.Addresses, func(a netip.Addr) bool { return bytes.Contains(entry, []byte(`"`+a.String()+`/`)) })
}
