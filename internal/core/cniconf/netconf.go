// Package cniconf reads, writes and places the plugin's stanza in the node's CNI configuration.
//
// It promises that it understands a stanza of any earlier version, that it reports a bad setting by its key and still
// reads the others, and that every default is here. It never reads a file: callers pass bytes.
//
// Start at Parse.
package cniconf

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"path"
	"slices"
	"time"

	"github.com/meshcni/istio-cni/internal/core/ambient"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
)

// Names and defaults of the reference.
const (
	DefaultRunDir     = "/var/run/istio-cni"
	KubeconfigName    = "istio-cni-kubeconfig"
	PodSocketName     = "pods.sock" // our own: of the agent, in its run directory
	DefaultAPITimeout = 10 * time.Second
	longestAPITimeout = 90 * time.Second // the whole call must end before the runtime's timeout
)

// SandboxedRuntimes returns the default patterns for RuntimeClasses of gVisor (also GKE's) and Kata Containers.
func SandboxedRuntimes() []string {
	return []string{"gvisor", "gvisor-*", "runsc", "runsc-*", "kata", "kata-*"}
}

// NetConf is a parsed stanza with all defaults.
type NetConf struct {
	CNIVersion, Name, Type string
	// PrevResult is the previous plugin's result as JSON; nil without one.
	PrevResult json.RawMessage

	// Annotations are the pod's annotations if AnnotationsDelivered is set. containerd (1.6 and 2.4
	// tested) passes null for a pod without annotations.
	Annotations          map[string]string
	AnnotationsDelivered bool

	// LogLevel is the key's text; the logger parses it.
	LogLevel string
	// RunDir holds the node agent's sockets, the log file and the kubeconfig; stanzas before 1.23 lack the key.
	RunDir string
	// Kubeconfig is the path of the kubeconfig for the API server.
	Kubeconfig string

	ExcludeNamespaces []string
	AgentNamespace    string
	AmbientEnabled    bool
	// Ambient is not part of the stanza: only the node agent, which enrols pods, has it.
	Ambient ambient.Config
	// EnablementSelectors is a JSON list, see package selector; nil is the empty one.
	EnablementSelectors json.RawMessage
	// Backend combines the keys native_nftables, backend and force_iptables_binary.
	Backend redirect.Backend

	// SecondFamily, APITimeout and ForceIptables are this program's own settings.
	SecondFamily  redirect.SecondFamily
	APITimeout    time.Duration
	ForceIptables string
	// SandboxedRuntimes is for the sidecar.Policy.
	SandboxedRuntimes []string

	// Problems joins the errors of single settings; the rest of the stanza is valid. With problems the plugin refuses pods
	// of the mesh; other pods start.
	Problems error
}

// PodAnnotations is the capability with which a runtime passes the annotations of a pod (containerd, pkg cri/annotations;
// also CRI-O). A stanza requests it in "capabilities"; the runtime puts the annotations into "runtimeConfig".
const PodAnnotations = "io.kubernetes.cri.pod-annotations"

// annotations reads the annotations from the runtime. If they are invalid or missing, the plugin queries the API server.
func (c *NetConf) annotations(runtimeConfig json.RawMessage) {
	var passed struct {
		Annotations json.RawMessage `json:"io.kubernetes.cri.pod-annotations"` // PodAnnotations
	}
	if json.Unmarshal(runtimeConfig, &passed) != nil || json.Unmarshal(passed.Annotations, &c.Annotations) != nil {
		c.Annotations = nil
		return
	}
	c.AnnotationsDelivered = true
}

// Policy returns the settings of the stanza that apply to all pods.
func (c *NetConf) Policy() sidecar.Policy {
	return sidecar.Policy{
		ExcludeNamespaces: c.ExcludeNamespaces, AgentNamespace: c.AgentNamespace,
		AmbientEnabled: c.AmbientEnabled, Ambient: c.Ambient, SecondFamily: c.SecondFamily, SandboxedRuntimes: c.SandboxedRuntimes,
	}
}

// legacy is the nested object of stanzas before 1.23.
type legacy struct {
	Kubeconfig        string   `json:"kubeconfig"`
	ExcludeNamespaces []string `json:"exclude_namespaces"`
}

// Parse reads a stanza as the runtime passes it to the plugin. It returns an error for a text that is not a JSON object,
// or if a standard key has a wrong type.
func Parse(stanza []byte) (NetConf, error) {
	keys := map[string]json.RawMessage{}
	if err := json.Unmarshal(stanza, &keys); err != nil {
		return NetConf{}, fmt.Errorf("parsing network configuration: %w", err)
	}
	c := NetConf{APITimeout: DefaultAPITimeout, SandboxedRuntimes: SandboxedRuntimes()}
	r := reader{keys: keys}
	r.read("cniVersion", "a string", &c.CNIVersion)
	r.read("name", "a string", &c.Name)
	r.read("type", "a string", &c.Type)
	if err := errors.Join(r.problems...); err != nil {
		return NetConf{}, fmt.Errorf("parsing network configuration: %w", err)
	}
	if prev := bytes.TrimSpace(keys["prevResult"]); len(prev) > 0 && !bytes.Equal(prev, []byte("null")) {
		c.PrevResult = prev
	}
	c.annotations(keys["runtimeConfig"])
	r.own(&c)
	c.Problems = errors.Join(r.problems...)
	return c, nil
}

