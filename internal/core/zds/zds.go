// Package zds encodes the messages of the node agent to ztunnel, and decodes ztunnel's (ZDS, protobuf package istio.workload.zds).
//
// It promises the bytes of proto3 for the fields that the protocol has, and messages of at most MaxSize bytes. A decoder skips
// unknown fields, as proto3 demands, and returns an error for anything else that is not such a message, whatever the bytes. It
// knows neither sockets nor descriptors, and not the order of messages.
//
// Start reading at Request. wire.go has the parts of protobuf's encoding.
package zds

import (
	"errors"
	"fmt"
)

// MaxSize is the size of both sides' buffers for a message.
const MaxSize = 1024

// Version is the version of the protocol, in ztunnel's first message.
type Version int32

// V1 is the only version.
const V1 Version = 1

// Kind is the kind of a request: the number of the field in WorkloadRequest.
type Kind uint64

// The requests of the agent. Exactly an Add comes with a descriptor, the pod's network namespace.
const (
	// Add starts a pod.
	Add Kind = 1
	// Del stops a pod.
	Del Kind = 2
	// SnapshotSent ends the snapshot: ztunnel stops the pods that are not in it.
	SnapshotSent Kind = 3
	// Keep leaves a pod running if ztunnel serves it.
	Keep Kind = 5
)

// String returns a word for logs.
func (k Kind) String() string {
	switch k {
	case Add:
		return "add"
	case Del:
		return "delete"
	case SnapshotSent:
		return "end of snapshot"
	case Keep:
		return "keep"
	}
	return fmt.Sprintf("request %d", uint64(k))
}

// Workload is what ztunnel needs to find a pod in istiod's answers (WorkloadInfo).
type Workload struct{ Name, Namespace, ServiceAccount string }

// Request is a message to ztunnel (WorkloadRequest). UID is empty with SnapshotSent, Workload with all kinds but Add.
type Request struct {
	Kind     Kind
	UID      string
	Workload Workload
}

// The numbers of the fields.
const (
	helloVersion, responseAck, ackError = 1, 1, 1

	workloadName, workloadNamespace, workloadAccount = 1, 2, 3

	addUID, addWorkload, delUID, keepUID = 1, 2, 2, 1
)

// Encode returns the message. The error is for one that is too long or not UTF-8.
func (r Request) Encode() ([]byte, error) {
	var body message
	switch r.Kind {
	case Add:
		var w message
		w.text(workloadName, r.Workload.Name)
		w.text(workloadNamespace, r.Workload.Namespace)
		w.text(workloadAccount, r.Workload.ServiceAccount)
		body.text(addUID, r.UID)
		body.message(addWorkload, w) // ztunnel needs it even if it is empty
	case Del:
		body.text(delUID, r.UID)
	case Keep:
		body.text(keepUID, r.UID)
	case SnapshotSent:
	default:
		return nil, fmt.Errorf("unknown kind of request: %d", r.Kind)
	}
	var m message
	m.message(uint64(r.Kind), body)
	return m.finish()
}

// DecodeHello returns the version of ztunnel's first message.
func DecodeHello(data []byte) (v Version, err error) {
	err = decode(data, func(f field) error {
		if f.number != helloVersion {
			return nil
		}
		v = Version(f.value) //nolint:gosec // an enum has its lower 32 bits
		return f.is(wireVarint)
	})
	return v, err
}

// DecodeAck returns the text of the error in ztunnel's answer, or "" for success. The text is foreign.
func DecodeAck(data []byte) (text string, err error) {
	answered := false
	err = decode(data, func(f field) error {
		if f.number != responseAck {
			return nil
		}
		answered = true
		return f.message(func(f field) error {
			if f.number != ackError {
				return nil
			}
			return f.text(&text)
		})
	})
	if err == nil && !answered {
		err = errors.New("the response is empty")
	}
	return text, err
}
