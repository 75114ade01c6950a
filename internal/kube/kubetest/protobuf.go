package kubetest

import (
	"bytes"
	"encoding/json"
	"net/http"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/kubernetes/scheme"
)

// Protobuf makes later watches send events in protobuf to clients that accept it, as the real API server does. Objects must have
// a Kubernetes type.
func (s *Server) Protobuf() { s.locked(func() { s.protobuf = true }) }

// encoding returns the content type of a watch's response, and the function that encodes each line of the JSON stream.
func (s *Server) encoding(r *http.Request) (contentType string, encode func(line []byte) []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.protobuf || !strings.HasPrefix(r.Header.Get("Accept"), runtime.ContentTypeProtobuf) {
		return runtime.ContentTypeJSON, func(line []byte) []byte { return line }
	}
	return runtime.ContentTypeProtobuf + ";stream=watch", frame
}

// frame converts an event from JSON to protobuf, with a length prefix.
func frame(line []byte) []byte {
	var one struct {
		Type   string
		Object json.RawMessage
	}
	err := json.Unmarshal(line, &one)
	must(err)
	typed, _, err := scheme.Codecs.UniversalDeserializer().Decode(one.Object, nil, nil)
	must(err)
	var inner, whole, framed bytes.Buffer
	must(protobuf.NewSerializer(scheme.Scheme, scheme.Scheme).Encode(typed, &inner))
	event := &metav1.WatchEvent{Type: one.Type, Object: runtime.RawExtension{Raw: inner.Bytes()}}
	must(protobuf.NewRawSerializer(scheme.Scheme, scheme.Scheme).Encode(event, &whole))
	_, err = protobuf.LengthDelimitedFramer.NewFrameWriter(&framed).Write(whole.Bytes())
	must(err)
	return framed.Bytes()
}

// must panics after an error, which is a bug in the test.
func must(err error) {
	if err != nil {
		panic(err)
	}
}
