package auditor

import (
	"fmt"

	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/kube"
)

// Rows returns the settings of the audit.
func Rows(a *Settings) []settings.Setting {
	const report, repaired = "report", "repair"
	return []settings.Setting{
		{
			Name: "audit-interval", Arg: "DURATION", Default: "5m", Use: "time between two inspections of a pod that does not change; 0: no audit",
			Value: settings.Duration(&a.Interval, 0, 0),
		},
		{
			Name: "audit-mode", Arg: "WHAT", Default: report, Use: "report lost and changed rules, or repair them: report or repair",
			Value: settings.Of(&a.Repair, func(text string) (bool, error) {
				if text != report && text != repaired {
					return false, fmt.Errorf("want %s or %s", report, repaired)
				}
				return text == repaired, nil
			}, func(on bool) string { return map[bool]string{false: report, true: repaired}[on] }),
		},
		{
			Name: "audit-pod-condition", Default: "false", Use: "publish the pod condition " + kube.RedirectionVerified, Value: settings.Bool(&a.PodCondition),
		},
	}
}
