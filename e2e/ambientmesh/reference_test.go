package ambientmesh

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// TestFromTheReferenceAndBack has the reference serve pods of ambient mode, replaces it, and rolls back. Connections live, and pods that
// start meanwhile are in the mesh from their first connection on.
func TestFromTheReferenceAndBack(t *testing.T) {
	b := lab.NodeBeside(t, cluster.Options{Families: cluster.DualStack})
	all := &state{node: b.Lab, reference: true}
	for _, stage := range []struct {
		name string
		run  func(*scenario, *lab.Beside)
	}{
		{"reference", (*scenario).served},
		{"upgrade", (*scenario).upgraded},
		{"rollback", (*scenario).rolledBack},
	} {
		b.Stage(stage.name, func(t *testing.T) { stage.run(&scenario{Lab: b.Lab.With(t), state: all}, b.With(t)) })
	}
}

// keepers are clients with one connection for all their requests.
var keepers = []string{"keep", "keep-out", "keep-side"}

// served: the reference serves pods of each kind.
func (s *scenario) served(b *lab.Beside) {
	s.Helper()
	b.Helm("install", lab.Release, b.Reference.Chart, "--set=profile=ambient,global.variant=,global.hub="+lab.ReferenceHub+",global.tag="+lab.ReferenceTag)
	b.UntilRolledOut(lab.ReferenceImage)
	s.startZtunnel()
	s.label(modeLabel + "=ambient")
	s.Pod("first", lab.Plain(probed))
	s.Pod("second", lab.Plain(probed))
	s.Pod("side", injected())
	s.Pod("out", lab.Plain(probed, optedOut))
	s.UntilReady("first", "second", "side", "out")
	url := s.URL("first", "", lab.AppPort)
	s.Pod("keep", lab.Plain(client("keep", url)))
	s.Pod("keep-out", lab.Plain(client("keep", url), optedOut))
	s.Pod("keep-side", lab.Plain(client("keep", s.URL("side", "6", lab.AppPort))))
	s.UntilReady(keepers...)
	s.members = []member{{"first", ambient}, {"second", ambient}, {"side", sidecar}, {"out", outside}}
	s.check()
	s.untilKept(keepers...)
}

// upgraded: helm upgrade to this program.
func (s *scenario) upgraded(b *lab.Beside) {
	s.Helper()
	s.replace("up", func() {
		b.Helm("upgrade", lab.Release, "../../manifests/istio-cni", "--reset-then-reuse-values", "--set=global.hub="+lab.OursHub+",global.tag="+lab.OursTag)
		b.UntilRolledOut(lab.Image)
	})
	s.reference = false
	s.Pod("ours", lab.Plain(probed))
	s.UntilReady("ours")
	s.members = append(s.members, member{"ours", ambient})
	s.check()
	s.checkRights()
}

// rolledBack: helm rollback to the reference.
func (s *scenario) rolledBack(b *lab.Beside) {
	s.Helper()
	s.replace("down", func() {
		b.Helm("rollback", lab.Release)
		b.UntilRolledOut(lab.ReferenceImage)
	})
	s.reference = true
	s.Pod("back", lab.Plain(probed))
	s.UntilReady("back")
	s.members = append(s.members, member{"back", ambient})
	s.check()
	s.Stop(s.ztunnel)
}

// replace replaces the agent, while pods of ambient mode start, and checks that no pod leaves the mesh: its annotation is enabled and
// ztunnel serves it all the time, its connections live, and the first connection of a new pod passes ztunnel.
func (s *scenario) replace(prefix string, agent func()) {
	s.Helper()
	annotations, arrived := s.annotations(), s.arrive(prefix)
	agent()
	names := arrived()
	values := annotations()
	for _, m := range s.members {
		want := []string{""}
		if m.in == ambient {
			want = []string{"enabled"}
		}
		if !slices.Equal(values[m.name], want) || slices.Contains(s.ztunnel.Lines(), "stopped "+m.name) {
			s.Errorf("%v: annotation %q, want %q; ztunnel:\n%s", m, values[m.name], want, strings.Join(s.ztunnel.Lines(), "\n"))
		}
	}
	for _, name := range names {
		s.Until("the end of "+name, func() bool { return s.Get(lab.App, name).Status.Phase == core.PodSucceeded })
		want := path(member{name, ambient}, member{"first", ambient})
		if text := s.Output(lab.App, name, "app", false); !strings.Contains(text, want) {
			s.Errorf("the first connection of %s, whose annotation was %q:\n%s\nwant %s", name, values[name], text, want)
		}
	}
	s.Step("pods that started meanwhile: %q", names)
	s.untilKept(keepers...)
}

// annotations follows the annotations of running pods. It returns a function that ends that, and returns the values of each pod in order.
func (s *scenario) annotations() (end func() map[string][]string) {
	s.Helper()
	events, err := s.Client().CoreV1().Pods(lab.App).Watch(s.Context(), meta.ListOptions{})
	s.Must(err)
	done := make(chan map[string][]string, 1)
	go func() {
		all := map[string][]string{}
		for e := range events.ResultChan() {
			pod, is := e.Object.(*core.Pod)
			if !is || pod.Status.Phase == core.PodSucceeded {
				continue
			}
			have, value := all[pod.Name], pod.Annotations[redirection]
			if len(have) == 0 || have[len(have)-1] != value {
				all[pod.Name] = append(have, value)
			}
		}
		done <- all
	}()
	return func() map[string][]string { events.Stop(); return <-done }
}

// arrive creates pods whose application is a client of pod first. It returns a function that waits for some more, ends that, and returns
// the names of all.
func (s *scenario) arrive(prefix string) (end func() []string) {
	s.Helper()
	const beat, more = time.Second, 2
	template := lab.Plain(client("get", s.URL("first", "", lab.AppPort)))
	ctx, cancel := context.WithCancel(s.Context())
	type result struct {
		names []string
		err   error
	}
	done := make(chan result, 1)
	go func() {
		var r result
		for left := more; left > 0; time.Sleep(beat) {
			name := fmt.Sprintf("%s-%d", prefix, len(r.names))
			pod := &core.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}
			pod.Name = name
			_, err := s.Client().CoreV1().Pods(lab.App).Create(s.Context(), pod, meta.CreateOptions{})
			r.names, r.err = append(r.names, name), errors.Join(r.err, err)
			if ctx.Err() != nil {
				left--
			}
		}
		done <- r
	}()
	return func() []string { cancel(); r := <-done; s.Must(r.err); return r.names }
}
