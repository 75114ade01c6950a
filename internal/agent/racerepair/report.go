package racerepair

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/meshcni/istio-cni/internal/core/repair"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
)

// once logs and records a warning at most once per pod and topic.
func (w *work) once(ctx context.Context, reason kube.EventReason, message string) {
	topic := string(reason) + " " + string(w.finding.Reason)
	if w.memory.reported[topic] {
		return
	}
	w.memory.reported[topic] = true
	w.Log.WarnContext(ctx, "the pod has a problem", slog.String("reason", string(w.finding.Reason)), slog.String("message", message))
	w.Event(kube.EventWarning, reason, message)
}

// why returns the beginning of an event on a broken pod.
func (w *work) why() string {
	text := "the pod " + w.finding.Reason.Sentence()
	if s := w.finding.Failed; s != (repair.State{}) {
		text += fmt.Sprintf(" (exit code %d)", s.ExitCode)
	}
	if sandbox := w.finding.Decision.Sandbox; sandbox != "" {
		return fmt.Sprintf("%s; RuntimeClass %q: %s", text, w.Pod.Facts.RuntimeClass, sandbox.Sentence())
	}
	return text + ": it started without the CNI plugin"
}

// advice returns an instruction for a broken pod that is not repaired.
func (w *work) advice() string {
	switch {
	case w.finding.Decision.Outcome == sidecar.Refuse:
		return "Its settings are invalid: correct them and create the pod again: " + w.finding.Decision.Err.Error()
	case w.finding.Decision.Sandbox != "":
		return "It cannot be redirected in place. Remedy: " + w.finding.Decision.Sandbox.Remedy()
	case w.finding.Reason == repair.FailedForGood && w.Settings.Switches.InPlace:
		return "It cannot be redirected in place any more: delete it, so that its owner creates another one"
	case !w.captured():
		reason := w.finding.Decision.Reason
		return "The plugin would not redirect it because " + reason.Sentence() + ": " + reason.Remedy()
	case w.Settings.Switches.InPlace && !w.Reachable():
		return "It can be redirected in place only on its own node: delete it, or let the node agent repair pods"
	}
	return "Delete it, so that it starts anew, or enable the node agent's race repair"
}