// reader decodes key by key and collects the errors.
type reader struct {
	keys     map[string]json.RawMessage
	problems []error
}

// read decodes one key. An absent or null key leaves the target unchanged.
func (r *reader) read(key, want string, into any) bool {
	text, there := r.keys[key]
	if !there || string(text) == "null" {
		return false
	}
	if err := json.Unmarshal(text, into); err != nil {
		r.bad(key, text, "want "+want)
		return false
	}
	return true
}

func (r *reader) bad(key string, text json.RawMessage, problem string) {
	const most = 120
	r.problems = append(r.problems, fmt.Errorf("network configuration key %q: value %s: %s", key, printable.Text(string(text), most), problem))
}

// own reads the plugin's keys, flat keys first.
func (r *reader) own(c *NetConf) {
	var old legacy
	var socket string
	r.read("kubernetes", "an object with kubeconfig and exclude_namespaces", &old)
	r.read("log_uds_address", "a path", &socket)
	if !r.read("plugin_log_level", "a string", &c.LogLevel) {
		r.read("log_level", "a string", &c.LogLevel)
	}
	r.read("cni_agent_run_dir", "a path", &c.RunDir)
	if _, flat := r.keys["exclude_namespaces"]; flat {
		r.read("exclude_namespaces", "a list of strings", &c.ExcludeNamespaces)
	} else {
		c.ExcludeNamespaces = old.ExcludeNamespaces
	}
	r.read("pod_namespace", "a string", &c.AgentNamespace)
	r.read("ambient_enabled", "true or false", &c.AmbientEnabled)
	r.read("enablement_selectors", "a list of selectors", &c.EnablementSelectors)
	var native bool
	r.read("native_nftables", "true or false", &native)
	c.places(old.Kubeconfig, socket)
	r.settings(c)
	r.backend(c, native)
}

// backend reads the key "backend" and combines it with the other two keys for the backend.
func (r *reader) backend(c *NetConf, native bool) {
	parse(r, "backend", &c.Backend, redirect.ParseBackend)
	chosen, err := redirect.ChooseBackend(c.Backend, native, c.ForceIptables)
	if err != nil {
		r.problems = append(r.problems, fmt.Errorf("network configuration keys \"native_nftables\", \"backend\" and \"force_iptables_binary\": %w", err))
	}
	c.Backend = chosen
}

// places completes directories: a present stanza names the run directory, an older one the kubeconfig and the log socket.
func (c *NetConf) places(kubeconfig, socket string) {
	switch {
	case c.RunDir == "" && kubeconfig != "":
		c.Kubeconfig = kubeconfig
		if socket != "" {
			c.RunDir = path.Dir(socket)
		}
		return
	case c.RunDir == "":
		c.RunDir = DefaultRunDir
	}
	c.Kubeconfig = path.Join(c.RunDir, KubeconfigName)
}

// settings reads the keys that the reference lacks.
func (r *reader) settings(c *NetConf) {
	parse(r, "second_ip_family", &c.SecondFamily, redirect.ParseSecondFamily)
	var patterns []string
	if r.read("sandboxed_runtimes", "a list of strings", &patterns) {
		c.SandboxedRuntimes = patterns
		for _, pattern := range patterns {
			if _, err := path.Match(pattern, ""); err != nil {
				r.bad("sandboxed_runtimes", r.keys["sandboxed_runtimes"], err.Error())
			}
		}
	}
	parse(r, "api_timeout", &c.APITimeout, ParseAPITimeout)
	parse(r, "force_iptables_binary", &c.ForceIptables, func(text string) (string, error) {
		if !slices.Contains([]string{"", "legacy", "nft"}, text) {
			return "", errors.New("want legacy, nft or nothing")
		}
		return text, nil
	})
}

// ParseAPITimeout reads the time limit for looking up a pod.
func ParseAPITimeout(text string) (time.Duration, error) {
	d, err := time.ParseDuration(text)
	if err != nil || d <= 0 || d > longestAPITimeout {
		return 0, fmt.Errorf("want a duration like \"10s\", longer than 0 and at most %s", longestAPITimeout)
	}
	return d, nil
}

// parse decodes a key with a string value, and leaves the target unchanged if the string is invalid.
func parse[T any](r *reader, key string, into *T, meaning func(text string) (T, error)) {
	var text string
	if !r.read(key, "a string", &text) {
		return
	}
	value, err := meaning(text)
	if err != nil {
		r.bad(key, r.keys[key], err.Error())
		return
	}
	*into = value
}
