package redirector

import (
	"errors"
	"strings"
	"testing"
)

// TestW35AFailedValidationNamesEveryRemedy: to repair a pod in place comes before its deletion, which is not what somebody
// wants who has chosen the former; and by hand it takes no setting at all.
func TestW35AFailedValidationNamesEveryRemedy(t *testing.T) {
	t.Parallel()
	cause := errors.New("no connection")
	err := run{}.notRedirected(cause)
	at := -1
	for _, want := range []string{"no connection", "started before the plugin", "cni.repair.repairPods", "cni.repair.deletePods", "kubectl delete pod"} {
		next := strings.Index(err.Error(), want)
		if next <= at {
			t.Errorf("%q is missing or ahead of others:\n%v", want, err)
		}
		at = max(at, next)
	}
	if !errors.Is(err, cause) {
		t.Error("the cause is lost")
	}
}
