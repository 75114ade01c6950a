package kube

import (
	"encoding/json"
	"fmt"
	"net/http"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

func TestPod_Facts(t *testing.T) {
	for name, test := range map[string]struct {
		metadata, spec string // members of JSON objects
		want           sidecar.Facts
	}{
		"a bare pod has no containers and no identities": {want: sidecar.Facts{Containers: []sidecar.Container{}}},
		"init containers come first and are marked, native sidecars among them": {
			spec: `"containers": [{"name": "app"}, {"name": "logger"}],
				"initContainers": [{"name": "migrate"}, {"name": "istio-proxy", "restartPolicy": "Always", "args": ["proxy", "sidecar"]}]`,
			want: sidecar.Facts{Containers: []sidecar.Container{
				{Name: "migrate", Init: true}, {Name: "istio-proxy", Init: true, Args: []string{"proxy", "sidecar"}}, {Name: "app"}, {Name: "logger"},
			}},
		},
		"labels, annotations and hostNetwork": {
			`, "labels": {"app": "cart", "sidecar.istio.io/inject": ""}, "annotations": {"sidecar.istio.io/status": ""}`, `"hostNetwork": true`,
			sidecar.Facts{
				HostNetwork: true, Labels: map[string]string{"app": "cart", "sidecar.istio.io/inject": ""},
				Annotations: map[string]string{"sidecar.istio.io/status": ""}, Containers: []sidecar.Container{},
			},
		},
		"user and group 0 are statements, of the pod as of the container": {
			spec: `"securityContext": {"runAsUser": 0, "runAsGroup": 2000}, "containers": [
				{"name": "zero", "securityContext": {"runAsUser": 0, "runAsGroup": 0}},
				{"name": "group", "securityContext": {"runAsGroup": 1337}}, {"name": "none", "securityContext": null}]`,
			want: sidecar.Facts{RunAsUser: new(int64(0)), RunAsGroup: new(int64(2000)), Containers: []sidecar.Container{
				{Name: "zero", RunAsUser: new(int64(0)), RunAsGroup: new(int64(0))}, {Name: "group", RunAsGroup: new(int64(1337))}, {Name: "none"},
			}},
		},
		"literal variables keep order and duplicates, valueFrom gives an empty value, envFrom none": {
			spec: `"containers": [{"name": "c", "args": null, "envFrom": [{"configMapRef": {"name": "DISABLE_ENVOY"}}], "env": [
				{"name": "A", "value": "1"}, {"name": "B"}, {"name": "A", "value": "2"},
				{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]}]`,
			want: sidecar.Facts{Containers: []sidecar.Container{
				{Name: "c", Env: []sidecar.EnvVar{{Name: "A", Value: "1"}, {Name: "B"}, {Name: "A", Value: "2"}, {Name: "POD_NAME"}}},
			}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			test.want.Namespace, test.want.Name, test.want.UID = "shop", "cart", "u"
			got, err := Facts(fmt.Appendf(nil, `{"metadata": {"namespace": "shop", "name": "cart", "uid": "u"%s}, "spec": {%s}}`, test.metadata, test.spec))
			if diff := cmp.Diff(test.want, got); diff != "" || err != nil {
				t.Errorf("%v, facts (-want +got):\n%s", err, diff)
			}
		})
	}
}

func TestPod_BadResponses(t *testing.T) {
	for name, document := range map[string]string{
		"half a document":           `{"kind":"Pod","apiVersion":"v1","metadata":{"na`,
		"two documents":             `{"kind":"Pod"}{"kind":"Pod"}`,
		"null":                      `null`,
		"a pod of another version":  `{"kind":"Pod","apiVersion":"v2","metadata":{"name":"cart","namespace":"shop"}}`,
		"a pod without a name":      `{"kind":"Pod","apiVersion":"v1","metadata":{"namespace":"shop"}}`,
		"a pod without a namespace": `{"kind":"Pod","apiVersion":"v1","metadata":{"name":"cart"}}`,
		"a user that is no number": `{"kind":"Pod","apiVersion":"v1","metadata":{"name":"cart","namespace":"shop"},
			"spec":{"securityContext":{"runAsUser":"root"}}}`,
	} {
		t.Run(name, func(t *testing.T) {
			got, err := answered([]byte(document)).Pod(t.Context(), PodRef{Namespace: "shop", Name: "cart"})
			if ClassOf(err) != Undecodable || got.Facts.Name != "" {
				t.Errorf("got %+v, %v, want Undecodable", got, err)
			}
		})
	}
}

// answered is a client whose server has one answer.
func answered(body []byte) *Client {
	return clientOf(answers(http.StatusOK, body), Config{Kubeconfig: "/no/such/istio-cni-kubeconfig"})
}

// Facts is what a client keeps of a pod for decisions.
func Facts(document []byte) (sidecar.Facts, error) {
	pod, err := decodePod(document)
	return pod.Facts, err
}

// FuzzPod compares the client with the API's own types: a document that both can decode gives the same facts.
func FuzzPod(f *testing.F) {
	f.Add([]byte(`{"kind":"Pod","apiVersion":"v1","metadata":{"name":"cart","namespace":"shop","uid":"u"},"spec":{"hostNetwork":true,
		"securityContext":{"runAsUser":0},"initContainers":[{"name":"i","args":["x"],"securityContext":{"runAsGroup":7}}]}}`))
	f.Add([]byte(`{"kind":"Pod","apiVersion":"v1","metadata":{"name":"cart","namespace":"shop"},"spec":{"containers":[null]}}`))
	f.Add([]byte(`[`))
	f.Fuzz(func(t *testing.T, document []byte) {
		got, err := answered(document).Pod(t.Context(), PodRef{Namespace: "shop", Name: "cart"})
		var pod corev1.Pod
		if json.Unmarshal(document, &pod) != nil {
			return
		}
		isPod := pod.Kind == "Pod" && pod.APIVersion == "v1" && pod.Name == "cart" && pod.Namespace == "shop"
		if isPod != (err == nil) {
			t.Fatalf("the API's types read the pod: %t; the client: %v", isPod, err)
		}
		if err == nil && !cmp.Equal(factsOf(&pod), got.Facts) {
			t.Errorf("facts (-API types +client):\n%s", cmp.Diff(factsOf(&pod), got.Facts))
		}
	})
}
