package upgrade

import (
	"encoding/json"
	"slices"
	"strings"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/lab"
)

// observed: an observer beside the reference's agent finds the pod that loses its rules, and changes nothing.
func (s *scenario) observed() {
	s.Helper()
	s.Pods("lost")
	theirs := []string{"their-0", "their-1", "their-2", "their-3", "their-4", "their-5"}
	files := s.nodeFiles()
	dir := s.TempDir()
	s.bash(dir, documented.Find(s.Test, "helm", "install"), "--set=audit.interval=5s")
	s.Until("the observer", func() bool { return lab.Ready(s.observer()) })
	s.untilState("captured", append(theirs, "lost")...)
	s.bash(dir, documented.Find(s.Test, "kubectl", "pods"))
	s.checkReadOnly()
	s.checkAnswers()
	s.sameFiles(files)
	s.checkUnchanged(theirs...)

	s.InPod("lost", "nft", "flush", "ruleset")
	s.untilState("bypassed", "lost")
	s.untilState("captured", theirs...)
	s.Until("its event", func() bool { return s.Event("lost", "BrokenPod", "Remedy: restart the pod") })
	if !strings.Contains(s.metrics(), `istio_cni_audit_offender{namespace="app",pod="lost",state="bypassed"} 1`) {
		s.Error("no metric of the pod that lost its rules")
	}
	if left := s.InPod("lost", "nft", "list", "ruleset"); left != "" {
		s.Errorf("somebody has written rules: %s", left)
	}
	s.checkReadOnly()

	s.bash(dir, documented.Find(s.Test, "helm", "uninstall"))
	s.Until("the observer to go", func() bool { return s.observer() == nil })
	s.sameFiles(files)
	s.checkUnchanged(theirs...)
	s.checkInstalled(s.Reference.IstioCNI)
	s.RemoveReleased("lost")
	// Later steps want no event.
	s.Must(s.Client().CoreV1().Events(lab.App).DeleteCollection(s.Context(), meta.DeleteOptions{}, meta.ListOptions{FieldSelector: "involvedObject.name=lost"}))
}

// observer returns the observer's pod, nil if there is none.
func (s *scenario) observer() *core.Pod {
	s.Helper()
	pods, err := s.Client().CoreV1().Pods(lab.Mesh).List(s.Context(), meta.ListOptions{LabelSelector: "k8s-app=istio-cni-observer"})
	s.Must(err)
	if len(pods.Items) == 0 {
		return nil
	}
	return &pods.Items[0]
}

// nodeFiles lists the files of the directories that agents write to, with owners, modes, times and digests, without what the runtime
// writes for each pod, the observer's as well: libcni's cache, and the log of Istio's plugin.
func (s *scenario) nodeFiles() string {
	s.Helper()
	const list = `find /etc/cni /opt/cni /var/run/istio-cni -not -name istio-cni.log -printf '%p %y %M %U:%G %l' \( -type f -printf ' %T@ ' -exec sha256sum {} \; -o -printf '\n' \) | sort`
	return s.OnNode("sh", "-c", list)
}

func (s *scenario) sameFiles(before string) {
	s.Helper()
	if now := s.nodeFiles(); now != before || !strings.Contains(now, "/opt/cni/bin/istio-cni f ") {
		s.Errorf("the node had the files\n%s\nand has now\n%s", before, now)
	}
}

// untilState waits until kubectl istio-cni pods has the state of pods.
func (s *scenario) untilState(state string, names ...string) {
	s.Helper()
	s.Until(strings.Join(names, ", ")+" to be "+state, func() bool {
		r := s.Kubectl("istio-cni", "pods", "-n", lab.App, "-o", "json")
		if r.Code != 0 && r.Code != 3 { // the audit may not have begun
			return false
		}
		var all struct{ Items []struct{ Pod, State string } }
		s.Must(json.Unmarshal([]byte(r.Stdout), &all))
		found := 0
		for _, p := range all.Items {
			if slices.Contains(names, p.Pod) && p.State == state {
				found++
			}
		}
		return found == len(names)
	})
	s.Step("%q are %s", names, state)
}

// checkReadOnly checks that the observer writes events only, and asks for nothing that it may not have.
func (s *scenario) checkReadOnly() {
	s.Helper()
	all, err := s.Requests(lab.Mesh, "istio-cni-observer")
	s.Must(err)
	for _, r := range all {
		reads := slices.Contains([]string{"get", "list", "watch"}, r.Verb) || r.Resource == "events"
		review := r.Resource == "selfsubjectaccessreviews" // doctor's, which also looks for Cilium's settings
		cilium := r.Resource == "configmaps" && r.Name == "cilium-config"
		if !reads && !review || (r.Status == 401 || r.Status == 403) && !cilium {
			s.Errorf("%s %s: %d", r.Verb, r.URI, r.Status)
		}
	}
	if len(all) == 0 {
		s.Error("no request of the observer is known")
	}
}

// checkAnswers asks what the other commands say of a pod of the reference.
func (s *scenario) checkAnswers() {
	s.Helper()
	for args, want := range map[string]string{"": "app/their-1: CAPTURED", "--to=203.0.113.10:80": "15001"} {
		r := s.Kubectl(slices.Concat([]string{"istio-cni", "why", "app/their-1"}, strings.Fields(args))...)
		s.Step("why app/their-1 %s\n%s", args, r)
		if r.Code != 0 || !strings.Contains(r.Stdout, want) {
			s.Errorf("want exit code 0 and %q", want)
		}
	}
	r := s.Kubectl("istio-cni", "doctor", "-o", "json")
	s.Step("doctor\n%s", r)
	var checks struct {
		Items []struct{ Name, Result string }
	}
	s.Must(json.Unmarshal([]byte(r.Stdout), &checks))
	for _, c := range checks.Items {
		if c.Name != "directories" && c.Result != "ok" { // the runtime of these tests has its configuration elsewhere
			s.Errorf("doctor: %+v", c)
		}
	}
}

// metrics returns the observer's metrics.
func (s *scenario) metrics() string {
	s.Helper()
	r := s.Kubectl("get", "--raw", "/api/v1/namespaces/"+lab.Mesh+"/pods/"+s.observer().Name+":15014/proxy/metrics")
	if r.Code != 0 {
		s.Fatal(r)
	}
	return r.Stdout
}
