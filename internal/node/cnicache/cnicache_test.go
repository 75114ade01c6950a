package cnicache

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/google/go-cmp/cmp"

	"github.com/meshcni/istio-cni/internal/test/check"
)

func TestParse(t *testing.T) {
	t.Parallel()
	const config = `"config":"eyJwbHVnaW5zIjpbeyJ0eXBlIjoiYSJ9LHsidHlwZSI6ImIifV19"` // {"plugins":[{"type":"a"},{"type":"b"}]}
	for _, tc := range []struct {
		name, text string
		want       *Entry
	}{
		{"one plugin", `{"kind":"cniCacheV1","config":"eyJ0eXBlIjoiYSJ9"}`, &Entry{Kind: Kind, Plugins: []string{"a"}}},
		{
			"a namespace in the result alone", `{"kind":"k",` + config + `,"result":{"interfaces":[{"name":"br"},{"sandbox":"/n"},{"sandbox":"/m"}]}}`,
			&Entry{Kind: "k", Plugins: []string{"a", "b"}, NetNS: "/n"},
		},
		{"arguments of another form", `{"kind":"k",` + config + `,"cniArgs":{"K8S_POD_NAME":"web"}}`, &Entry{Kind: "k", Plugins: []string{"a", "b"}}},
		{"no kind", `{` + config + `}`, nil},
		{"no configuration", `{"kind":"k"}`, nil},
		{"no JSON", `{"kind":`, nil},
		{"another type", `["kind"]`, nil},
		{"a configuration that is not base64", `{"kind":"k","config":"%%%"}`, nil},
	} {
		got, ok := Parse([]byte(tc.text))
		if want := tc.want; ok != (want != nil) || ok && !cmp.Equal(got, *want) {
			t.Errorf("%s: got %+v, %v", tc.name, got, ok)
		}
	}
	if e := (Entry{Plugins: []string{"a", "b"}}); !e.Uses("b") || e.Uses("c") {
		t.Error("the plugins are others")
	}
}

func TestWalk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for name, text := range map[string]string{"b": "2", "a": "1", "large": strings.Repeat(" ", maxFile+1)} {
		check.OK(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	if err := errors.Join(os.Mkdir(dir+"/dir", 0o700), os.Symlink("/nowhere", dir+"/dangling")); err != nil { // like a removed entry
		t.Fatal(err)
	}
	var got []string
	files, err := Walk(dir, nil, func(name string, data []byte, err error) error {
		got = append(got, fmt.Sprintf("%s %s %v", name, data, err != nil))
		return nil
	})
	if want := []string{"a 1 false", "b 2 false", "large  true"}; !slices.Equal(got, want) || files != 4 || err != nil {
		t.Errorf("got %q of %d files, %v", got, files, err)
	}
	stop := errors.New("enough")
	if _, err := Walk(dir, nil, func(string, []byte, error) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("Walk continues after %v", err)
	}
	if _, err := Walk(dir+"/none", nil, nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no directory: %v", err)
	}
}

// libcni writes the entry, so that the test does not rely on this package's idea of the format.
func TestParse_EntriesOfLibcni(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cni := libcni.NewCNIConfigWithCacheDir(nil, dir, fakeExec(`{"cniVersion":"1.0.0","interfaces":[{"name":"eth0"}],"ips":[]}`))
	list, err := libcni.NetworkConfFromBytes([]byte(`{"cniVersion":"1.0.0","name":"net","plugins":[{"type":"a"},{"type":"b"}]}`))
	check.OK(t, err)
	_, err = cni.AddNetworkList(t.Context(), list, &libcni.RuntimeConf{ContainerID: "c1", NetNS: "/run/netns/1", IfName: "eth0", Args: [][2]string{
		{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "shop"}, {"K8S_POD_NAME", "web"}, {"K8S_POD_INFRA_CONTAINER_ID", "c1"}, {"K8S_POD_UID", "u"},
	}})
	check.OK(t, err)
	want := Entry{Kind: Kind, Plugins: []string{"a", "b"}, NetNS: "/run/netns/1", Namespace: "shop", Name: "web", UID: "u"}
	ofC1 := func(name string) bool { return Of(name, "c1") && !Of(name, "c") && !Of(name, "1") }
	files, err := Walk(dir+"/results", ofC1, func(_ string, data []byte, err error) error {
		if got, ok := Parse(data); !ok || !cmp.Equal(got, want) {
			t.Errorf("got %+v, %v", got, ok)
		}
		return err
	})
	if files != 1 || err != nil {
		t.Errorf("%d files, %v", files, err)
	}
}

// fakeExec is the output of all plugins.
type fakeExec string

func (a fakeExec) ExecPlugin(context.Context, string, []byte, []string) ([]byte, error) {
	return []byte(a), nil
}

func (a fakeExec) FindInPath(plugin string, _ []string) (string, error) { return "/" + plugin, nil }

func (a fakeExec) Decode(data []byte) (version.PluginInfo, error) {
	return new(version.PluginDecoder).Decode(data)
}
