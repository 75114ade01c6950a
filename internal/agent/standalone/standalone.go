// Package standalone has the common parts of controllers that run in their own pod or by hand: their settings, the access
// to the API server, and ports that are open while they work.
//
// It promises that the ports are open from before the work begins until it has ended. It never chooses the work.
//
// Start reading at Process.
package standalone

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"

	"github.com/meshcni/istio-cni/internal/agent/serve"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/pluginlog"
)

// serviceAccount is the directory in which the kubelet mounts the credentials of a pod.
const serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount"

// Process has the settings of a standalone controller.
type Process struct {
	// HealthPort and MonitoringPort are TCP ports; 0 is off.
	HealthPort, MonitoringPort uint16
	// Kubeconfig replaces the service account of the pod, unless "".
	Kubeconfig string
	LogLevel   pluginlog.Level
	LogJSON    bool
}

// Rows returns the settings. Variables of the ports begin with prefix; scope is the controller's name in --log_output_level.
func (p *Process) Rows(prefix, scope, healthPort, monitoringPort, logJSON string) []settings.Setting {
	return []settings.Setting{
		{
			Name: "kubeconfig", Arg: "FILE", Env: []string{"KUBECONFIG"}, Use: "used instead of the pod's service account",
			Value: settings.Text(&p.Kubeconfig, nil),
		},
		{
			Name: "health-port", Arg: "PORT", Env: []string{prefix + "HEALTH_PORT"}, Default: healthPort,
			Use: "/healthz and /readyz; 0 is off. It is not the agent's 8000: both may be in one pod", Value: settings.Port(&p.HealthPort, 0),
		},
		{
			Name: "monitoring-port", Arg: "PORT", Env: []string{prefix + "MONITORING_PORT"}, Default: monitoringPort,
			Use: "metrics; 0 is off. It is not the agent's 15014", Value: settings.Port(&p.MonitoringPort, 0),
		},
		{
			Name: "log_output_level", Arg: "LEVEL", Env: []string{"LOG_LEVEL"}, Default: "info",
			Use: "debug, info, warn, error or none, or SCOPE:LEVEL pairs with this program's scope, default or all",
			Value: settings.Of(&p.LogLevel, func(s string) (pluginlog.Level, error) {
				scopes, err := pluginlog.ParseScopes(s)
				return scopes.Of(scope), err
			}, pluginlog.Level.String),
		},
		{Name: "log_as_json", Env: []string{"LOG_AS_JSON"}, Default: logJSON, Use: "log JSON", Value: settings.Bool(&p.LogJSON)},
	}
}

// ClientConfig returns the access to the API server: a kubeconfig or, without one, the service account of the pod. The error
// joins the errors of the access and of the ports.
func (p *Process) ClientConfig(getenv func(string) (string, bool)) (kube.Config, error) {
	var portErr, serverErr error
	if p.HealthPort != 0 && p.HealthPort == p.MonitoringPort {
		portErr = fmt.Errorf("--health-port and --monitoring-port are both %d", p.HealthPort)
	}
	host, _ := getenv("KUBERNETES_SERVICE_HOST")
	port, _ := getenv("KUBERNETES_SERVICE_PORT")
	if p.Kubeconfig == "" && (host == "" || port == "") {
		serverErr = errors.New(
			"KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set, as they are in a pod: give --kubeconfig")
	}
	return kube.Config{
		Server: kube.Address{Host: host, Port: port}, Kubeconfig: p.Kubeconfig,
		TokenFile: serviceAccount + "/token", CAFile: serviceAccount + "/ca.crt",
	}, errors.Join(serverErr, portErr)
}

// Logger returns a logger that writes records as text or JSON.
func Logger(w io.Writer, level slog.Leveler, asJSON bool) *slog.Logger {
	options := &slog.HandlerOptions{Level: level}
	if asJSON {
		return slog.New(slog.NewJSONHandler(w, options))
	}
	return slog.New(slog.NewTextHandler(w, options))
}

// Serve opens the ports, runs work, and closes the ports after work has ended.
func (p *Process) Serve(ctx context.Context, log *slog.Logger, health, metrics http.Handler, work func(context.Context) error) error {
	return serve.While(ctx, log, work,
		serve.Port{Flag: "--health-port", Number: int(p.HealthPort), Handler: health},
		serve.Port{Flag: "--monitoring-port", Number: int(p.MonitoringPort), Handler: metrics})
}
