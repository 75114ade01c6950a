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

// Protobuf sends the events of later watches in protobuf to clients that accept it, as the real API server does. It is for
// measurements: the type of an object must be one of Kubernetes.
func (s *Server) Protobuf() { s.locked(func() { s.protobuf = true }) }

// encoding returns the content type of a watch's answer, and what encodes the lines of the JSON stream.
func (s *Server) encoding(r *http.Request) (contentType string, encode func(line []byte) []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.protobuf || !strings.HasPrefix(r.Header.Get("Accept"), runtime.ContentTypeProtobuf) {
		return runtime.ContentTypeJSON, func(line []byte) []byte { return line }
	}
	return runtime.ContentTypeProtobuf + ";stream=watch", frame
}

// frame converts an event in JSON to one in protobuf, with its length ahead of it.
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

// must panics at an error of the test.
func must(err error) {
	if err != nil {
		panic(err)
	}
}
