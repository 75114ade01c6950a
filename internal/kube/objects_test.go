package kube

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
)

func TestFacts(t *testing.T) {
	for _, test := range []struct {
		name string
		pod  kubetest.Pod
		want sidecar.Facts
	}{
		{
			name: "a bare pod has no containers and no identities",
			pod:  kubetest.Pod{UID: "u1"},
			want: sidecar.Facts{UID: "u1", Containers: []sidecar.Container{}},
		},
		{
			name: "init containers come first and are marked, native sidecars among them",
			pod: kubetest.Pod{
				Containers: []kubetest.Container{{Name: "app"}, {Name: "logger"}},
				InitContainers: []kubetest.Container{
					{Name: "migrate"},
					{Name: "istio-proxy", RestartPolicy: "Always", Args: []string{"proxy", "sidecar"}},
				},
			},
			want: sidecar.Facts{
				Containers: []sidecar.Container{
					{Name: "migrate", Init: true},
					{Name: "istio-proxy", Init: true, Args: []string{"proxy", "sidecar"}},
					{Name: "app"},
					{Name: "logger"},
				},
			},
		},
		{
			name: "labels, annotations and hostNetwork are taken over",
			pod: kubetest.Pod{
				HostNetwork: true,
				Labels:      map[string]string{"app": "cart", "sidecar.istio.io/inject": ""},
				Annotations: map[string]string{"sidecar.istio.io/status": ""},
			},
			want: sidecar.Facts{
				HostNetwork: true,
				Labels:      map[string]string{"app": "cart", "sidecar.istio.io/inject": ""},
				Annotations: map[string]string{"sidecar.istio.io/status": ""},
				Containers:  []sidecar.Container{},
			},
		},
		{
			name: "user and group 0 are statements, of the pod as of the container",
			pod: kubetest.Pod{
				RunAsUser: new(int64(0)), RunAsGroup: new(int64(2000)),
				Containers: []kubetest.Container{
					{Name: "zero", RunAsUser: new(int64(0)), RunAsGroup: new(int64(0))},
					{Name: "group", RunAsGroup: new(int64(1337))},
					{Name: "none"},
				},
			},
			want: sidecar.Facts{
				RunAsUser: new(int64(0)), RunAsGroup: new(int64(2000)),
				Containers: []sidecar.Container{
					{Name: "zero", RunAsUser: new(int64(0)), RunAsGroup: new(int64(0))},
					{Name: "group", RunAsGroup: new(int64(1337))},
					{Name: "none"},
				},
			},
		},
		{
			name: "literal variables keep order and duplicates, valueFrom gives an empty value",
			pod: kubetest.Pod{
				Containers: []kubetest.Container{{
					Name:         "istio-proxy",
					Env:          []kubetest.EnvVar{{Name: "A", Value: "1"}, {Name: "B"}, {Name: "A", Value: "2"}},
					EnvFromField: []kubetest.EnvVar{{Name: "POD_NAME", Value: "metadata.name"}},
				}},
			},
			want: sidecar.Facts{
				Containers: []sidecar.Container{{
					Name: "istio-proxy",
					Env:  []sidecar.EnvVar{{Name: "A", Value: "1"}, {Name: "B"}, {Name: "A", Value: "2"}, {Name: "POD_NAME"}},
				}},
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.pod.Namespace, test.pod.Name, test.want.Namespace, test.want.Name = "shop", "cart", "shop", "cart"
			got, err := Facts(test.pod.JSON(t))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("facts (-want +got):\n%s", diff)
			}
		})
	}
}

func TestFactsIgnoresEnvFrom(t *testing.T) {
	got, err := Facts([]byte(`{"kind":"Pod","apiVersion":"v1","metadata":{"name":"p","namespace":"n"},"spec":{"containers":[
		{"name":"c","envFrom":[{"configMapRef":{"name":"DISABLE_ENVOY"}}],"securityContext":null,"env":null,"args":null}]}}`))
	if err != nil {
		t.Fatal(err)
	}
	want := []sidecar.Container{{Name: "c"}}
	if diff := cmp.Diff(want, got.Containers); diff != "" {
		t.Errorf("containers (-want +got):\n%s", diff)
	}
}

func TestPodRefusesAnAnswer(t *testing.T) {
	for name, document := range map[string]string{
		"nothing":                   ``,
		"half a document":           `{"kind":"Pod","apiVersion":"v1","metadata":{"na`,
		"HTML":                      `<html>`,
		"two documents":             `{"kind":"Pod"}{"kind":"Pod"}`,
		"null":                      `null`,
		"a Status":                  `{"kind":"Status","apiVersion":"v1"}`,
		"a pod of another version":  `{"kind":"Pod","apiVersion":"v2","metadata":{"name":"cart","namespace":"shop"}}`,
		"a pod without a name":      `{"kind":"Pod","apiVersion":"v1","metadata":{"namespace":"shop"}}`,
		"a pod without a namespace": `{"kind":"Pod","apiVersion":"v1","metadata":{"name":"cart"}}`,
		"a user that is no number": `{"kind":"Pod","apiVersion":"v1","metadata":{"name":"cart","namespace":"shop"},
			"spec":{"securityContext":{"runAsUser":"root"}}}`,
	} {
		t.Run(name, func(t *testing.T) {
			got, err := answered([]byte(document)).Pod(t.Context(), PodKey{Namespace: "shop", Name: "cart"})
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

// FuzzPod holds a client to the API's own types: whatever document both can read says the same to both.
func FuzzPod(f *testing.F) {
	f.Add(kubetest.Pod{
		Namespace: "shop", Name: "cart", UID: "u", HostNetwork: true, RunAsUser: new(int64(0)),
		InitContainers: []kubetest.Container{{Name: "i", Args: []string{"x"}, RunAsGroup: new(int64(7))}},
	}.JSON(f))
	f.Add([]byte(`{"kind":"Pod","apiVersion":"v1","metadata":{"name":"cart","namespace":"shop"},"spec":{"containers":[null]}}`))
	f.Add([]byte(`[`))
	f.Fuzz(func(t *testing.T, document []byte) {
		got, err := answered(document).Pod(t.Context(), PodKey{Namespace: "shop", Name: "cart"})
		var pod corev1.Pod
		if json.Unmarshal(document, &pod) != nil {
			return
		}
		isPod := pod.Kind == "Pod" && pod.APIVersion == "v1" && pod.Name == "cart" && pod.Namespace == "shop"
		if isPod != (err == nil) {
			t.Fatalf("the API's types read the pod: %t; the client says: %v", isPod, err)
		}
		if err == nil && !cmp.Equal(factsOf(&pod), got.Facts) {
			t.Errorf("facts (-API types +client):\n%s", cmp.Diff(factsOf(&pod), got.Facts))
		}
	})
}
