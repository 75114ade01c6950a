package zds_test

import (
	"encoding/hex"
	"slices"
	"strings"
	"testing"

	"github.com/meshcni/istio-cni/internal/core/zds"
	"github.com/meshcni/istio-cni/internal/core/zds/zdstest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func bytesOf(tb testing.TB, text string) []byte {
	tb.Helper()
	data, err := hex.DecodeString(strings.ReplaceAll(text, " ", ""))
	check.OK(tb, err)
	return data
}

// messages has each message with its bytes, written by hand from the definition of the messages.
var messages = []struct {
	name, hex string
	request   zds.Request
}{
	{"add", "0a 11 0a 01 75 12 0c 0a 01 70 12 02 6e 73 1a 03 64 65 66", zds.Request{Kind: zds.Add, UID: "u", Workload: zds.Workload{Name: "p", Namespace: "ns", ServiceAccount: "def"}}},
	{"add without names", "0a 05 0a 01 75 12 00", zds.Request{Kind: zds.Add, UID: "u"}},
	{"del", "12 03 12 01 75", zds.Request{Kind: zds.Del, UID: "u"}},
	{"snapshot sent", "1a 00", zds.Request{Kind: zds.SnapshotSent}},
	{"keep", "2a 03 0a 01 75", zds.Request{Kind: zds.Keep, UID: "u"}},
}

func TestRequest_Bytes(t *testing.T) {
	for _, m := range messages {
		data, err := m.request.Encode()
		check.OK(t, err, m.name)
		check.Equal(t, hex.EncodeToString(data), strings.ReplaceAll(m.hex, " ", ""), m.name)
		back, err := zdstest.DecodeRequest(data)
		check.OK(t, err, m.name)
		check.Equal(t, back, m.request, m.name)
	}
}

func TestHello_Bytes(t *testing.T) {
	check.Equal(t, hex.EncodeToString(zdstest.Hello()), "0801")
	for _, text := range []string{"", "0801", "08 81 80 00", "08 02 08 01", "08 ffffffffffffffffff01", "12 01 78 08 01"} {
		check.OK(t, zds.CheckHello(bytesOf(t, text)), text)
	}
}

func TestAck_Bytes(t *testing.T) {
	for text, want := range map[string]string{"": "0a00", "no": "0a040a026e6f"} {
		data := zdstest.Ack(text)
		check.Equal(t, hex.EncodeToString(data), want)
		back, err := zds.DecodeAck(data)
		check.OK(t, err)
		check.Equal(t, back, text)
	}
}

func TestDecode_UnknownFields(t *testing.T) {
	for name, unknown := range map[string]string{
		"varint": "78 01", "fixed64": "79 0102030405060708", "bytes": "7a 02 ffff", "fixed32": "7d 01020304",
		"largest number": "f8ffffff0f 00",
	} {
		inner := bytesOf(t, unknown+"0a 02 6e 6f"+unknown)
		text, err := zds.DecodeAck(slices.Concat(bytesOf(t, unknown), []byte{0x0a, byte(len(inner))}, inner, bytesOf(t, unknown)))
		check.OK(t, err, name)
		check.Equal(t, text, "no", name)
	}
}

// Proto3: the last string counts, and parts of a message are merged.
func TestDecode_RepeatedFields(t *testing.T) {
	for data, want := range map[string]string{"0a 06 0a 01 75 0a 01 76": "v", "0a 03 0a 01 75 0a 00": "u", "0a 03 0a 01 75 0a 03 0a 01 76": "v"} {
		text, err := zds.DecodeAck(bytesOf(t, data))
		check.OK(t, err, data)
		check.Equal(t, text, want, data)
	}
}

