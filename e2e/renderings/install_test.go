package renderings

import (
	"context"
	"strings"
	"sync"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// stored has the server's objects by id, normalized.
type stored map[string]map[string]any

// account counts the objects, warnings and pods of a test.
type account struct {
	objects  map[string]int // by kind
	warnings map[string]int // by text
	pods     int
}

func newAccount() *account { return &account{objects: map[string]int{}, warnings: map[string]int{}} }

// expected returns the known warnings with their reasons.
func expected() map[string]string {
	return map[string]string{
		`metadata.annotations[container.apparmor.security.beta.kubernetes.io/install-cni]: deprecated since v1.30; ` +
			`use the "appArmorProfile" field instead`: "Kubernetes 1.25 to 1.29 have only the annotation; useAppArmorAnnotation=false sets the field",
	}
}

// warned counts the warnings since the last call and fails the test for unexpected ones.
func (a *account) warned(t *testing.T) {
	t.Helper()
	for _, text := range shared.server.warnings.drain() {
		text = strings.TrimPrefix(text, "spec.template.")
		a.warnings[text]++
		if _, is := expected()[text]; !is {
			t.Errorf("the server warns: %s", text)
		}
	}
}

// install creates all objects in order and returns them as stored by the server.
func install(t *testing.T, r rendering, a *account) stored {
	t.Helper()
	s := shared.server
	for _, o := range r.objects {
		if _, err := s.create(t.Context(), o); err != nil {
			t.Errorf("%s: %v", id(o), err)
		}
		a.objects[o.GetKind()]++
	}
	a.warned(t)
	var mu sync.Mutex
	out := stored{}
	each(r.objects, func(o *object) {
		now, err := s.get(t.Context(), o)
		if err != nil {
			t.Errorf("%s: %v", id(o), err)
			return
		}
		for _, problem := range missing("", o.Object, now.Object) {
			t.Errorf("%s: %s", id(o), problem)
		}
		mu.Lock()
		defer mu.Unlock()
		out[id(o)] = normalized(now)
	})
	return out
}

// uninstall deletes objects and fails if one remains. Objects that a failed test did not create may be missing.
func uninstall(t *testing.T, objects []*object) {
	t.Helper()
	each(objects, func(o *object) {
		err := shared.server.remove(context.Background(), o)
		if err != nil && (!t.Failed() || !apierrors.IsNotFound(err)) {
			t.Errorf("removing %s: %v", id(o), err)
		}
	})
}

// each calls do with all objects in parallel.
func each(objects []*object, do func(*object)) {
	var all sync.WaitGroup
	for _, o := range objects {
		all.Go(func() { do(o) })
	}
	all.Wait()
}

// TestInstall creates the objects of each rendering in an empty cluster, creates a pod of each
// template by dry run, and deletes the objects.
func TestInstall(t *testing.T) {
	a, names, different := newAccount(), 0, 0
	for _, r := range shared.renderings {
		t.Run(r.name(), func(t *testing.T) {
			t.Cleanup(func() { uninstall(t, r.objects) })
			shared.fresh[r.name()] = install(t, r, a)
			tryPods(t, r, a)
			names += len(r.names)
			different++
		})
	}
	t.Logf("%d renderings, %d of them different; objects: %v", names, different, a.objects)
	t.Logf("%d pods tried; warnings: %v", a.pods, a.warnings)
	t.Run("the list is complete", func(t *testing.T) {
		if names < 300 || different < 200 {
			t.Errorf("%d renderings, %d different", names, different)
		}
		for _, kind := range []string{"DaemonSet", "Deployment", "NetworkPolicy", "ResourceQuota", "PodMonitor", "NetworkAttachmentDefinition"} {
			if a.objects[kind] == 0 {
				t.Errorf("no rendering has a %s", kind)
			}
		}
		for text := range expected() {
			if a.warnings[text] == 0 {
				t.Errorf("missing warning: %s", text)
			}
		}
	})
}

// tryPods creates a pod of each template by dry run.
func tryPods(t *testing.T, r rendering, a *account) {
	t.Helper()
	for _, o := range r.objects {
		if o.GetKind() != "ResourceQuota" {
			continue
		}
		now, err := shared.server.get(t.Context(), o)
		if err == nil {
			err = shared.server.setQuotaStatus(t.Context(), now)
		}
		if err != nil {
			t.Errorf("%s: %v", id(o), err)
		}
	}
	all, err := pods(r.objects)
	if err != nil {
		t.Error(err)
	}
	for _, pod := range all {
		made, err := shared.server.tryPod(t.Context(), pod)
		if err != nil {
			t.Errorf("pod %s: %v", pod.GetGenerateName(), err)
			continue
		}
		a.pods++
		a.warned(t)
		for _, problem := range missing("", pod.Object, made.Object) {
			t.Errorf("pod %s: %s", pod.GetGenerateName(), problem)
		}
	}
}
