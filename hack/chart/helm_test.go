package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v4/pkg/chart/common"
	helm4util "helm.sh/helm/v4/pkg/chart/common/util"
	helm4loader "helm.sh/helm/v4/pkg/chart/v2/loader"
	helm4engine "helm.sh/helm/v4/pkg/engine"
)

// TestHelm4_RendersTheSame renders each sample with the engine of Helm 4.
func TestHelm4_RendersTheSame(t *testing.T) {
	t.Parallel()
	c, err := helm4loader.LoadDir(chartDir)
	noError(t, err)
	all, err := samples(theChart(t), chartDir)
	noError(t, err)
	r := defaultRelease()
	version, err := common.ParseKubeVersion(r.Kubernetes)
	noError(t, err)
	known := common.DefaultCapabilities.Copy()
	known.KubeVersion = *version
	for _, s := range all {
		t.Run(s.Name, func(t *testing.T) {
			t.Parallel()
			options := common.ReleaseOptions{Name: r.Name, Namespace: r.Namespace, Revision: 1, IsInstall: true}
			given, err := helm4util.ToRenderValues(c, values(t, s.Values...), options, known)
			noError(t, err)
			texts, err := helm4engine.Render(c, given)
			noError(t, err)
			have, err := collect(texts)
			noError(t, err)
			want := mustRender(t, s.Values...)
			equal(t, cmp.Diff(want.Notes+string(want.text()), have.Notes+string(have.text())), "", "-Helm 3 +Helm 4")
		})
	}
}

// TestHelmsOfTheTests_RefuseEqualItems keeps this module on versions of Helm whose validator takes the text 1.25 and the number for
// equal: users have them, and they refuse schemas that earlier and later ones accept.
func TestHelmsOfTheTests_RefuseEqualItems(t *testing.T) {
	t.Parallel()
	schema := []byte(`{"$schema": "http://json-schema.org/draft-07/schema#", "enum": ["1.25", 1.25]}`)
	for name, err := range map[string]error{
		"3": chartutil.ValidateAgainstSingleSchema(chartutil.Values{}, schema),
		"4": helm4util.ValidateAgainstSingleSchema(common.Values{}, schema),
	} {
		if err == nil || !strings.Contains(err.Error(), "items at 0 and 1 are equal") {
			t.Errorf("Helm %s: error %v", name, err)
		}
	}
}
