// Package internal promises, by its tests alone, that imports between the
// packages below it go down only:
//
//	main -> role -> agent -> {kube, node} -> core
//
// and that each dependency that touches the outside world is imported by the
// one package that owns it. The test reads the import lines of every Go file
// in the tree and needs no tools.
//
// A second test reads the source for what the programs say to a person, and
// holds docs/operations.md to having each text and each metric.
//
// The package has no code, so it never touches anything and nothing imports
// it. The linter's depguard repeats part of the same rules in the editor.
//
// Where to look: a rule of iptables core/redirect (which) and core/ruleset (as
// a value), in both dialects; a decision core/sidecar (about a
// pod), core/readiness (about a node's taint), core/placement (about a DaemonSet's pods), core/repair (about a broken
// pod), agent/departure (about leaving); how rules reach the kernel
// node/nftables and, by programs, node/iptables; the CNI configuration
// core/cniconf; a file write node/hostfs; a namespace node/netns, node/podnet
// (to work in it) and node/podns (to find it); a path of the node node/hostpath; libcni's cache node/cnicache; an API call kube; an event agent/eventrecorder; what the
// plugin asks the agent node/agentcall and agent/podinfo; what the agent does
// all day agent/nodeagent, agent/installation and agent/podrepair; does it work here
// node/selfcheck; making foreign text safe to show core/printable; validating selectors, labels and names that a user sets agent/selector; a setting
// core/settings (how it is read) and the table of its role; the frame of a role that runs until a signal applet/service.
//
// To add a setting: a row in the table of its role (role/installer/settings.go,
// role/tainter/settings.go, role/redirector/settings.go; race repair's in
// agent/podrepair/settings.go), the field that the row fills, and what uses it.
// Flag, variable, default, help and validation come from the row; with Chart
// set, "make manifests" writes the chart's schema and the manual's table. The
// test is one more row in settings_test.go of the role.
//
// To add a reason not to capture a pod: a row of rules in core/sidecar/reason.go
// with its text, remedy and condition, and a row of inputs in
// core/sidecar/inputs.go for each annotation, label, variable or container that
// it reads, of the next version. The trim of pods, the version of the facts
// between plugin and agent, the metrics, the reports and the keys of the fuzz
// test follow. The manual's table of reasons gets the row that
// TestReasonsAreExplained asks for; the tests are one row in TestDecide and one
// in TestTheFirstReasonWins. An annotation that is a setting of the rules is a
// row of inputs with its redirect.Field.
//
// Start reading at the tables on top of arch_test.go. A new package below
// internal needs its ring there, a new dependency its owner; a pull request
// that adds either shows it in one line.
package internal
