//go:build measure

// A measurement that is no part of a plain run:
//
//	go test -tags measure,urfave_cli_no_docs -v -run TestMemoryOfNodePods ./internal/kube

package kube

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube/kubetest"
)

// TestMemoryOfNodePods measures what following the 250 pods of a node costs, of 10,000 that there are: with all that is
// decoded, and with what a repair needs until it repairs.
func TestMemoryOfNodePods(t *testing.T) {
	const pods, nodes = 10_000, 40
	server := kubetest.NewServer(t)
	size := 0
	for i := range pods {
		data := marshaled(t, injectedPod(i, fmt.Sprintf("node-%d", i%nodes)))
		size += len(data)
		server.Set(data)
	}
	t.Logf("%d pods of %d bytes of JSON", pods, size/pods)
	server.Compact() // the history is not what is measured

	const of = pods / nodes
	none := heapFollowing(t, server, PodScope{Node: "node-none"}, 0)
	for _, way := range []struct {
		name string
		keep func(*Pod)
	}{
		{"all that is decoded", nil},
		{"without the containers' environment and arguments", func(p *Pod) {
			for i := range p.Facts.Containers {
				p.Facts.Containers[i].Env, p.Facts.Containers[i].Args = nil, nil
			}
		}},
		{"names, addresses and statuses", func(p *Pod) {
			p.Facts = sidecar.Facts{
				Namespace: p.Facts.Namespace, Name: p.Facts.Name, UID: p.Facts.UID, HostNetwork: p.Facts.HostNetwork,
			}
			p.Containers = nil
		}},
	} {
		with := heapFollowing(t, server, PodScope{Node: "node-1", Transform: way.keep}, of)
		t.Logf("%s: %d bytes a pod, %d KiB in all", way.name, (with-none)/of, (with-none)>>10)
	}
}

// heapFollowing is what the heap holds while a scope is followed that has some pods.
func heapFollowing(t *testing.T, server *kubetest.Server, scope PodScope, pods int) int {
	t.Helper()
	api := connected(t, server, nil)
	ctx, cancel := context.WithCancel(t.Context())
	var work sync.WaitGroup
	var got int
	synced := make(chan struct{}, 1)
	work.Go(func() {
		api.WatchPods(ctx, scope, Listener[Pod]{
			OnUpdate: func(Pod) { got++ }, OnDelete: func(Pod) {}, OnSync: func() { synced <- struct{}{} }, OnError: func(error) {},
		})
	})
	defer api.Close()
	defer work.Wait()
	defer cancel()
	<-synced
	var m runtime.MemStats
	for range 3 {
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	cancel()
	work.Wait()
	until(t, "the watch stays", func() bool { return server.Watches() == 0 })
	if got != pods {
		t.Fatalf("%d pods were told, want %d", got, pods)
	}
	return int(m.HeapAlloc)
}

// injectedPod is about as large as a pod with a sidecar is.
func injectedPod(i int, node string) *corev1.Pod {
	pod := brokenPod()
	pod.Name, pod.UID, pod.DeletionTimestamp = fmt.Sprintf("web-7d4b9c6f5-%05d", i), types.UID(fmt.Sprintf("uid-%036d", i)), nil
	pod.Spec.NodeName = node
	pod.Annotations["sidecar.istio.io/status"] = strings.Repeat("x", 500)
	pod.Annotations["kubectl.kubernetes.io/last-applied-configuration"] = strings.Repeat("y", 1500)
	for c := range pod.Spec.Containers {
		for e := range 40 {
			pod.Spec.Containers[c].Env = append(pod.Spec.Containers[c].Env,
				corev1.EnvVar{Name: fmt.Sprintf("ISTIO_META_VARIABLE_%d", e), Value: strings.Repeat("v", 40)})
		}
		pod.Spec.Containers[c].Args = strings.Fields(strings.Repeat("--argument=value ", 20))
		for v := range 6 {
			pod.Spec.Containers[c].VolumeMounts = append(pod.Spec.Containers[c].VolumeMounts,
				corev1.VolumeMount{Name: fmt.Sprintf("volume-%d", v), MountPath: "/var/run/secrets/volume"})
		}
	}
	return pod
}
