package podrepair

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/podnet"
	"github.com/meshcni/istio-cni/internal/node/podns"
	"github.com/meshcni/istio-cni/internal/node/selfcheck"
)

// job is the work on one pod as it was at one moment. What it remembers goes back to the pod's entry in the end.
type job struct {
	*controller

	pod    kube.Pod
	conf   cniconf.NetConf
	memory *memory
	found  repair.Finding
	log    *slog.Logger
}

// settle looks at one pod and does what is due. After an error it is to be done again, and not before wait is over.
func (c *controller) settle(ctx context.Context, k types.NamespacedName) (wait time.Duration, err error) {
	c.mu.Lock()
	e := c.pods[k]
	if e == nil {
		c.mu.Unlock()
		return 0, nil
	}
	j := &job{controller: c, pod: e.pod, memory: &memory{}}
	*j.memory = e.memory
	c.mu.Unlock()
	// The map of what was told is this job's alone: a pod is worked on once at a time.
	defer c.remember(k, j)
	ctx, cancel := c.withPodLimit(ctx)
	defer cancel()

	j.log = c.Log.With(slog.String("pod", k.String()), slog.String("uid", j.pod.Facts.UID))
	if j.conf, err = c.Plugin(); err != nil {
		return 0, fmt.Errorf("%w: %w", errPolicy, err)
	}
	subject := podOf(j.pod)
	j.found = repair.Judge(subject, c.Settings.Predicate, j.conf.Policy())
	j.found.Repairable = j.found.Repairable && j.reachable()
	if problems := j.conf.Problems; problems != nil && (j.found.Look || j.found.Broken) {
		return 0, j.refrain(ctx, problems)
	}
	if j.found.Look {
		if err := j.look(ctx, subject); err != nil {
			return 0, err
		}
	}
	j.memory.stand(j)
	if !j.found.Broken {
		j.memory.missingSince = time.Time{}
		return 0, nil
	}
	return j.act(ctx)
}

// remember puts back what the job knows, unless the pod is another one by now.
func (c *controller) remember(k types.NamespacedName, j *job) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.pods[k]
	if e == nil || e.pod.Facts.UID != j.pod.Facts.UID {
		return
	}
	c.Metrics.Stands(e.state, j.memory.state)
	e.memory = *j.memory
	if !slices.Equal(e.pod.Addresses, j.pod.Addresses) {
		e.otherSandbox() // meanwhile: what was seen and done was in the one before
	}
}

// reachable reports whether the namespaces of the pod's node can be reached from here.
func (j *job) reachable() bool {
	return j.Find != nil && j.Settings.Node != "" && j.pod.NodeName == j.Settings.Node
}

// stand is the state that the pod is counted in.
func (m *memory) stand(j *job) {
	switch j.found.Reason {
	case repair.Proven, repair.Redirected:
		m.state = metrics.PodRedirected
	case repair.RulesDiffer:
		m.state = metrics.PodDrifted
	case repair.ValidationFailed:
		m.state = metrics.PodBroken
		if m.alreadyRepaired(j.found) {
			m.state = metrics.PodRedirected
		}
	case repair.FailedForGood, repair.RulesMissing:
		m.state = metrics.PodBroken
	case repair.Unproven:
		m.state = metrics.PodUnknown
	case repair.NotLookedAt, repair.Passed, repair.NoSandbox:
		m.state = ""
	}
}

// alreadyRepaired tells whether the failure is older than the rules: then the next try of the validation is waited for. Times of the
// kubelet have whole seconds.
func (m *memory) alreadyRepaired(f repair.Finding) bool {
	return !m.repairedAt.IsZero() && !f.FailedAt().After(m.repairedAt)
}

// unreachable is after how many failures in a row a pod that nothing is known against is reported.
const unreachable = 4

// look finds out what the namespace of an unproven pod says.
func (j *job) look(ctx context.Context, subject repair.Pod) error {
	if !j.reachable() {
		j.found.Look, j.found.Reason = false, repair.NotLookedAt // nothing can be told from here
		return nil
	}
	if !j.memory.repairedAt.IsZero() {
		j.found = repair.Weigh(j.found, subject, repair.InPlaceRules)
		return nil
	}
	var rules repair.Rules
	err := j.inside(ctx, func(space podnet.Namespace) (err error) {
		rules, err = j.compare(ctx, space)
		return err
	})
	if errors.Is(err, podnet.ErrUninspectable) {
		// That does not pass by itself.
		j.memory.state = metrics.PodUnknown
		j.once(ctx, ReasonUnverified, "it cannot be told whether the traffic is redirected: "+cause(ctx, err)+remedy(err))
		return err
	}
	if err != nil {
		j.memory.state = metrics.PodUnknown
		if j.memory.failures++; j.memory.failures == unreachable {
			j.event(kube.EventWarning, ReasonUnverified, "it cannot be told whether the traffic is redirected: "+cause(ctx, err)+remedy(err))
		}
		return err
	}
	j.memory.failures = 0
	j.found = repair.Weigh(j.found, subject, rules)
	switch {
	case rules == repair.InPlaceRules:
		j.memory.repairedAt = j.Clock.Now()
	case !j.found.Broken:
		j.once(ctx, ReasonDrifted, "the pod runs with other rules than those of now, which is left so: they count from its next start on")
	}
	return nil
}

