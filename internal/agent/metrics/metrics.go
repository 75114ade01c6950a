// Package metrics is what the node agent counts and how Prometheus reads it.
//
// It promises the names, labels and values of the reference's node agent for what both count, the prefix istio_cni_ for
// everything of ours, a HELP and a TYPE line for every family it shows, and that each value of a closed label is there
// as 0 from the start, so that an alert on its increase sees the first one. Labels are closed sets: nothing a pod or a
// file says becomes a label value.
//
// It never opens a port, keeps no state outside of a Metrics value, and decides nothing.
//
// Start reading at Metrics. families.go has every name with its help, exposition.go the text that is served.
package metrics

import (
	"time"

	"github.com/VictoriaMetrics/metrics"
)

// InstallResult is how an installation ended. The values are the reference's.
type InstallResult string

// An installation succeeds, or ends at the step that the value names.
const (
	InstallSuccess            InstallResult = "SUCCESS"
	CopyBinariesFailure       InstallResult = "COPY_BINARIES_FAILURE"
	CreateKubeconfigFailure   InstallResult = "CREATE_KUBECONFIG_FAILURE"
	CreateCNIConfigFailure    InstallResult = "CREATE_CNI_CONFIG_FAILURE"
	ReadServiceAccountFailure InstallResult = "READ_SERVICE_ACCOUNT_FAILURE"
)

// Artifact is something that the agent keeps on the node.
type Artifact string

// What the agent puts back when somebody else changes it.
const (
	Binary     Artifact = "binary"
	Kubeconfig Artifact = "kubeconfig"
	Config     Artifact = "config"
)

// Rival is another writer of the CNI configuration, as far as it can be told.
type Rival string

// The rivals that leave traces by which they are known.
const (
	RivalCilium    Rival = "cilium"    // cni.exclusive
	RivalMultus    Rival = "multus"    // automatic configuration
	RivalInstaller Rival = "installer" // a second agent of this kind
	RivalUnknown   Rival = "unknown"
)

// Source is where the agent's live configuration comes from.
type Source string

// The live configuration is a ConfigMap read from the API server, or a directory.
const (
	SourceConfigMap Source = "configmap"
	SourceDirectory Source = "directory"
)

// LogOutcome is what became of a record that a plugin sent.
type LogOutcome string

// A dropped record was sound and one too many; a rejected one could not be read.
const (
	LogRelayed  LogOutcome = "relayed"
	LogDropped  LogOutcome = "dropped"
	LogRejected LogOutcome = "rejected"
)

// Metrics counts for one agent. Its methods may be called from several goroutines.
type Metrics struct {
	*Repair
	*Adds

	set   *metrics.Set
	ready *metrics.Gauge
	polls *metrics.Gauge
	heal  *histogram

	installs, rewrites, fights, problems, records, refusals vector
}

// New returns the metrics of an agent of the given version, all zero.
func New(version string) *Metrics {
	set := metrics.NewSet()
	m := &Metrics{
		Repair: newRepair(set), Adds: newAdds(set), set: set,

		ready: set.NewGauge(installReady, nil),
		polls: set.NewGauge(filesPolled, nil),
		heal:  newHistogram(healSeconds, nil, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),

		installs: newVector(set, installsTotal, one("result", InstallSuccess, CopyBinariesFailure,
			CreateKubeconfigFailure, CreateCNIConfigFailure, ReadServiceAccountFailure)),
		rewrites: newVector(set, rewritesTotal, one("artifact", Binary, Kubeconfig, Config)),
		fights:   newVector(set, fightsTotal, one("rival", RivalCilium, RivalMultus, RivalInstaller, RivalUnknown)),
		problems: newVector(set, problemsTotal, one("source", SourceConfigMap, SourceDirectory)),
		records:  newVector(set, recordsTotal, one("outcome", LogRelayed, LogDropped, LogRejected)),
		refusals: newVector(set, refusalsTotal, one("reason", unauthorizedPeer)),
	}
	set.NewGauge(buildInfo+labels("version", version), nil).Set(1)
	set.RegisterMetricsWriter(m.heal.write)
	return m
}

// Installed counts an installation that ended.
func (m *Metrics) Installed(r InstallResult) { m.installs.add(labels("result", string(r)), 1) }

// BecameReady says that the node is installed and watched.
func (m *Metrics) BecameReady() { m.ready.Set(1) }

// BecameUnready says that it is not, or not any more.
func (m *Metrics) BecameUnready() { m.ready.Set(0) }

// Polled says whether the node's files are polled instead of watched.
func (m *Metrics) Polled(polled bool) {
	m.polls.Set(0)
	if polled {
		m.polls.Set(1)
	}
}

// Healed counts an artifact that was put back after somebody else changed it, and the time from noticing it to then.
func (m *Metrics) Healed(a Artifact, took time.Duration) {
	m.rewrites.add(labels("artifact", string(a)), 1)
	m.heal.observe(took.Seconds())
}

// Fought counts a fight over the CNI configuration: so many rewrites in a short time that the agent holds back.
func (m *Metrics) Fought(r Rival) { m.fights.add(labels("rival", string(r)), 1) }

// ConfigRefused counts a live configuration whose content was bad, so that the one before it stayed in force.
func (m *Metrics) ConfigRefused(s Source) { m.problems.add(labels("source", string(s)), 1) }

// LogRecords counts n records that plugins sent.
func (m *Metrics) LogRecords(o LogOutcome, n int) { m.records.add(labels("outcome", string(o)), n) }

// LogConnectionRefused counts a connection of the log socket whose peer is not root.
func (m *Metrics) LogConnectionRefused() { m.refusals.add(labels("reason", unauthorizedPeer), 1) }
