package renderings

import (
	"context"
	"slices"
	"testing"

	kube "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/jsonmergepatch"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/client-go/kubernetes/scheme"
)

// tool is the way in which a program creates an object and updates it from its previous rendering. Both functions
// return the stored object.
type tool struct {
	name   string
	create func(ctx context.Context, o *object) (*object, error)
	change func(ctx context.Context, was, want *object) (*object, error)
}

// tools returns the tools that users have.
func tools() []tool {
	s := shared.server
	return []tool{
		// Helm 3, and kubectl apply.
		{
			"by three-way merge",
			func(ctx context.Context, o *object) (*object, error) { return s.create(ctx, o) },
			merge,
		},
		// Helm 4, and kubectl apply --server-side.
		{
			"by server-side apply",
			s.apply,
			func(ctx context.Context, _, want *object) (*object, error) { return s.apply(ctx, want) },
		},
	}
}

// merge patches the stored object by a three-way merge with the old and the new rendering.
func merge(ctx context.Context, was, want *object) (*object, error) {
	live, err := shared.server.get(ctx, want)
	if err != nil {
		return nil, err
	}
	patch, kind, err := threeWay(was, want, live)
	if err != nil || string(patch) == "{}" {
		return live, err
	}
	return shared.server.patch(ctx, want, kind, patch)
}

// threeWay computes a strategic merge patch, or a JSON merge patch for custom resources.
func threeWay(was, want, live *object) (patch []byte, kind types.PatchType, err error) {
	before, after, now := []byte(text(was)), []byte(text(want)), []byte(text(live))
	typed, err := scheme.Scheme.New(want.GroupVersionKind())
	switch {
	case kube.IsNotRegisteredError(err):
		patch, err = jsonmergepatch.CreateThreeWayJSONMergePatch(before, after, now)
		return patch, types.MergePatchType, err
	case err != nil:
		return nil, "", err
	}
	rules, err := strategicpatch.NewPatchMetaFromStruct(typed)
	if err != nil {
		return nil, "", err
	}
	patch, err = strategicpatch.CreateThreeWayMergePatch(before, after, now, rules, true)
	return patch, types.StrategicMergePatchType, err
}

// upgrade upgrades one rendering to another like Helm: it updates and creates objects, then deletes those that are no
// longer rendered. Each object must equal the one of a fresh installation.
func (with tool) upgrade(t *testing.T, from, to rendering) {
	t.Helper()
	before, after, want := byID(from.objects), byID(to.objects), installed(t, to)
	for _, o := range to.objects {
		was := before[id(o)]
		var now *object
		var err error
		switch {
		case was == nil:
			now, err = with.create(t.Context(), o)
		case text(was) == text(o):
			continue // no other writer has changed it
		default:
			now, err = with.change(t.Context(), was, o)
		}
		if err != nil {
			t.Errorf("from %s to %s: %s: %v", from.name(), to.name(), id(o), err)
			continue
		}
		for _, problem := range differences(want[id(o)], normalized(now)) {
			t.Errorf("from %s to %s: %s: %s", from.name(), to.name(), id(o), problem)
		}
	}
	for _, o := range from.objects {
		if after[id(o)] != nil {
			continue
		}
		if err := shared.server.remove(t.Context(), o); err != nil {
			t.Errorf("from %s to %s: %v", from.name(), to.name(), err)
		}
	}
}

// TestUpgrade upgrades the default rendering to each other one, and back.
func TestUpgrade(t *testing.T) {
	start, err := byName(shared.renderings, `defaults on ""`)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range shared.renderings {
		installed(t, r)
	}
	for _, with := range tools() {
		t.Run(with.name, func(t *testing.T) {
			a, upgrades := newAccount(), 0
			t.Cleanup(func() { uninstall(t, start.objects) })
			with.upgrade(t, rendering{names: []string{"nothing"}}, start)
			for _, r := range shared.renderings {
				// A Job is run and not upgraded, and its pods have labels with its UID.
				if slices.ContainsFunc(r.objects, func(o *object) bool { return o.GetKind() == "Job" }) {
					continue
				}
				t.Run(r.name(), func(t *testing.T) {
					with.upgrade(t, start, r)
					with.upgrade(t, r, start)
					a.warned(t)
					upgrades++
				})
			}
			t.Logf("%d upgrades and as many ways back; warnings: %v", upgrades, a.warnings)
		})
	}
}

// installed returns the stored objects of a fresh installation of a rendering, from TestInstall or by
// installing it.
func installed(t *testing.T, r rendering) stored {
	t.Helper()
	of, is := shared.fresh[r.name()]
	if !is {
		of = install(t, r, newAccount())
		uninstall(t, r.objects)
		shared.fresh[r.name()] = of
	}
	return of
}
