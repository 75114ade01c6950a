package runtimes

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/meshcni/istio-cni/e2e/cluster"
)

const (
	calls  = "/var/log/cni-calls"
	plugin = "/opt/cni/bin/istio-cni"
)

// recorder is a program that runs the plugin and keeps each call in a directory, whose name begins with the time in nanoseconds.
const recorder = `#!/bin/sh
d=` + calls + `/$(date +%s%N)-$$
mkdir -p "$d.new"
env | grep ^CNI_ >"$d.new/env"
ls /run/istio-cni >"$d.new/run" 2>&1
cat >"$d.new/stdin"
` + plugin + ` <"$d.new/stdin" >"$d.new/stdout"
code=$?
echo $code >"$d.new/code"
mv "$d.new" "$d"
cat "$d/stdout"
exit $code
`

// record installs the recorder.
func (s *scenario) record() {
	s.Helper()
	path := s.NodeFile(filepath.Join(cluster.Recorders, "istio-cni"))
	s.Must(os.MkdirAll(filepath.Dir(path), 0o755))
	s.Must(os.WriteFile(path, []byte(recorder), 0o755))
}

// call is one call of the plugin by the runtime.
type call struct {
	env   []string
	stdin []byte
	// run is the list of files in the agent's directory at that time.
	run  string
	code int
}

func (c call) variable(name string) string {
	for _, pair := range c.env {
		if value, found := strings.CutPrefix(pair, name+"="); found {
			return value
		}
	}
	return ""
}

func (c call) command() string { return c.variable("CNI_COMMAND") }

// of reports whether the call is about a pod.
func (c call) of(pod string) bool {
	return slices.Contains(strings.Split(c.variable("CNI_ARGS"), ";"), "K8S_POD_NAME="+pod)
}

// configuration is the part of a call's configuration that the tests read.
type configuration struct {
	CNIVersion    string `json:"cniVersion"`
	RuntimeConfig struct {
		Annotations map[string]string `json:"io.kubernetes.cri.pod-annotations"`
	} `json:"runtimeConfig"`
}

func (s *scenario) configuration(c call) (read configuration) {
	s.Helper()
	s.Must(json.Unmarshal(c.stdin, &read))
	return read
}

// since returns the calls after a time, in their order.
func (s *scenario) since(then time.Time) (all []call) {
	s.Helper()
	directories, err := filepath.Glob(s.NodeFile(calls) + "/*[0-9]")
	s.Must(err)
	for _, dir := range directories {
		text, _, _ := strings.Cut(filepath.Base(dir), "-")
		if at, err := strconv.ParseInt(text, 10, 64); err != nil || at < then.UnixNano() {
			continue
		}
		read := func(name string) []byte {
			text, err := os.ReadFile(filepath.Join(dir, name))
			s.Must(err)
			return text
		}
		code, err := strconv.Atoi(strings.TrimSpace(string(read("code"))))
		s.Must(err)
		all = append(all, call{env: strings.Fields(string(read("env"))), stdin: read("stdin"), run: string(read("run")), code: code})
	}
	return all
}

// add returns the ADD of a pod.
func (s *scenario) add(pod string) call {
	s.Helper()
	for _, c := range s.since(time.Time{}) {
		if c.command() == "ADD" && c.of(pod) && c.code == 0 {
			return c
		}
	}
	s.Fatalf("no ADD of %s was recorded", pod)
	return call{}
}

// again calls the plugin like c with another command, and returns its exit code and output.
func (s *scenario) again(c call, command string) (code int, output string) {
	s.Helper()
	run := s.Command(s.Context(), "env", append(append([]string{"-i"}, c.env...), "CNI_COMMAND="+command, plugin)...)
	run.Stdin = bytes.NewReader(c.stdin)
	text, err := run.Output()
	var ended *exec.ExitError
	if err != nil && !errors.As(err, &ended) {
		s.Fatal(err)
	}
	return run.ProcessState.ExitCode(), string(text)
}
