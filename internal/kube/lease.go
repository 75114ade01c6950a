package kube

import (
	"context"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// Lease is a lock that its holder must renew (k8s.io/api/coordination/v1.LeaseSpec). It replaces client-go's tools/leaderelection,
// which links the clientset of all APIs and would slow down each start of the plugin more than the rest of client-go. Both
// read and write the same object in the same way, so that they compete correctly.
type Lease struct {
	Namespace, Name string
	// Holder is empty for a lease without a holder.
	Holder string
	// Duration is the validity of a renewal, in whole seconds.
	Duration          time.Duration
	Acquired, Renewed time.Time
	// Transitions counts the changes of the holder.
	Transitions int

	// object is the object as read, or nil; version is its resourceVersion.
	object  *coordinationv1.Lease
	version string
}

// Exists reports whether the API server has the object.
func (l Lease) Exists() bool { return l.object != nil }

// Same reports whether two reads of the lease have the same resourceVersion.
func (l Lease) Same(other Lease) bool { return l.version == other.version }

// Lease fetches a lease: GET /apis/coordination.k8s.io/v1/namespaces/NAMESPACE/leases/NAME. For a missing object it returns no
// error and a lease for which Exists is false.
func (c *Client) Lease(ctx context.Context, namespace, name string) (Lease, error) {
	object, err := get[*coordinationv1.Lease](ctx, c, leases(), namespace, name)
	if ClassOf(err) == NotFound {
		return Lease{Namespace: namespace, Name: name}, nil
	}
	if err != nil {
		return Lease{}, err
	}
	return leaseOf(object), nil
}

func leaseOf(object *coordinationv1.Lease) Lease {
	spec := object.Spec
	return Lease{
		Namespace: object.Namespace, Name: object.Name, object: object, version: object.ResourceVersion,
		Holder: ptr.Deref(spec.HolderIdentity, ""), Duration: time.Duration(ptr.Deref(spec.LeaseDurationSeconds, 0)) * time.Second,
		Acquired: ptr.Deref(spec.AcquireTime, metav1.MicroTime{}).UTC(), Renewed: ptr.Deref(spec.RenewTime, metav1.MicroTime{}).UTC(),
		Transitions: int(ptr.Deref(spec.LeaseTransitions, 0)),
	}
}

// WriteLease creates a lease that did not exist when it was read, or replaces a lease of unchanged resourceVersion. Otherwise the
// error satisfies [IsConflict]. It preserves the metadata and other fields of the spec, and returns the written lease.
func (c *Client) WriteLease(ctx context.Context, lease Lease) (Lease, error) {
	what := &call{verb: "update", resource: leases(), namespace: lease.Namespace, name: lease.Name}
	object := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: lease.Namespace, Name: lease.Name}}
	if lease.Exists() {
		object = lease.object.DeepCopy()
	} else {
		what.verb, what.name = "create", ""
	}
	object.TypeMeta = metav1.TypeMeta{Kind: what.resource.kind, APIVersion: coordinationv1.SchemeGroupVersion.String()}
	spec := &object.Spec
	spec.HolderIdentity, spec.LeaseDurationSeconds = &lease.Holder, new(int32(lease.Duration/time.Second)) //nolint:gosec // a small number
	spec.AcquireTime, spec.RenewTime = new(metav1.NewMicroTime(lease.Acquired)), new(metav1.NewMicroTime(lease.Renewed))
	spec.LeaseTransitions = new(int32(lease.Transitions)) //nolint:gosec // a small number
	what.body = object
	written, err := fetch[*coordinationv1.Lease](ctx, c, what)
	if err != nil {
		return Lease{}, err
	}
	return leaseOf(written), nil
}
