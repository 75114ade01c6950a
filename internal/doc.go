// Package internal promises, by its tests alone, that imports between the
// packages below it go down only:
//
//	main -> role -> agent -> {kube, node} -> core
//
// and that each dependency that touches the outside world is imported by the
// one package that owns it. The test reads the import lines of every Go file
// in the tree and needs no tools.
//
// A second test checks that docs/errors.md has each code, state and reason, and docs/reference.md each metric.
//
// A third test (pages_test.go) checks README.md, docs/, .github/ and the pages of internal and e2e: their links resolve, and a test
// runs each of their commands. A block of commands has the language sh or console and follows the line
//
//	<!-- test: NAME -->
//
// where NAME is in the table runners.
//
// The package has no code and nothing imports it. The linter's depguard
// repeats part of the same rules in the editor.
//
// Where to look:
//
//	a rule                        core/redirect (of a sidecar), core/ambient (of an ambient pod), core/ruleset (a rule as a value)
//	the path of a packet          core/redirect/walk
//	a decision about a pod        core/sidecar; what selects it for ambient mode: agent/selector, agent/podcache
//	a decision about a node       core/readiness (taint), agent/selector.Fits
//	a broken pod                  core/repair, agent/racerepair, agent/nodepods
//	restart or uninstall          agent/teardown
//	rules in the kernel           node/nftables, node/iptables (by programs), node/redirection (one namespace)
//	probes of ambient pods        node/probeset (the host's table), agent/probes (what is in it)
//	rules changed by others       node/nftables/nfwatch (a notification)
//	a namespace                   node/netns (opening, entering), node/sandbox (finding a pod's)
//	the CNI configuration         core/cniconf, agent/installation
//	the runtime's configuration   node/runtimeconf, agent/runtimedirs (which directories get the plugin)
//	a file of the node            node/hostfs (writing), node/hostpath (paths), node/cnicache (libcni's cache)
//	an API call                   kube (a watch, the pages of a list: watch.go); an event agent/eventrecorder
//	the start of a process        early (the plugin before client-go), applet (which role)
//	plugin and agent              node/agentapi, agent/podcache; agent/decisions (what was decided); agent/cmdadd (ambient mode)
//	a pod of ambient mode         core/ambient (its rules), agent/enrol (its steps)
//	ztunnel                       agent/ztunnels (what it is told), core/zds (the messages), node/zdsock (the socket)
//	the agent as a whole          agent/nodeagent
//	the self-test                 node/selfcheck
//	a field of -o json            core/document
//	a setting                     core/settings, and the table of its role
//	foreign text made safe        core/printable
//	other programs' values hidden core/redact (a bug report: role/bundle, role/fleet, core/archive)
//	names and selectors of users  agent/selector
//
// To add a rule by an annotation: a field of redirect.Spec
// (core/redirect/spec.go), its redirect.Field and how its text is parsed
// (parse.go), the rule (rules.go, one description for both dialects), and a row
// of inputs (core/sidecar/inputs.go). The encoders follow if the match is known
// to core/ruleset. The reports have a row each, for a rule that lets packets
// pass: settings in redirect/walk/reason.go and core/audit/exceptions.go.
// walk/infer.go reads the rule back. Tests demand all three. Tests to write: the
// field in spectest.Random and a Spec in its Special, which byte parity with the
// real tools runs through; the rule in redirect/referencetest, for iptables and
// for nft; a case of node/redirection's packets. No test demands these: the
// annotation in docs/parity.md, an excluded process in identity
// (walk/canary.go), a row in redirect/parse_test.go, in sidecar's
// TestDecide_Settings, and a row in role/redirector/settings.go, without which
// --verify cannot express the rule.
//
// To add a setting: a row in the table of its role (role/installer/settings.go,
// role/tainter/settings.go, role/redirector/settings.go; race repair's in
// agent/racerepair/settings.go, the audit's in agent/auditor/settings.go), the
// field that the row fills, and its use. Flag, variable, default, help and
// validation come from the row; with Chart set it is a value below "agent", and
// "make manifests" writes the chart's schema, the copy of values.yaml in
// files/defaults.yaml, and the tables of docs/reference.md. A new numeric Arg
// needs a case in hack/settings. The test is one more row in settings_test.go of
// the role. Tests fill in the field themselves: give it its default in their
// fixtures.
//
// To add a reason not to capture a pod: a row of rules in core/sidecar/reason.go
// with its text, remedy and condition, and a row of inputs in
// core/sidecar/inputs.go for each annotation, label, variable or container that
// it reads, with the next version. The trim of pods, the version of the facts
// between plugin and agent, the metrics, the reports and the keys of the fuzz
// test follow; "make manifests" writes the row of docs/errors.md. The tests are one
// row in TestDecide and one in TestDecide_FirstReason.
//
// To add an API call: a method of kube.Client, its right in the chart
// (manifests/istio-cni/templates) and in e2e/rights, and a row in
// docs/security.md. A kind that is read for the first time, or its list, also
// needs a type in codecs (kube/client.go). The tests compare the rights with the
// calls; hack/chart/security_test.go lists those of a role. kubetest serves the
// call to other packages, and TestContract compares it with a real API server.
//
// To add an exit code, a CNI error code, an event's reason, a part of readiness, or a state of the audit: its constant, with
// the sentence for a user in its comment, its table or the command's help. "make manifests" writes it into docs/errors.md.
// Any other message states its own remedy and needs no row on that page.
//
// To change a text: search internal, e2e and docs for it, and run the tests of
// agent/nodepods as root, which "make unit" leaves out. A test compares the
// texts that docs/errors.md quotes with the source.
//
// To add a check of the doctor: a row of checks (role/doctor/doctor.go) and its
// function, which reads the view and returns ok, or warn or fail with a remedy.
// Add the right or directory that the check reads to
// manifests/examples/doctor.yaml. The test is a node where it fails, in
// doctor_test.go.
//
// To add a field to what commands print as JSON: the field of the document in
// core/document, or of the type that it embeds, with a comment for users. "make
// manifests" writes docs/schema and docs/reference.md. Nothing is removed or
// renamed within one apiVersion. A new document is a row of document.All; its
// test passes the command's output to test/documenttest.
//
// To add a metric: one declaration in agent/metrics, beside the code that
// counts it. "make manifests" writes the table of metrics in the manual.
//
// Start reading at the tables on top of arch_test.go. A new package below
// internal needs its ring there, a new dependency its owner; a pull request
// that adds either shows it in one line.
package internal
