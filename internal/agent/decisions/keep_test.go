package decisions

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/agent/agenttest"
	"github.com/meshcni/istio-cni/internal/core/sidecar"
	"github.com/meshcni/istio-cni/internal/kube"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/test/check"
)

// restored returns a ring restored from the file, and the log.
func restored(file string) (r *Ring, log string) {
	var out bytes.Buffer
	r = &Ring{}
	r.Restore(file, slog.New(slog.NewTextHandler(&out, nil)))
	return r, out.String()
}

func report(pod string, change func(*agentapi.Report)) agentapi.Report {
	r := agentapi.Report{
		Time: time.Unix(9, 5).UTC(), Namespace: "shop", Pod: pod, UID: "uid-" + pod, Reason: "captured", Source: agentapi.SourceAgent,
		Captured: true, Seconds: map[agentapi.Phase]float64{agentapi.PhaseTotal: 0.5},
	}
	if change != nil {
		change(&r)
	}
	return r
}

// outsideOf returns an entry like RecordOutside's.
func outsideOf(pod string) agentapi.Report {
	return report(pod, func(r *agentapi.Report) {
		r.Source, r.Captured, r.Reason, r.Seconds = agentapi.SourceWatch, false, "not-injected", map[agentapi.Phase]float64{}
	})
}

func (r *Ring) enterOutside(pod string) {
	r.addOutside(outsideOf(pod), func(uid string) bool { return uid == "uid-"+pod })
}

func names(all []agentapi.Report) (pods []string) {
	for _, one := range all {
		pods = append(pods, one.Pod)
	}
	return pods
}

func TestDecisionsOutliveARestart(t *testing.T) {
	file := filepath.Join(t.TempDir(), KeptName)
	var first Ring
	for i := range 600 {
		first.Add(report(fmt.Sprint("p", i), nil))
		first.enterOutside(fmt.Sprint("w", i))
	}
	first.Add(report("bad", func(r *agentapi.Report) { r.Error = "<\x1b\u202e \"quoted\"" }))
	agenttest.Go(t, func(ctx context.Context) { first.Keep(ctx, file, slog.New(slog.DiscardHandler)) })() // its end writes the file
	info, err := os.Stat(file)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Fatalf("%v, %v", info, err)
	}
	second, log := restored(file)
	was, is := first.All(), second.All()
	was[0].Trim()
	for i := range was {
		was[i].Number = is[i].Number // numbers restart
	}
	if diff := cmp.Diff(was, is); diff != "" || log != "" || len(is) != 1024 || is[0].Number != 1024 {
		t.Fatalf("%d decisions, log %q (-want +got):\n%s", len(is), log, diff)
	}
	// The second ring continues where the first ended, with its reports.
	second.enterOutside("w599")
	second.enterOutside("p599")
	second.enterOutside("new")
	if got := names(second.All()[:2]); !slices.Equal(got, []string{"new", "bad"}) {
		t.Errorf("got %q", got)
	}
}

// TestKeep_Appends: each report appends one line. The file is rewritten only after a removal or another process's change.
func TestKeep_Appends(t *testing.T) {
	file := filepath.Join(t.TempDir(), KeptName)
	var r Ring
	k := keeper{ring: &r, file: file}
	save := func() {
		t.Helper()
		check.OK(t, k.save())
	}
	if save(); k.size != 0 {
		t.Error("an empty ring has a file")
	}
	var before os.FileInfo
	wants := func(what string, same bool, pods ...string) {
		t.Helper()
		save()
		after, err := os.Stat(file)
		if err != nil || before != nil && same && !os.SameFile(before, after) {
			t.Errorf("%s: it is written anew, %v", what, err)
		}
		before = after
		again, log := restored(file)
		if got := names(again.All()); !slices.Equal(got, pods) || log != "" {
			t.Errorf("%s: the file has %q, %s", what, got, log)
		}
	}
	r.Add(report("a", nil))
	wants("the first one", true, "a")
	written := before.ModTime()
	if wants("no change", true, "a"); !before.ModTime().Equal(written) {
		t.Error("it is written without a change")
	}
	r.enterOutside("b")
	wants("a pod outside", true, "b", "a")
	r.Add(report("b", nil))
	wants("its report", true, "b", "a")
	if text, err := os.ReadFile(file); err != nil || bytes.Count(text, []byte("\n")) != 4 {
		t.Errorf("the file has %s, %v", text, err)
	}
	check.OK(t, os.Remove(file))
	wants("a removal", false, "b", "a")
	check.OK(t, os.Truncate(file, 40))
	wants("a foreign change", false, "b", "a")
}

// TestRestore_KilledWithinALine: all complete lines are restored.
func TestRestore_KilledWithinALine(t *testing.T) {
	file := filepath.Join(t.TempDir(), KeptName)
	text, err := printKept([]agentapi.Report{report("a", nil), report("b", nil)})
	check.OK(t, err)
	check.OK(t, os.WriteFile(file, text[:len(text)-20], 0o600))
	r, log := restored(file)
	if got := names(r.All()); !slices.Equal(got, []string{"a"}) || log != "" {
		t.Errorf("got %q, %s", got, log)
	}
	r.Add(report("c", nil))
	k := keeper{ring: r, file: file}
	check.OK(t, k.save())
	if r, log = restored(file); len(r.All()) != 2 || log != "" {
		t.Errorf("got %q, %s", names(r.All()), log)
	}
}

