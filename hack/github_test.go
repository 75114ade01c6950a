package hack

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"
)

type workflow struct {
	Permissions map[string]string `json:"permissions"`
	Concurrency any               `json:"concurrency"`
	Jobs        map[string]struct {
		TimeoutMinutes int `json:"timeout-minutes"`
		Steps          []step
	} `json:"jobs"`
}

type step struct {
	Uses string         `json:"uses"`
	Run  string         `json:"run"`
	With map[string]any `json:"with"`
}

// read decodes a YAML file of the repository.
func read[T any](t *testing.T, name string) (out T) {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(text, &out); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return out
}

func glob(t *testing.T, pattern string, atLeast int) []string {
	t.Helper()
	names, err := filepath.Glob(pattern)
	if err != nil || len(names) < atLeast {
		t.Fatalf("%s: %q, %v", pattern, names, err)
	}
	return names
}

// TestWorkflows checks what actionlint does not: that a script or target of make exists, that jobs are bounded and have no right by
// default but to read, and that no token stays in a checkout.
func TestWorkflows(t *testing.T) {
	t.Parallel()
	makefile, err := os.ReadFile("../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	ours := regexp.MustCompile(`(?m)(?:^|sudo (?:-\S+ )?)(?:make ([a-z0-9-]+)|((?:hack|\.ci)/\S+))`)
	for _, name := range glob(t, "../.github/workflows/*", 3) {
		w := read[workflow](t, name)
		if diff := cmp.Diff(map[string]string{"contents": "read"}, w.Permissions); diff != "" || w.Concurrency == nil {
			t.Errorf("%s: concurrency %v, permissions, -want +have:\n%s", name, w.Concurrency, diff)
		}
		for id, job := range w.Jobs {
			if job.TimeoutMinutes == 0 {
				t.Errorf("%s: job %s has no timeout-minutes", name, id)
			}
			for _, s := range job.Steps {
				if strings.HasPrefix(s.Uses, "actions/checkout@") && s.With["persist-credentials"] != false {
					t.Errorf("%s: job %s: set persist-credentials: false", name, id)
				}
				for _, command := range ours.FindAllStringSubmatch(s.Run, -1) {
					target, script := command[1], command[2]
					if info, err := os.Stat("../" + script); err != nil || script != "" && info.Mode()&0o100 == 0 ||
						!strings.Contains(string(makefile), "\n"+target+":") && target != "" {
						t.Errorf("%s: job %s: no such script or target: %s", name, id, command[0])
					}
				}
			}
		}
	}
}

// TestCIHasTheTimeThatItsStepsMayTake: so that a step which hangs is stopped by .ci/run, which names it.
func TestCIHasTheTimeThatItsStepsMayTake(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../.ci/run")
	if err != nil {
		t.Fatal(err)
	}
	sum := 0
	for _, step := range regexp.MustCompile(`(?m)^ *step \S+ (\d+) `).FindAllStringSubmatch(string(text), -1) {
		minutes, err := strconv.Atoi(step[1])
		if err != nil {
			t.Fatal(err)
		}
		sum += minutes
	}
	limit := read[workflow](t, "../.github/workflows/ci.yaml").Jobs["run"].TimeoutMinutes
	if sum == 0 || sum >= limit {
		t.Errorf("the steps of .ci/run may take %d minutes, the job %d", sum, limit)
	}
}

var pinned = regexp.MustCompile(`^\s*(?:- )?uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$`)

// TestActionsArePinned: a tag can be moved, a commit cannot. The comment is for people and for dependabot.
func TestActionsArePinned(t *testing.T) {
	t.Parallel()
	uses := 0
	for _, name := range glob(t, "../.github/workflows/*", 3) {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if strings.Contains(line, "uses:") {
				uses++
				if !pinned.MatchString(strings.TrimRight(line, "\n")) {
					t.Errorf("%s: want OWNER/ACTION@COMMIT # vX.Y.Z: %s", name, line)
				}
			}
		}
	}
	if uses < 5 {
		t.Errorf("%d actions: the search does not find them", uses)
	}
}

// TestDependabotKnowsEveryModule: but for the oldest Kubernetes, which stays old.
func TestDependabotKnowsEveryModule(t *testing.T) {
	t.Parallel()
	config := read[struct {
		Updates []struct {
			Ecosystem   string   `json:"package-ecosystem"`
			Directories []string `json:"directories"`
		} `json:"updates"`
	}](t, "../.github/dependabot.yml")
	var have, want, ecosystems []string
	for _, u := range config.Updates {
		ecosystems = append(ecosystems, u.Ecosystem)
		if u.Ecosystem == "gomod" {
			have = append(have, u.Directories...)
		}
	}
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && slices.Contains([]string{"bin", ".git"}, d.Name()) {
			return filepath.SkipDir
		}
		if d.Name() == "go.mod" && !strings.HasSuffix(path, "/oldest/go.mod") {
			want = append(want, "/"+strings.TrimPrefix(strings.TrimPrefix(filepath.Dir(path), ".."), "/"))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(have)
	slices.Sort(want)
	if diff := cmp.Diff(want, have); diff != "" {
		t.Errorf("modules, -tree +dependabot.yml:\n%s", diff)
	}
	if diff := cmp.Diff([]string{"gomod", "gomod", "github-actions", "docker"}, ecosystems); diff != "" {
		t.Errorf("ecosystems, -want +have:\n%s", diff)
	}
}

// TestIssueForms: GitHub shows no form that lacks one of these, and says nothing.
func TestIssueForms(t *testing.T) {
	t.Parallel()
	for _, name := range glob(t, "../.github/ISSUE_TEMPLATE/[^c]*.yml", 2) {
		form := read[struct {
			Name, Description string
			Body              []struct {
				Type, ID   string
				Attributes struct{ Label, Value string }
			}
		}](t, name)
		if form.Name == "" || form.Description == "" || len(form.Body) == 0 {
			t.Errorf("%s: name %q, description %q, %d elements", name, form.Name, form.Description, len(form.Body))
		}
		for _, e := range form.Body {
			if (e.Type != "markdown" || e.Attributes.Value == "") && (e.ID == "" || e.Attributes.Label == "") {
				t.Errorf("%s: element %+v", name, e)
			}
		}
	}
}