func TestDecode_Refused(t *testing.T) {
	for name, c := range map[string]struct{ data, err string }{
		"truncated tag":                     {"80", "the message is truncated"},
		"truncated size":                    {"0a", "the message is truncated"},
		"truncated string":                  {"0a 02 0a", "the message is truncated"},
		"truncated inside":                  {"0a 02 0a 05", "the message is truncated"},
		"truncated fixed64":                 {"79 01020304050607", "the message is truncated"},
		"truncated fixed32":                 {"7d 010203", "the message is truncated"},
		"size beyond memory":                {"0a ffffffffffffffffff01", "the message is truncated"},
		"hello":                             {"08 01", "field 1 has wire type 0, not 2"},
		"number as text":                    {"0a 02 08 01", "field 1 has wire type 0, not 2"},
		"number too long":                   {"78 ffffffffffffffffffff01", "a number has more than 64 bits"},
		"number of field 0":                 {"02 00", "0 is no number of a field"},
		"number of field large":             {"8080808010 00", "536870912 is no number of a field"},
		"group, which proto3 does not have": {"7b 7c", "field 15 has the unknown wire type 3"},
		"not UTF-8":                         {"0a 03 0a 01 ff", "the error is not UTF-8"},
		"too long":                          {strings.Repeat("7800", 513), "the message has 1026 bytes, 1024 is the maximum"},
	} {
		_, err := zds.DecodeAck(bytesOf(t, c.data))
		refused(t, name, err, c.err)
	}
	_, err := zds.DecodeAck(nil)
	refused(t, "no ack", err, "the response is empty")
	refused(t, "an ack", zds.CheckHello(bytesOf(t, "0a 00")), "field 1 has wire type 2, not 0")
}

func TestEncode_Refused(t *testing.T) {
	long := zds.Request{Kind: zds.Add, UID: strings.Repeat("u", 1024)}
	_, err := long.Encode()
	refused(t, "too long", err, "the message has 1032 bytes, 1024 is the maximum")
	_, err = zds.Request{Kind: zds.Add, Workload: zds.Workload{Name: "\xff"}}.Encode()
	refused(t, "not UTF-8", err, `" \xff  " is not UTF-8`)
	_, err = zds.Request{Kind: 4}.Encode()
	refused(t, "unknown", err, "unknown kind of request: 4")
}

// Kubernetes' longest names fit.
func TestEncode_LongestNames(t *testing.T) {
	name := strings.Repeat("n", 253)
	r := zds.Request{Kind: zds.Add, UID: strings.Repeat("u", 36), Workload: zds.Workload{Name: name, Namespace: name[:63], ServiceAccount: name}}
	_, err := r.Encode()
	check.OK(t, err)
}

func refused(t *testing.T, name string, err error, want string) {
	t.Helper()
	if err == nil || err.Error() != want {
		t.Errorf("%s: got error %v, want %s", name, err, want)
	}
}

// FuzzDecode demands of any bytes that the text of an accepted answer survives ztunnel's encoder, and that an accepted hello ends
// where its bytes end.
func FuzzDecode(f *testing.F) {
	for _, text := range []string{"0801", "0a00", "0a040a026e6f", "0a0612047a0174750a00"} {
		f.Add(bytesOf(f, text))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if text, err := zds.DecodeAck(data); err == nil {
			back, err := zds.DecodeAck(zdstest.Ack(text))
			check.OK(t, err)
			check.Equal(t, back, text)
		}
		if zds.CheckHello(data) == nil && len(data) < zds.MaxSize-1 {
			check.OK(t, zds.CheckHello(slices.Concat(data, zdstest.Hello())))
		}
	})
}

// FuzzEncode demands of any names that ztunnel reads what the agent has written.
func FuzzEncode(f *testing.F) {
	f.Add(uint64(zds.Add), "u", "p", "ns", "default")
	f.Fuzz(func(t *testing.T, kind uint64, uid, name, namespace, account string) {
		r := zds.Request{Kind: zds.Kind(kind), UID: uid}
		switch r.Kind {
		case zds.Add:
			r.Workload = zds.Workload{Name: name, Namespace: namespace, ServiceAccount: account}
		case zds.SnapshotSent:
			r.UID = ""
		case zds.Del, zds.Keep:
		}
		data, err := r.Encode()
		if err != nil {
			return
		}
		back, err := zdstest.DecodeRequest(data)
		check.OK(t, err)
		check.Equal(t, back, r)
	})
}