// compare reads the rules. Where there is nothing to compare them with, because the plugin would refuse the pod, any rules
// of the mesh are others.
func (j *job) compare(ctx context.Context, space podnet.Namespace) (repair.Rules, error) {
	spec, wanted := j.spec()
	if !wanted {
		mesh, err := space.HasRules(ctx)
		if err != nil || mesh {
			return repair.OtherRules, err
		}
		return repair.NoRules, nil
	}
	report, err := space.Verify(ctx, spec)
	switch {
	case err != nil:
		return repair.NoRules, err
	case report.Clean():
		return repair.InPlaceRules, nil
	case report.Mesh:
		return repair.OtherRules, nil
	}
	return repair.NoRules, nil
}

// inside runs fn with the pod's network namespace, if that can be told for sure.
func (j *job) inside(ctx context.Context, fn func(podnet.Namespace) error) (err error) {
	found, err := j.Find(ctx, podns.Pod{
		Namespace: j.pod.Facts.Namespace, Name: j.pod.Facts.Name, UID: j.pod.Facts.UID, Addresses: j.pod.Addresses,
	})
	if err != nil {
		return fmt.Errorf("finding the pod's network namespace: %w", err)
	}
	defer found.Close()
	if err := j.claimed(found); err != nil {
		return err
	}
	j.log.DebugContext(ctx, "found the pod's network namespace", slog.String("source", string(found.Source())))
	prefer := j.conf.Backend == redirect.Auto && selfcheck.Recorded(j.conf.RunDir).PreferTools
	return fn(podnet.Namespace{
		NetNS: found.Namespace, Log: j.log, Backend: j.conf.Backend, PreferTools: prefer,
		Tools: iptables.Host{Path: j.ToolPath, Force: iptables.Variant(j.conf.ForceIptables)},
	})
}

// act does what is switched on and can help.
func (j *job) act(ctx context.Context) (time.Duration, error) {
	mode := j.Settings.Switches.Mode(j.found)
	if mode != repair.InPlace && j.found.Failed == (repair.State{}) {
		// Only the missing rules speak against the pod: it is looked at twice before it pays for that.
		now := j.Clock.Now()
		if j.memory.missingSince.IsZero() {
			j.memory.missingSince = now
		}
		if due := j.memory.missingSince.Add(j.Confirm); due.After(now) {
			j.queue.AddAfter(j.pod.Key(), due.Sub(now))
			return 0, nil
		}
	}
	switch mode {
	case repair.InPlace:
		return 0, j.redirect(ctx)
	case repair.Delete:
		if j.memory.removed { // an eviction changes the pod before it deletes it
			return 0, nil
		}
		return j.remove(ctx)
	case repair.Label:
		return 0, j.label(ctx)
	case repair.Report:
	}
	j.once(ctx, ReasonBroken, j.why()+". "+j.advice())
	return 0, nil
}

// refrain leaves a pod alone because the plugin's configuration is not what somebody meant it to be: the namespaces to leave alone
// may be among what could not be read, and a pod that is made anew would not start.
func (j *job) refrain(ctx context.Context, problems error) error {
	const mend = ". Mend the configuration of the node agent"
	if j.found.Broken {
		j.memory.stand(j)
		j.Metrics.Repaired(typeOf(j.Settings.Switches.Mode(j.found)), metrics.RepairFail)
		j.once(ctx, ReasonBroken, j.why()+". Nothing is done about it while the plugin's configuration cannot be used: "+problems.Error()+mend)
	} else {
		j.memory.state = metrics.PodUnknown
		j.once(ctx, ReasonUnverified, "it cannot be told whether the traffic is redirected while the plugin's configuration cannot be used: "+
			problems.Error()+mend)
	}
	return fmt.Errorf("%w: %w", errPolicy, problems)
}

// typeOf is what an action is counted as, "" for what is none.
func typeOf(mode repair.Mode) metrics.RepairType {
	return map[repair.Mode]metrics.RepairType{
		repair.InPlace: metrics.RepairPod, repair.Delete: metrics.RepairDelete, repair.Label: metrics.RepairLabel,
	}[mode]
}

// spec is what the pod is to be redirected by.
func (j *job) spec() (redirect.Spec, bool) {
	return j.found.Decision.Spec, j.found.Decision.Outcome == sidecar.Capture
}
