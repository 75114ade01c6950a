package racerepair

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/meshcni/istio-cni/internal/agent/metrics"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/sandbox"
	"github.com/meshcni/istio-cni/internal/node/selfcheck"
)

// job is the work on one version of a pod. At its end, remember stores its memory in the pod's entry.
type job struct {
	*controller

	pod     kube.Pod
	memory  memory
	conf    cniconf.NetConf
	finding repair.Finding
	// decision is the plugin's about the pod.
	decision sidecar.Decision
	// waiting are closed at the end; a job with any inspects the pod. forced reports whether a request waits for the result.
	waiting []chan struct{}
	forced  bool
	// processes are the pod's as of the time listed, zero for an incomplete list.
	processes []sandbox.Process
	listed    time.Time
	log       *slog.Logger
}

// reconcile classifies one pod and performs the due action. After an error the caller enqueues the pod again.
func (c *controller) reconcile(ctx context.Context, k types.NamespacedName) (err error) {
	c.mu.Lock()
	e := c.pods[k]
	if e == nil {
		c.mu.Unlock()
		return nil
	}
	// Only this job uses the map of the memory: the queue returns a pod to one worker at a time.
	j := &job{controller: c, pod: e.pod, memory: e.memory, waiting: e.waiting, forced: e.forced}
	e.waiting, e.forced = nil, false // a later request is for another job: this one may have read the rules by then
	c.mu.Unlock()
	defer c.remember(k, j)
	began := c.Clock.Now()
	ctx, cancel := c.withTimeout(ctx, c.PodTimeout, "the work on the pod takes more than")
	defer cancel()

	j.log = c.Log.With(slog.String("pod", k.String()), slog.String("uid", j.pod.Facts.UID))
	if j.conf, err = c.Plugin(); err != nil {
		j.conf.Problems, err = err, fmt.Errorf("%w: %w", errPolicy, err)
	}
	j.decision = sidecar.Decide(j.pod.Facts, j.conf.Policy())
	if err == nil && !j.AuditOnly {
		err = j.repair(ctx)
	}
	j.memory.broken = j.finding.Broken
	j.audit(ctx)
	j.memory.audited.asked = c.Clock.Since(began)
	j.count()
	return errors.Join(err, j.publish(ctx))
}

// repair classifies the pod and performs the due action.
func (j *job) repair(ctx context.Context) (err error) {
	j.finding = repair.Classify(podOf(j.pod), j.Settings.Predicate, j.conf.Policy())
	j.finding.Repairable = j.finding.Repairable && j.reachable()
	if j.conf.Problems != nil && (j.finding.NeedsInspection || j.finding.Broken) {
		return j.reportProblems(ctx)
	}
	if j.finding.NeedsInspection {
		err = j.inspect(ctx)
	}
	j.memory.state = j.state()
	if err == nil && j.finding.Broken {
		return j.act(ctx)
	}
	if err == nil {
		j.memory.missingSince = time.Time{}
	}
	return err
}

// remember stores the job's memory, unless the entry has another UID by now.
func (c *controller) remember(k types.NamespacedName, j *job) {
	c.mu.Lock()
	defer c.mu.Unlock()
	defer (&entry{waiting: j.waiting}).release()
	e := c.pods[k]
	if e == nil || e.pod.Facts.UID != j.pod.Facts.UID {
		return
	}
	c.Metrics.SetPodState(e.state, j.memory.state)
	e.memory = j.memory
	if !sameAddresses(e.pod, j.pod) {
		e.otherSandbox() // the job worked on the previous sandbox
	}
	if !inspectable(e.pod) {
		e.audited = audited{}
	}
	select {
	case c.wake <- struct{}{}:
	default: // the schedule is to be woken already
	}
}

// reachable reports whether this process can reach the namespaces of the pod's node.
func (j *job) reachable() bool {
	return j.Find != nil && j.Settings.Node != "" && j.pod.NodeName == j.Settings.Node
}

// state returns the metric's state of the pod, "" for a pod that is not counted.
func (j *job) state() metrics.PodState {
	if j.finding.Reason == repair.ValidationFailed && j.alreadyRepaired() {
		return metrics.PodRedirected
	}
	return map[repair.Reason]metrics.PodState{
		repair.Proven: metrics.PodRedirected, repair.Redirected: metrics.PodRedirected, repair.RulesDiffer: metrics.PodDrifted,
		repair.ValidationFailed: metrics.PodBroken, repair.FailedForGood: metrics.PodBroken, repair.RulesMissing: metrics.PodBroken,
		repair.Unproven: metrics.PodUnknown,
	}[j.finding.Reason]
}

