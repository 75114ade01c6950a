package kube

import (
	"encoding/base64"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func TestAllowed_Reviews(t *testing.T) {
	t.Parallel()
	server := kubetest.NewServer(t)
	server.Deny("patch pods/status")
	c := newClient(t, server.Kubeconfig(t))
	for right, want := range map[Right]bool{
		{Verb: "get", Resource: "pods"}:                                                                         true,
		{Verb: "patch", Resource: "pods", Subresource: "status"}:                                                false,
		{Verb: "get", Group: "apps", Resource: "daemonsets", Namespace: "istio-system", Name: "istio-cni-node"}: true,
	} {
		if allowed, err := c.Allowed(t.Context(), right); err != nil || allowed != want {
			t.Errorf("%s: %v, %v", right, allowed, err)
		}
	}
	server.Fail(kubetest.Unauthorized, 1)
	check.Equal(t, ClassOf(check.Err(c.Allowed(t.Context(), Right{Verb: "get", Resource: "pods"}))), Unauthorized, "a refused request")
}

func TestClient_ObjectsForTheDoctor(t *testing.T) {
	t.Parallel()
	server := kubetest.NewServer(t)
	server.Set(kubetest.ConfigMap("kube-system", "cilium-config", map[string]string{"cni-exclusive": "true"}))
	server.Set([]byte(`{"kind":"Pod","apiVersion":"v1","metadata":{"namespace":"a","name":"here"},"spec":{"nodeName":"node-1"}}`))
	server.Set([]byte(`{"kind":"Pod","apiVersion":"v1","metadata":{"namespace":"a","name":"there"},"spec":{"nodeName":"node-2"}}`))
	c := newClient(t, server.Kubeconfig(t))
	data, err := c.ConfigMap(t.Context(), "kube-system", "cilium-config")
	if err != nil || data["cni-exclusive"] != "true" {
		t.Errorf("got %v, %v", data, err)
	}
	pods, err := c.Pods(t.Context(), "node-1", 500)
	if err != nil || len(pods) != 1 || pods[0].Facts.Name != "here" {
		t.Errorf("got %+v, %v", pods, err)
	}
	check.Equal(t, ClassOf(check.Err(c.Pods(t.Context(), "Node 1", 500))), InvalidKey, "a bad name")
}

// TestClient_Object: an object comes as it is, and only of a known kind and with a possible name.
func TestClient_Object(t *testing.T) {
	t.Parallel()
	server := kubetest.NewServer(t)
	server.Set(kubetest.ConfigMap("a", "b", map[string]string{"key": "value"}))
	c := newClient(t, server.Kubeconfig(t))
	if text, err := c.Object(t.Context(), "configmaps", "a", "b"); err != nil || !strings.Contains(string(text), `"key":"value"`) {
		t.Errorf("got %s, %v", text, err)
	}
	for _, key := range [][3]string{{"secrets", "a", "b"}, {"configmaps", "a", "../../b"}, {"configmaps", "", "b"}, {"pods", "a/b", "c"}} {
		check.Equal(t, ClassOf(check.Err(c.Object(t.Context(), key[0], key[1], key[2]))), InvalidKey, key)
	}
	check.Equal(t, ClassOf(check.Err(c.Object(t.Context(), "pods", "a", "b"))), NotFound, "a missing pod")
}

func TestToken_Claims(t *testing.T) {
	t.Parallel()
	server := kubetest.NewServer(t)
	for claims, want := range map[string]Token{
		`{"sub":"system:serviceaccount:istio-system:istio-cni","exp":1800000000}`: {
			Subject: "system:serviceaccount:istio-system:istio-cni", Expires: time.Unix(1800000000, 0),
		},
		`{"sub":"system:serviceaccount:kube-system:istio-cni"}`: {Subject: "system:serviceaccount:kube-system:istio-cni"},
		`{"sub":"admin\u001b[31m"}`:                             {Subject: `admin\u001b[31m`},
	} {
		token := "e30." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".c2ln"
		server.SetToken(token)
		got, err := newClient(t, server.Kubeconfig(t)).Token()
		if err != nil || got != want || strings.Contains(fmt.Sprint(err), token) {
			t.Errorf("%s: got %+v, %v", claims, got, err)
		}
	}
	for _, token := range []string{"opaque", "a.b.c", "e30.bm90IGpzb24.x"} {
		server.SetToken(token)
		if got, err := connected(t, server, nil).Token(); err == nil || strings.Contains(err.Error(), token) {
			t.Errorf("%s: %+v, %v", token, got, err)
		}
	}
	for subject, want := range map[string]string{"system:serviceaccount:istio-system:istio-cni": "istio-system", "admin": ""} {
		check.Equal(t, Token{Subject: subject}.Namespace(), want, subject, "is of namespace")
	}
}
