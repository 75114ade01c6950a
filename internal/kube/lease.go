package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"time"
)

// Lease is a lock that has to be renewed (k8s.io/api/coordination/v1.LeaseSpec).
type Lease struct {
	Namespace, Name string
	// Holder is empty when nobody has it.
	Holder string
	// Duration is for how long it holds after it was renewed, in whole seconds.
	Duration          time.Duration
	Acquired, Renewed time.Time
	// Transitions counts the changes of the holder.
	Transitions int

	// version is empty when there is no such object yet.
	version string
	// metadata and spec are as the API server sent them, with what is not known here.
	metadata json.RawMessage
	spec     map[string]json.RawMessage
}

// Exists tells whether the API server has the object.
func (l Lease) Exists() bool { return l.version != "" }

// Same tells whether nobody has written the lease between two reads of it.
func (l Lease) Same(other Lease) bool { return l.version == other.version }

type wireLease struct {
	Kind       string                     `json:"kind"`
	APIVersion string                     `json:"apiVersion"`
	Metadata   json.RawMessage            `json:"metadata"`
	Spec       map[string]json.RawMessage `json:"spec"`
}

type wireLeaseSpec struct {
	Holder      *string    `json:"holderIdentity"`
	Seconds     *int       `json:"leaseDurationSeconds"`
	Acquired    *microTime `json:"acquireTime"`
	Renewed     *microTime `json:"renewTime"`
	Transitions *int       `json:"leaseTransitions"`
}

// microTime is k8s.io/apimachinery/pkg/apis/meta/v1.MicroTime.
type microTime struct{ time.Time }

func (t microTime) MarshalJSON() ([]byte, error) {
	return json.Marshal(t.UTC().Format("2006-01-02T15:04:05.000000Z07:00"))
}

// Lease fetches one: GET /apis/coordination.k8s.io/v1/namespaces/NAMESPACE/leases/NAME. One that is not there is no error
// and does not exist.
func (a *API) Lease(ctx context.Context, namespace, name string) (Lease, error) {
	wire, err := get[wireLease](ctx, a, leases(), namespace, name)
	if ClassOf(err) == NotFound {
		return Lease{Namespace: namespace, Name: name}, nil
	}
	if err != nil {
		return Lease{}, err
	}
	lease, err := wire.lease(namespace, name)
	if err != nil {
		c := call{verb: "get", resource: leases(), namespace: namespace, name: name}
		return Lease{}, a.failed(&c, "", &failure{class: Undecodable, status: http.StatusOK, err: err})
	}
	return lease, nil
}

func (w wireLease) lease(namespace, name string) (Lease, error) {
	var meta wireObjectMeta
	if err := json.Unmarshal(w.Metadata, &meta); err != nil {
		return Lease{}, err
	}
	if meta.ResourceVersion == "" {
		return Lease{}, errors.New("a lease without resourceVersion")
	}
	lease := Lease{Namespace: namespace, Name: name, version: meta.ResourceVersion, metadata: w.Metadata, spec: w.Spec}
	text, err := json.Marshal(w.Spec)
	if err != nil {
		return Lease{}, err
	}
	var spec wireLeaseSpec
	if err := json.Unmarshal(text, &spec); err != nil {
		return Lease{}, fmt.Errorf("reading the lease: %w", err)
	}
	if spec.Holder != nil {
		lease.Holder = *spec.Holder
	}
	if spec.Seconds != nil {
		lease.Duration = time.Duration(*spec.Seconds) * time.Second
	}
	if spec.Acquired != nil {
		lease.Acquired = spec.Acquired.Time
	}
	if spec.Renewed != nil {
		lease.Renewed = spec.Renewed.Time
	}
	if spec.Transitions != nil {
		lease.Transitions = *spec.Transitions
	}
	return lease, nil
}

// WriteLease creates the lease if it did not exist when it was read, and else replaces it, provided that nobody has
// written it since: otherwise the error is one of [IsConflict]. What is not known of it here stays as it was. It gives the
// lease as it is then.
func (a *API) WriteLease(ctx context.Context, lease Lease) (Lease, error) {
	c := call{verb: "update", resource: leases(), namespace: lease.Namespace, name: lease.Name}
	wire := wireLease{Kind: c.resource.kind, APIVersion: c.resource.apiVersion(), Metadata: lease.metadata}
	if !lease.Exists() {
		c.verb, c.name = "create", ""
		wire.Metadata, _ = json.Marshal(map[string]string{"namespace": lease.Namespace, "name": lease.Name})
	}
	var err error
	if wire.Spec, err = lease.fields(); err != nil {
		return Lease{}, a.failed(&c, "", &failure{class: InvalidKey, err: err})
	}
	c.body = wire
	body, err := a.send(ctx, &c)
	if err != nil {
		return Lease{}, err
	}
	var written wireLease
	var after Lease
	if err = json.Unmarshal(body, &written); err == nil {
		after, err = written.lease(lease.Namespace, lease.Name)
	}
	if err != nil {
		return Lease{}, a.failed(&c, "", &failure{class: Undecodable, status: http.StatusOK, err: err})
	}
	return after, nil
}

// fields is the spec with ours over what was there.
func (l Lease) fields() (map[string]json.RawMessage, error) {
	seconds := int(l.Duration / time.Second)
	own, err := json.Marshal(wireLeaseSpec{
		Holder: &l.Holder, Seconds: &seconds, Acquired: &microTime{l.Acquired}, Renewed: &microTime{l.Renewed},
		Transitions: &l.Transitions,
	})
	if err != nil {
		return nil, err
	}
	fields := map[string]json.RawMessage{}
	maps.Copy(fields, l.spec)
	return fields, json.Unmarshal(own, &fields)
}
