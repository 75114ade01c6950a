// Package standalone is what controllers have in common that run in a pod of their own or by hand: the way to the API
// server, and ports that are open for as long as they work.
//
// It promises that the ports are open before the work begins and until it has ended. It never decides what the work is.
//
// Start reading at Serve.
package standalone

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"

	"github.com/meshcni/istio-cni/internal/agent/serve"
	"github.com/meshcni/istio-cni/internal/kube"
)

// serviceAccount is where the kubelet puts the credentials of a pod.
const serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount"

// Access is the way to the API server: a kubeconfig, or unless there is one the account of the pod.
func Access(kubeconfig string, getenv func(string) (string, bool)) (kube.Config, error) {
	host, _ := getenv("KUBERNETES_SERVICE_HOST")
	port, _ := getenv("KUBERNETES_SERVICE_PORT")
	if kubeconfig == "" && (host == "" || port == "") {
		return kube.Config{}, errors.New(
			"KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set, as they are in a pod: give --kubeconfig")
	}
	return kube.Config{
		Server: kube.Address{Host: host, Port: port}, Kubeconfig: kubeconfig,
		TokenFile: serviceAccount + "/token", CAFile: serviceAccount + "/ca.crt",
	}, nil
}

// Logger writes records as text or JSON.
func Logger(w io.Writer, level slog.Leveler, asJSON bool) *slog.Logger {
	options := &slog.HandlerOptions{Level: level}
	if asJSON {
		return slog.New(slog.NewJSONHandler(w, options))
	}
	return slog.New(slog.NewTextHandler(w, options))
}

// Serve opens the ports, works, and closes them when the work has ended.
func Serve(ctx context.Context, log *slog.Logger, work func(context.Context) error, ports ...serve.Port) error {
	servers, err := serve.Open(ctx, log, ports...)
	if err != nil {
		return err
	}
	background, end := context.WithCancel(context.WithoutCancel(ctx))
	var serving sync.WaitGroup
	serving.Go(func() {
		if ended := servers.Serve(background); ended != nil {
			log.ErrorContext(background, "serving health and metrics ended", slog.String("error", ended.Error()))
		}
	})
	err = work(ctx)
	end()
	serving.Wait()
	return err
}
