package main

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/releaseutil"
	"sigs.k8s.io/yaml"
)

// release has Helm's built-in object Release, and the API server's version.
type release struct {
	Name, Namespace string
	// Tool is the value of the label app.kubernetes.io/managed-by: "Helm", unless the objects are applied by another
	// tool.
	Tool string
	// Kubernetes is the API server's version, such as v1.30.0.
	Kubernetes string
}

func defaultRelease() release {
	return release{Name: "istio-cni", Namespace: "istio-system", Tool: "Helm", Kubernetes: "v1.30.0"}
}

// object is one rendered object.
type object struct {
	Kind, Name, Namespace string
	// Text is the rendered YAML with its comments; Fields are its decoded content.
	Text   string
	Fields map[string]any
}

// rendering has the objects of a chart in installation order, and the rendered NOTES.txt.
type rendering struct {
	Objects []object
	Notes   string
}

// render renders a chart with the user's values. Values that the schema or a template rejects are errors.
func render(c *chart.Chart, r release, given map[string]any) (rendering, error) {
	version, err := chartutil.ParseKubeVersion(r.Kubernetes)
	if err != nil {
		return rendering{}, fmt.Errorf("reading version %q of Kubernetes: %w", r.Kubernetes, err)
	}
	known := chartutil.DefaultCapabilities.Copy()
	known.KubeVersion = *version
	// ParseKubeVersion drops a vendor's suffix; Helm passes the whole version to templates.
	known.KubeVersion.Version = r.Kubernetes
	if want := c.Metadata.KubeVersion; want != "" && !chartutil.IsCompatibleRange(want, version.String()) {
		return rendering{}, fmt.Errorf("the chart wants Kubernetes %s, this is %s", want, r.Kubernetes)
	}
	options := chartutil.ReleaseOptions{Name: r.Name, Namespace: r.Namespace, Revision: 1, IsInstall: true}
	values, err := chartutil.ToRenderValues(c, given, options, known)
	if err != nil {
		return rendering{}, fmt.Errorf("checking values: %w", err)
	}
	if about, ok := values["Release"].(map[string]any); ok {
		about["Service"] = r.Tool
	}
	texts, err := engine.Render(c, values)
	if err != nil {
		return rendering{}, fmt.Errorf("rendering: %w", err)
	}
	return collect(texts)
}

// collect splits the rendered files into objects.
func collect(texts map[string]string) (rendering, error) {
	var out rendering
	for name, text := range texts {
		switch {
		case path.Base(name) == "NOTES.txt":
			out.Notes = text
			continue
		case strings.HasPrefix(path.Base(name), "_"):
			continue
		}
		for _, part := range releaseutil.SplitManifests(text) {
			o, err := decode(part)
			if err != nil {
				return rendering{}, fmt.Errorf("decoding the output of %s: %w\n%s", name, err, part)
			}
			if o.Kind != "" {
				out.Objects = append(out.Objects, o)
			}
		}
	}
	slices.SortFunc(out.Objects, func(a, b object) int {
		if d := rank(a.Kind) - rank(b.Kind); d != 0 {
			return d
		}
		return strings.Compare(a.Kind+a.Name+" "+a.Namespace, b.Kind+b.Name+" "+b.Namespace)
	})
	return out, nil
}

// decode decodes one object. Text without an object yields one without a kind.
func decode(text string) (object, error) {
	o := object{Text: strings.TrimSpace(text) + "\n"}
	if err := yaml.UnmarshalStrict([]byte(text), &o.Fields); err != nil {
		return object{}, err
	}
	if len(o.Fields) == 0 {
		return object{}, nil
	}
	var head struct {
		Kind     string `json:"kind"`
		Metadata struct{ Name, Namespace string }
	}
	if err := yaml.Unmarshal([]byte(text), &head); err != nil {
		return object{}, err
	}
	o.Kind, o.Name, o.Namespace = head.Kind, head.Metadata.Name, head.Metadata.Namespace
	if o.Kind == "" || o.Name == "" {
		return object{}, fmt.Errorf("object without kind or name")
	}
	return o, nil
}

// rank is the position of a kind in Helm's order of installation; unknown kinds come last.
func rank(kind string) int {
	if i := slices.Index(releaseutil.InstallOrder, kind); i >= 0 {
		return i
	}
	return len(releaseutil.InstallOrder)
}

// text returns the objects as one YAML stream.
func (r rendering) text() []byte {
	var out []byte
	for _, o := range r.Objects {
		out = append(out, "---\n"...)
		out = append(out, o.Text...)
	}
	return out
}