// alreadyRepaired reports whether the failure is older than the rules, so that the next run of the validation decides. The
// kubelet's times have whole seconds.
func (j *job) alreadyRepaired() bool {
	return !j.memory.repairedAt.IsZero() && !j.finding.Failed.Finished.After(j.memory.repairedAt)
}

// reportAfter is the number of consecutive failed inspections after which a pod is reported.
const reportAfter = 4

// inspect completes the finding by the rules in the namespace of an unproven pod.
func (j *job) inspect(ctx context.Context) error {
	if !j.reachable() {
		j.finding.NeedsInspection, j.finding.Reason = false, repair.NotLookedAt
		return nil
	}
	rules := repair.InPlaceRules
	if j.memory.repairedAt.IsZero() {
		var err error
		if rules, err = j.compare(ctx); err != nil {
			const unknown = "it is unknown whether the traffic is redirected: "
			switch j.memory.failures++; {
			case j.audits(): // which reports it
			case errors.Is(err, redirection.ErrUninspectable): // which is permanent
				j.once(ctx, ReasonUnverified, unknown+cause(ctx, err)+remedy(err))
			case j.memory.failures == reportAfter:
				j.event(kube.EventWarning, ReasonUnverified, unknown+cause(ctx, err)+remedy(err))
			}
			return err
		}
		j.memory.failures = 0
		if rules == repair.InPlaceRules {
			j.memory.repairedAt = j.Clock.Now()
		}
	}
	j.finding = repair.ApplyObservation(j.finding, podOf(j.pod), rules)
	if rules == repair.OtherRules && !j.finding.Broken && !j.audits() {
		j.once(ctx, ReasonDrifted, "the pod runs with other rules than the current ones, which apply from its next start on")
	}
	return nil
}

// audits reports whether the state of the pod is reported by the audit, of this controller or of another one.
func (j *job) audits() bool {
	return j.Audit.Interval > 0 || j.AuditedNode != "" && j.pod.NodeName == j.AuditedNode
}

// compare reads the rules in the namespace. If the plugin would refuse the pod, any rules of the mesh are other rules.
func (j *job) compare(ctx context.Context) (rules repair.Rules, err error) {
	rules = repair.NoRules
	err = j.inNamespace(ctx, func(space redirection.Namespace) error {
		var mesh bool
		if !j.captured() {
			mesh, err = space.HasRules(ctx)
		} else {
			var report redirection.Report
			if report, err = space.Verify(ctx, j.finding.Decision.Spec); err == nil && report.Clean() {
				rules = repair.InPlaceRules
				return nil
			}
			mesh = report.Mesh
		}
		if mesh {
			rules = repair.OtherRules
		}
		return err
	})
	return rules, err
}

// captured reports whether the plugin would redirect the pod.
func (j *job) captured() bool { return j.finding.Decision.Outcome == sidecar.Capture }

// inNamespace runs fn with the pod's network namespace, if the namespace is certain: a namespace that was found by its
// addresses may belong to another pod that has one of them in the API.
func (j *job) inNamespace(ctx context.Context, fn func(redirection.Namespace) error) (err error) {
	found, err := j.Find(ctx, sandbox.Pod{
		Namespace: j.pod.Facts.Namespace, Name: j.pod.Facts.Name, UID: j.pod.Facts.UID, Addresses: j.pod.Addresses,
	})
	if err != nil {
		return fmt.Errorf("finding the pod's network namespace: %w", err)
	}
	defer found.Close()
	if other := j.podWithSameIP(j.pod); other != "" && found.Source != sandbox.FromCache {
		return fmt.Errorf("%w: pod %s has the same ones", sandbox.ErrClaimed, other)
	}
	j.log.DebugContext(ctx, "found the pod's network namespace", slog.String("source", string(found.Source)))
	j.memory.audited.place = place{path: found.Place, inode: found.Inode()}
	return fn(j.space(found.Namespace))
}

// space is a namespace with the plugin's settings.
func (j *job) space(n *netns.Namespace) redirection.Namespace {
	return redirection.Namespace{
		NetNS: n, Log: j.log, Backend: j.conf.Backend,
		PreferTools: j.conf.Backend == redirect.Auto && selfcheck.Recorded(j.conf.RunDir).PreferTools(),
		Tools:       iptables.Host{Path: j.ToolPath, Force: iptables.Variant(j.conf.ForceIptables)},
	}
}
