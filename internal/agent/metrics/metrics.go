// Package metrics has the metrics of the node agent, race repair and the taint controller, and serves them to Prometheus.
//
// It promises the names, labels and values of the reference's node agent for metrics that both have, the metrics of its dashboards that a
// node agent can serve, the prefix istio_cni_ for all others, a HELP and a TYPE line for every family, and from the start a series with 0
// for each value of a closed label, so that an alert sees the first increase. Labels are closed sets, except for the names of pods that
// are not captured (100 at most).
//
// It opens no port, keeps no state besides its values, and decides nothing.
//
// Start reading at Metrics. Each family is declared once, next to the code that counts it: here and in adds.go, ambient.go,
// audit.go, repair.go and taint.go; registry.go writes the text format.
package metrics

import "time"

// InstallResult is the result of an installation. The values are the reference's.
type InstallResult string

// An installation succeeds, or ends at the step that the value names.
const (
	InstallSuccess            InstallResult = "SUCCESS"
	CopyBinariesFailure       InstallResult = "COPY_BINARIES_FAILURE"
	CreateKubeconfigFailure   InstallResult = "CREATE_KUBECONFIG_FAILURE"
	CreateCNIConfigFailure    InstallResult = "CREATE_CNI_CONFIG_FAILURE"
	ReadServiceAccountFailure InstallResult = "READ_SERVICE_ACCOUNT_FAILURE"
)

// Artifact is a file or configuration that the agent keeps on the node.
type Artifact string

// The artifacts that the agent restores.
const (
	Binary     Artifact = "binary"
	Kubeconfig Artifact = "kubeconfig"
	Config     Artifact = "config"
)

// Writer is the other writer of the CNI configuration in a rewrite conflict.
type Writer string

// The writers that otherWriter of package installation recognises by their traces.
const (
	WriterCilium    Writer = "cilium"    // cni.exclusive
	WriterMultus    Writer = "multus"    // automatic configuration
	WriterInstaller Writer = "installer" // a second agent of this kind
	WriterUnknown   Writer = "unknown"
)

// Source is the source of the agent's live configuration.
type Source string

// The live configuration is a ConfigMap read from the API server, or a directory.
const (
	SourceConfigMap Source = "configmap"
	SourceDirectory Source = "directory"
)

// LogOutcome is the outcome of a record that a plugin sent.
type LogOutcome string

// A dropped record exceeded a limit; a rejected record could not be parsed.
const (
	LogRelayed  LogOutcome = "relayed"
	LogDropped  LogOutcome = "dropped"
	LogRejected LogOutcome = "rejected"
)

// unauthorizedPeer is the reason label of a refused connection to the log socket.
const unauthorizedPeer = "stranger"

// Metrics has the metrics of one agent. Its methods are safe for concurrent use.
type Metrics struct {
	*registry
	*Repair
	*Adds
	*Ambient

	ready, polled                                                 *family
	installs, rewrites, conflicts, problems, records, connections *family
	heal                                                          *family
}

// New returns the metrics of an agent of the given version, all zero.
func New(version string) *Metrics {
	r := newRegistry(version)
	// The reference's dashboards show the versions of its programs by this name.
	build := join(label("component", "cni"), label("tag", version))
	r.declare(gauge, "istio_build", "Always 1; tag is the version of this program.", build).add(1, build)
	return &Metrics{
		registry: r, Repair: newRepair(r), Adds: newAdds(r), Ambient: newAmbient(r),

		// The first two names are the reference's.
		installs: r.declare(counter, "istio_cni_installs_total", "Installations of the CNI plugin on this node, by result.",
			each("result", InstallSuccess, CopyBinariesFailure, CreateKubeconfigFailure, CreateCNIConfigFailure, ReadServiceAccountFailure)...),
		ready: r.declare(gauge, "istio_cni_install_ready",
			"1 while the CNI plugin is installed and watched, or for an agent that installs nothing; 0 while pods may start without it."),
		rewrites: r.declare(counter, "istio_cni_rewrites_total",
			"Artifacts on the node restored after another program changed or removed them.", each("artifact", Binary, Kubeconfig, Config)...),
		conflicts: r.declare(counter, "istio_cni_config_fights_total",
			"Rewrite conflicts over the CNI configuration: the agent backs off and pods may bypass the mesh.",
			each("rival", WriterCilium, WriterMultus, WriterInstaller, WriterUnknown)...),
		problems: r.declare(counter, "istio_cni_config_problems_total",
			"Live configurations refused for bad content; the last good one stayed in force.", each("source", SourceConfigMap, SourceDirectory)...),
		records: r.declare(counter, "istio_cni_log_records_total",
			"Log records sent by CNI plugins: relayed to the agent's log, dropped for being too many, or rejected.",
			each("outcome", LogRelayed, LogDropped, LogRejected)...),
		connections: r.declare(counter, "istio_cni_log_connections_refused_total",
			"Connections to the log socket that were refused because their user is not root.", label("reason", unauthorizedPeer)),
		polled: r.declare(gauge, "istio_cni_files_polled",
			"1 while the node's files are polled because the kernel has no inotify instance or watch left, else 0."),
		heal: r.declareHistogram("istio_cni_heal_seconds",
			"Time from noticing a change of an artifact to its restoration, in seconds.",
			[]float64{0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60}),
	}
}

func newRegistry(version string) *registry {
	r := &registry{}
	labels := label("version", version)
	r.declare(gauge, "istio_cni_build_info", "Always 1; the label is the version of this program.", labels).add(1, labels)
	return r
}

// Installed counts a finished installation.
func (m *Metrics) Installed(r InstallResult) { m.installs.add(1, label("result", r)) }

// SetReady sets whether the node is installed and watched.
func (m *Metrics) SetReady(ready bool) { m.ready.setBool(ready) }

// Polled sets whether the node's files are polled instead of watched.
func (m *Metrics) Polled(polled bool) { m.polled.setBool(polled) }

// Healed counts the repair of an artifact that another program changed, and observes the time since the change was noticed.
func (m *Metrics) Healed(a Artifact, took time.Duration) {
	m.rewrites.add(1, label("artifact", a))
	m.heal.observe(took.Seconds(), "")
}

// RewriteConflict counts a rewrite conflict: the agent backs off after too many rewrites in a short time.
func (m *Metrics) RewriteConflict(r Writer) { m.conflicts.add(1, label("rival", r)) }

// ConfigRefused counts a live configuration refused for bad content. The previous one stays in force.
func (m *Metrics) ConfigRefused(s Source) { m.problems.add(1, label("source", s)) }

// LogRecords counts n records that plugins sent.
func (m *Metrics) LogRecords(o LogOutcome, n int) { m.records.add(n, label("outcome", o)) }

// LogConnectionRefused counts a connection of the log socket whose peer is not root.
func (m *Metrics) LogConnectionRefused() { m.connections.add(1, label("reason", unauthorizedPeer)) }
