// Package zds encodes the messages of the node agent to ztunnel, and decodes ztunnel's (ZDS, protobuf package istio.workload.zds).
//
// It promises the bytes of proto3 for the fields that the protocol has, and messages of at most MaxSize bytes. A decoder skips
// unknown fields, as proto3 demands, and returns an error for anything else that is not such a message, whatever the bytes. It
// knows neither sockets nor descriptors, and not the order of messages.
//
// Start reading at Request. wire.go has the parts of protobuf's encoding.
package zds

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// MaxSize is the size of both sides' buffers for a message.
const MaxSize = 1024

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

// Encode returns the message. The error is for one that is too long or not UTF-8.
func (r Request) Encode() ([]byte, error) {
	texts := []string{r.UID, r.Workload.Name, r.Workload.Namespace, r.Workload.ServiceAccount}
	if all := strings.Join(texts, " "); !utf8.ValidString(all) {
		return nil, fmt.Errorf("%q is not UTF-8", all)
	}
	var body, workload []byte
	switch r.Kind {
	case Add:
		for i, text := range texts[1:] {
			workload = appendText(workload, uint64(i+1), text)
		}
		body = appended(appendText(nil, 1, r.UID), 2, string(workload)) // ztunnel needs it even if it is empty
	case Del:
		body = appendText(nil, 2, r.UID)
	case Keep:
		body = appendText(nil, 1, r.UID)
	case SnapshotSent:
	default:
		return nil, fmt.Errorf("unknown kind of request: %d", r.Kind)
	}
	data := appended(nil, uint64(r.Kind), string(body))
	if len(data) > MaxSize {
		return nil, fmt.Errorf("the message has %d bytes, %d is the maximum", len(data), MaxSize)
	}
	return data, nil
}

// appendText adds a string. The empty one is the default of proto3 and is left out.
func appendText(message []byte, field uint64, text string) []byte {
	if text == "" {
		return message
	}
	return appended(message, field, text)
}

// CheckHello returns an error if the text is not ztunnel's first message. Its version, field 1, has one value only.
func CheckHello(data []byte) error {
	_, err := first(data, wireVarint)
	return err
}

// DecodeAck returns the text of the error in ztunnel's answer, or "" for success. The text is foreign.
func DecodeAck(data []byte) (text string, err error) {
	acks, err := first(data, wireBytes)
	if err == nil && len(acks) == 0 {
		err = errors.New("the response is empty")
	}
	if err != nil {
		return "", err
	}
	texts, err := first(bytes.Join(acks, nil), wireBytes) // the parts of a message are merged
	for _, part := range texts {
		text = string(part)
	}
	if err == nil && !utf8.ValidString(text) {
		err = errors.New("the error is not UTF-8")
	}
	return text, err
}
