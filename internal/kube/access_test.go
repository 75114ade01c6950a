package kube_test

import (
	"encoding/base64"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
	"github.com/meshcni/istio-cni/internal/test/check"
)

func TestAllowed_Reviews(t *testing.T) {
	t.Parallel()
	server := kubetest.NewServer(t)
	server.Deny("patch pods/status")
	c, err := kube.NewClient(kube.Config{Kubeconfig: server.Kubeconfig(t)})
	check.OK(t, err)
	defer c.Close()
	for right, want := range map[kube.Right]bool{
		{Verb: "get", Resource: "pods"}:                                                                         true,
		{Verb: "patch", Resource: "pods", Subresource: "status"}:                                                false,
		{Verb: "get", Group: "apps", Resource: "daemonsets", Namespace: "istio-system", Name: "istio-cni-node"}: true,
	} {
		if allowed, err := c.Allowed(t.Context(), right); err != nil || allowed != want {
			t.Errorf("%s: %v, %v", right, allowed, err)
		}
	}
	server.Fail(kubetest.Unauthorized, 1)
	if _, err := c.Allowed(t.Context(), kube.Right{Verb: "get", Resource: "pods"}); kube.ClassOf(err) != kube.Unauthorized {
		t.Errorf("a refused request: %v", err)
	}
}

func TestClient_ObjectsForTheDoctor(t *testing.T) {
	t.Parallel()
	server := kubetest.NewServer(t)
	server.Set(kubetest.ConfigMap("kube-system", "cilium-config", map[string]string{"cni-exclusive": "true"}))
	server.Set([]byte(`{"kind":"Pod","apiVersion":"v1","metadata":{"namespace":"a","name":"here"},"spec":{"nodeName":"node-1"}}`))
	server.Set([]byte(`{"kind":"Pod","apiVersion":"v1","metadata":{"namespace":"a","name":"there"},"spec":{"nodeName":"node-2"}}`))
	c, err := kube.NewClient(kube.Config{Kubeconfig: server.Kubeconfig(t)})
	check.OK(t, err)
	defer c.Close()
	data, err := c.ConfigMap(t.Context(), "kube-system", "cilium-config")
	if err != nil || data["cni-exclusive"] != "true" {
		t.Errorf("got %v, %v", data, err)
	}
	pods, err := c.Pods(t.Context(), "node-1", 500)
	if err != nil || len(pods) != 1 || pods[0].Facts.Name != "here" {
		t.Errorf("got %+v, %v", pods, err)
	}
	if _, err := c.Pods(t.Context(), "Node 1", 500); kube.ClassOf(err) != kube.InvalidKey {
		t.Errorf("a bad name: %v", err)
	}
}

func TestToken_Claims(t *testing.T) {
	t.Parallel()
	server := kubetest.NewServer(t)
	for claims, want := range map[string]kube.Token{
		`{"sub":"system:serviceaccount:istio-system:istio-cni","exp":1800000000}`: {
			Subject: "system:serviceaccount:istio-system:istio-cni", Expires: time.Unix(1800000000, 0),
		},
		`{"sub":"system:serviceaccount:kube-system:istio-cni"}`: {Subject: "system:serviceaccount:kube-system:istio-cni"},
		`{"sub":"admin\u001b[31m"}`:                             {Subject: `admin\u001b[31m`},
	} {
		token := "e30." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".c2ln"
		server.SetToken(token)
		c, err := kube.NewClient(kube.Config{Kubeconfig: server.Kubeconfig(t)})
		check.OK(t, err)
		got, err := c.Token()
		if err != nil || got != want || strings.Contains(fmt.Sprint(err), token) {
			t.Errorf("%s: got %+v, %v", claims, got, err)
		}
	}
	for _, token := range []string{"opaque", "a.b.c", "e30.bm90IGpzb24.x"} {
		server.SetToken(token)
		tokenFile, caFile := server.ServiceAccount(t)
		host, port := server.Address()
		c, err := kube.NewClient(kube.Config{Server: kube.Address{Host: host, Port: port}, TokenFile: tokenFile, CAFile: caFile})
		check.OK(t, err)
		if got, err := c.Token(); err == nil || strings.Contains(err.Error(), token) {
			t.Errorf("%s: %+v, %v", token, got, err)
		}
	}
	if !slices.Equal([]string{
		kube.Token{Subject: "system:serviceaccount:istio-system:istio-cni"}.Namespace(), kube.Token{Subject: "admin"}.Namespace(),
	}, []string{"istio-system", ""}) {
		t.Error("namespaces of subjects")
	}
}
