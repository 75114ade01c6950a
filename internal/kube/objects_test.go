package kube

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

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
			pod:  kubetest.Pod{Namespace: "shop", Name: "cart", UID: "u1"},
			want: sidecar.Facts{Namespace: "shop", Name: "cart", UID: "u1", Containers: []sidecar.Container{}},
		},
		{
			name: "init containers come first and are marked, native sidecars among them",
			pod: kubetest.Pod{
				Namespace: "shop", Name: "cart",
				Containers: []kubetest.Container{{Name: "app"}, {Name: "logger"}},
				InitContainers: []kubetest.Container{
					{Name: "migrate"},
					{Name: "istio-proxy", RestartPolicy: "Always", Args: []string{"proxy", "sidecar"}},
				},
			},
			want: sidecar.Facts{
				Namespace: "shop", Name: "cart",
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
				Namespace: "shop", Name: "cart", HostNetwork: true,
				Labels:      map[string]string{"app": "cart", "sidecar.istio.io/inject": ""},
				Annotations: map[string]string{"sidecar.istio.io/status": ""},
			},
			want: sidecar.Facts{
				Namespace: "shop", Name: "cart", HostNetwork: true,
				Labels:      map[string]string{"app": "cart", "sidecar.istio.io/inject": ""},
				Annotations: map[string]string{"sidecar.istio.io/status": ""},
				Containers:  []sidecar.Container{},
			},
		},
		{
			name: "user and group 0 are statements, of the pod as of the container",
			pod: kubetest.Pod{
				Namespace: "shop", Name: "cart", RunAsUser: new(int64(0)), RunAsGroup: new(int64(2000)),
				Containers: []kubetest.Container{
					{Name: "zero", RunAsUser: new(int64(0)), RunAsGroup: new(int64(0))},
					{Name: "group", RunAsGroup: new(int64(1337))},
					{Name: "none"},
				},
			},
			want: sidecar.Facts{
				Namespace: "shop", Name: "cart", RunAsUser: new(int64(0)), RunAsGroup: new(int64(2000)),
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
				Namespace: "shop", Name: "cart",
				Containers: []kubetest.Container{{
					Name:         "istio-proxy",
					Env:          []kubetest.EnvVar{{Name: "A", Value: "1"}, {Name: "B"}, {Name: "A", Value: "2"}},
					EnvFromField: []kubetest.EnvVar{{Name: "POD_NAME", Value: "metadata.name"}},
				}},
			},
			want: sidecar.Facts{
				Namespace: "shop", Name: "cart",
				Containers: []sidecar.Container{{
					Name: "istio-proxy",
					Env:  []sidecar.EnvVar{{Name: "A", Value: "1"}, {Name: "B"}, {Name: "A", Value: "2"}, {Name: "POD_NAME"}},
				}},
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			document := test.pod.JSON(t)
			got, err := Facts(document)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("facts (-want +got):\n%s", diff)
			}
			// What tests send has to be what an API server could send.
			decoder := json.NewDecoder(bytes.NewReader(document))
			decoder.DisallowUnknownFields()
			if err := decoder.Decode(new(corev1.Pod)); err != nil {
				t.Errorf("the test's pod is not of the API: %v", err)
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

func BenchmarkFacts(b *testing.B) {
	document := realisticPod(b)
	b.SetBytes(int64(len(document)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := Facts(document); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkAPITypes is what [BenchmarkFacts] is measured against.
func BenchmarkAPITypes(b *testing.B) {
	document := realisticPod(b)
	b.SetBytes(int64(len(document)))
	b.ReportAllocs()
	for b.Loop() {
		var pod corev1.Pod
		if err := json.Unmarshal(document, &pod); err != nil {
			b.Fatal(err)
		}
	}
}

func TestRealisticPodIsOfTheSizeOfAnInjectedPod(t *testing.T) {
	if size := len(realisticPod(t)); size < 18<<10 || size > 24<<10 {
		t.Errorf("the benchmark's pod has %d bytes, want about 20 KiB", size)
	}
}

// realisticPod is an injected pod with all that a cluster adds to one: environment, probes, volumes, managed fields.
func realisticPod(tb testing.TB) []byte {
	tb.Helper()
	pod := corev1.Pod{
		TypeMeta: metav1.TypeMeta{Kind: "Pod", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: "cart-7d9c5b9f4d-x2x7z", UID: "6f1e0c57-3d0e-4b5e-8c77-0d3f4a6f2b11",
			Labels:      map[string]string{"app": "cart", "security.istio.io/tlsMode": "istio", "pod-template-hash": "7d9c5b9f4d"},
			Annotations: map[string]string{"sidecar.istio.io/status": `{"initContainers":["istio-validation"],"containers":["istio-proxy"]}`},
		},
		Spec: corev1.PodSpec{
			NodeName:        "node-1",
			SecurityContext: &corev1.PodSecurityContext{FSGroup: new(int64(1337))},
			InitContainers:  []corev1.Container{realisticContainer("istio-validation", 12)},
			Containers:      []corev1.Container{realisticContainer("istio-proxy", 36), realisticContainer("cart", 28)},
		},
		Status: corev1.PodStatus{Phase: corev1.PodPending, QOSClass: corev1.PodQOSBurstable},
	}
	for i := range 8 {
		volume := corev1.Volume{Name: fmt.Sprintf("volume-%d", i)}
		volume.Projected = &corev1.ProjectedVolumeSource{DefaultMode: new(int32(420)), Sources: []corev1.VolumeProjection{{
			ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Audience: "istio-ca", Path: "istio-token"},
		}}}
		pod.Spec.Volumes = append(pod.Spec.Volumes, volume)
	}
	for _, manager := range []string{"kube-controller-manager", "kubelet"} {
		fields := `{"f:metadata":{` + strings.Repeat(`"f:annotations":{".":{},"f:prometheus.io/path":{}},`, 100) + `"f:labels":{}}}`
		owned := new(metav1.FieldsV1)
		owned.SetRawString(fields)
		pod.ManagedFields = append(pod.ManagedFields, metav1.ManagedFieldsEntry{
			Manager: manager, Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "v1", FieldsType: "FieldsV1",
			FieldsV1: owned,
		})
	}
	document, err := json.Marshal(&pod)
	if err != nil {
		tb.Fatal(err)
	}
	return document
}

func realisticContainer(name string, variables int) corev1.Container {
	container := corev1.Container{
		Name: name, Image: "registry.example/istio/" + name + ":1.30.0",
		Args:            []string{"proxy", "sidecar", "--domain", "$(POD_NAMESPACE).svc.cluster.local", "--log_output_level=default:info"},
		SecurityContext: &corev1.SecurityContext{RunAsUser: new(int64(1337)), RunAsGroup: new(int64(1337))},
		Resources:       corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m")}},
		ReadinessProbe: &corev1.Probe{PeriodSeconds: 15, ProbeHandler: corev1.ProbeHandler{
			HTTPGet: &corev1.HTTPGetAction{Path: "/healthz/ready", Port: intstr.FromInt32(15021)},
		}},
	}
	for i := range variables {
		variable := corev1.EnvVar{Name: fmt.Sprintf("ISTIO_META_SETTING_%d", i), Value: strings.Repeat("v", i)}
		if i%4 == 0 {
			variable = corev1.EnvVar{Name: fmt.Sprintf("FIELD_%d", i), ValueFrom: &corev1.EnvVarSource{
				FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "status.hostIP"},
			}}
		}
		container.Env = append(container.Env, variable)
	}
	for i := range 8 {
		container.VolumeMounts = append(container.VolumeMounts, corev1.VolumeMount{
			Name: fmt.Sprintf("volume-%d", i), MountPath: fmt.Sprintf("/var/run/secrets/%d", i), ReadOnly: true,
		})
	}
	return container
}