func TestAFileThatCannotBeUsedIsReplaced(t *testing.T) {
	for text, cause := range map[string]string{
		"":              "line 1: unexpected end",
		"\x00\x00\x00":  "line 1",
		`{"version":3}`: "version 3",
		`[]`:            "line 1",
		`{"version":2}` + "\n" + `{"pod":` + "\n": "line 2",
		strings.Repeat(" ", maxKept+1):            "at most 4194304 bytes",
	} {
		file := filepath.Join(t.TempDir(), KeptName)
		check.OK(t, os.WriteFile(file, []byte(text), 0o600))
		r, log := restored(file)
		if strings.Count(log, "\n") != 1 || !strings.Contains(log, cause) || len(r.All()) != 0 {
			t.Errorf("%.40q: %s", text, log)
		}
		check.OK(t, (&keeper{ring: r, file: file}).save())
		if _, log = restored(file); log != "" {
			t.Errorf("%.40q is not replaced: %s", text, log)
		}
	}
	if _, log := restored(filepath.Join(t.TempDir(), KeptName)); log != "" {
		t.Errorf("no file: %s", log)
	}
}

// TestTheFileIsBounded: with reports of maximum length the file has the latest.
func TestTheFileIsBounded(t *testing.T) {
	file := filepath.Join(t.TempDir(), KeptName)
	var r Ring
	for i := range remembered {
		one := report(fmt.Sprint(i), func(r *agentapi.Report) {
			r.Error, r.Detail = strings.Repeat(`"`, maxKept), strings.Repeat(`\`, maxKept)
		})
		one.Trim()
		r.Add(one)
	}
	check.OK(t, (&keeper{ring: &r, file: file}).save())
	again, log := restored(file)
	got := again.All()
	if info, err := os.Stat(file); err != nil || info.Size() > maxKept || log != "" || len(got) < remembered/2 || len(got) == remembered || got[0].Pod != "511" {
		t.Errorf("%v, %v, %d decisions, %s", info, err, len(got), log)
	}
}

// TestPodsOutsideHideNoDecision, nor do decisions hide those pods.
func TestPodsOutsideHideNoDecision(t *testing.T) {
	var r Ring
	r.Add(report("refused", func(r *agentapi.Report) { r.Error = "it failed" }))
	r.enterOutside("first")
	for i := range 5000 {
		r.enterOutside(fmt.Sprint("w", i))
	}
	all := r.All()
	if len(all) != remembered+1 || all[0].Pod != "w4999" || all[remembered].Pod != "refused" {
		t.Errorf("%d decisions, the first is %s", len(all), all[0].Pod)
	}
	r = Ring{}
	r.enterOutside("outside")
	for i := range 5000 {
		r.Add(report(fmt.Sprint("p", i), nil))
	}
	if all := r.All(); len(all) != remembered+1 || all[remembered].Pod != "outside" {
		t.Errorf("%d decisions", len(all))
	}
}

// TestAReportIsNotRepeated by the watch, whichever comes first.
func TestAReportIsNotRepeated(t *testing.T) {
	var r Ring
	r.Add(report("before", nil))
	r.enterOutside("before")
	r.enterOutside("after")
	r.enterOutside("after")
	r.Add(report("after", nil))
	r.Add(report("failed", func(r *agentapi.Report) { r.Error = "no" }))
	r.enterOutside("failed") // and then passed without a report
	if got := names(r.All()); !slices.Equal(got, []string{"failed", "failed", "after", "before"}) {
		t.Errorf("got %q", got)
	}
}

// TestPodsOutsideAreEntered from the node's watch: once each, with reason and start, after their ADD.
func TestPodsOutsideAreEntered(t *testing.T) {
	var ring Ring
	var watch kube.Listener[kube.Pod]
	policy := sidecar.Policy{ExcludeNamespaces: []string{"quiet"}}
	ring.RecordOutside(t.Context(), func(_ context.Context, l kube.Listener[kube.Pod]) { watch = l }, func() (sidecar.Policy, error) { return policy, nil })
	started := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	publish := func(namespace, name string, annotations map[string]string, change ...func(*kube.Pod)) {
		p := kube.Pod{Started: started, Addresses: []netip.Addr{netip.MustParseAddr("10.0.0.1")}, Facts: sidecar.Facts{
			Namespace: namespace, Name: name, UID: "uid-" + name, Annotations: annotations,
			Containers: []sidecar.Container{{Name: "istio-proxy", Args: []string{"proxy", "sidecar"}}},
		}}
		for _, c := range change {
			c(&p)
		}
		watch.OnUpdate(p)
	}
	injected, onHost := map[string]string{sidecar.StatusKey: "{}"}, func(p *kube.Pod) { p.Facts.HostNetwork = true }
	publish("shop", "mesh", injected)
	publish("shop", "early", nil, func(p *kube.Pod) { p.Addresses = nil })
	publish("shop", "host", injected, onHost)
	watch.OnSync()
	publish("quiet", "named", nil)
	publish("shop", "plain", nil)
	publish("shop", "opted", map[string]string{sidecar.InjectKey: "no"}, func(p *kube.Pod) {
		p.Facts.Labels = map[string]string{sidecar.InjectKey: "false\x1b"}
	})
	publish("shop", "never", map[string]string{sidecar.InjectKey: "false", sidecar.StatusKey: "{}"})
	// Only another reason enters a pod again.
	publish("shop", "plain", nil, func(p *kube.Pod) { p.Facts.Labels = map[string]string{"a": "b"} })
	publish("shop", "host", injected)
	publish("shop", "never", injected, onHost)
	var got []string
	for _, one := range ring.All() {
		if one.Captured || one.Source != agentapi.SourceWatch || !one.Time.Equal(started) {
			t.Errorf("%+v", one)
		}
		got = append(got, one.Pod+" "+one.Reason+" "+one.Detail)
	}
	want := []string{
		"never host-network ", `never inject-disabled annotation "false"`, "opted not-injected ", "plain not-injected ", "named excluded-namespace quiet",
		"host host-network ",
	}
	check.Diff(t, "decisions", want, got)
}
