package installer_test

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/meshcni/istio-cni/internal/role/installer/nodetest"
	"github.com/meshcni/istio-cni/internal/role/plugin/chaintest"
)

// generation is a primary's list that differs in a byte sequence of its own.
func generation(n int) string {
	return strings.Replace(nodetest.BridgeList, `"x-note": 12345678901234567890`, fmt.Sprintf(`"x-note":  %d.10`, n), 1)
}

// A primary CNI that writes its file again every few milliseconds, careless or careful, until the agent holds back, which
// metric, readiness and an event must say. What it wrote last survives to the byte.
func TestAgentOutlivesAPrimaryThatRewritesItsFile(t *testing.T) {
	t.Parallel()
	writers := map[string]func(*nodetest.Node, string) error{
		"in place":  func(n *nodetest.Node, text string) error { return n.Overwrite(listFile, text) },
		"by rename": func(n *nodetest.Node, text string) error { return n.Replace(listFile, text) },
	}
	for name, write := range writers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			a := n.Start("UNINSTALL_ON_EXIT=always")
			a.AwaitReady()

			const series = `istio_cni_config_fights_total{rival="unknown"}`
			ticker := time.NewTicker(20 * time.Millisecond)
			defer ticker.Stop()
			rewrites := 0
			for a.Metric(series) != "1" {
				if err := a.Running(); err != nil || rewrites > 3000 {
					t.Fatalf("after %d rewrites: fights %q, %v", rewrites, a.Metric(series), err)
				}
				<-ticker.C
				rewrites++
				if err := write(n, generation(rewrites)); err != nil {
					t.Fatal(err)
				}
			}
			began := time.Now()
			last := generation(rewrites)
			t.Logf("the agent held back after %d rewrites of the primary", rewrites)
			// It is counted a moment before readiness has it, which may still report half a file.
			nodetest.Await(t, "readiness during the fight", func() error {
				if err := a.Ready(); err == nil || !strings.Contains(err.Error(), "keeps rewriting") {
					return fmt.Errorf("it says: %w", err)
				}
				return nil
			})
			nodetest.Await(t, "the event", func() error { return eventOf(n, "CNIConfigFight", "keeps rewriting") })

			a.AwaitReady()
			t.Logf("installed again %s after the last rewrite", time.Since(began))
			if diff := cmp.Diff(withUs(), types(t, n)); diff != "" {
				t.Errorf("the runtime loads: -want +got:\n%s", diff)
			}
			a.Terminate()
			if code := a.Wait(); code != 0 {
				t.Errorf("exit code %d", code)
			}
			if diff := cmp.Diff(last, n.Read(listFile)); diff != "" {
				t.Errorf("without our stanza the file is not what the primary wrote last: -want +got:\n%s", diff)
			}
		})
	}
}

// eventOf is nil when the API server has an event on the node with reason and a part of its message.
func eventOf(n *nodetest.Node, reason, part string) error {
	var all []string
	for _, text := range n.API.Events() {
		var event struct {
			Reason, Message string
			InvolvedObject  struct{ Kind, Name string }
		}
		if err := json.Unmarshal(text, &event); err != nil {
			return err
		}
		if event.Reason == reason && strings.Contains(event.Message, part) &&
			event.InvolvedObject.Kind == "Node" && event.InvolvedObject.Name == nodetest.NodeName {
			return nil
		}
		all = append(all, string(text))
	}
	return notYet("the API server has no such event: %q", all)
}

// background repeats a check until the returned function is called, which fails the test with the first objection.
func background(t *testing.T, what string, check func() error) (stop func()) {
	t.Helper()
	var wg sync.WaitGroup
	ended := make(chan struct{})
	var objection error
	times := 0
	wg.Go(func() {
		ticker := time.NewTicker(300 * time.Microsecond) // other tests need the machine, too
		defer ticker.Stop()
		for ; objection == nil; times++ {
			select {
			case <-ended:
				return
			case <-ticker.C:
				objection = check()
			}
		}
	})
	stop = sync.OnceFunc(func() {
		t.Helper()
		close(ended)
		wg.Wait()
		if objection != nil {
			t.Errorf("%s, seen the %dth time: %v", what, times, objection)
		}
		t.Logf("%s: looked %d times", what, times)
	})
	t.Cleanup(stop)
	return stop
}

// credentials are what a kubeconfig gives; the error says what is torn about it.
func credentials(text []byte) (token, ca string, err error) {
	var file struct {
		Users []struct {
			User struct{ Token string }
		}
		Clusters []struct {
			Cluster struct {
				Data string `json:"certificate-authority-data"`
			}
		}
	}
	if err = errors.Join(yaml.UnmarshalStrict(text, &map[string]any{}), yaml.Unmarshal(text, &file)); err != nil {
		return "", "", err
	}
	if len(file.Users) != 1 || len(file.Clusters) != 1 || !bytes.HasSuffix(text, []byte("\n")) {
		return "", "", notYet("it is torn: %q", text)
	}
	authority, err := base64.StdEncoding.DecodeString(file.Clusters[0].Cluster.Data)
	return file.Users[0].User.Token, string(authority), err
}

func TestAgentFollowsTokenAndAuthority(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := n.Start()
	a.AwaitReady()

	var mu sync.Mutex
	known := []string{n.API.Token()}
	authorities := []string{string(n.API.CA())}
	stopReading := background(t, "the kubeconfig", func() error {
		text, err := os.ReadFile(n.Path(kubeconfig))
		if err != nil {
			return err
		}
		token, ca, err := credentials(text)
		mu.Lock()
		defer mu.Unlock()
		if err == nil && (!slices.Contains(known, token) || !slices.Contains(authorities, ca)) {
			err = notYet("token %q or authority is unknown", token)
		}
		return err
	})
	stopAsking := background(t, "readiness", a.Ready)

	follow := func(token, ca string) {
		t.Helper()
		mu.Lock()
		known, authorities = append(known, token), append(authorities, ca)
		mu.Unlock()
		began := time.Now()
		n.GrantAccess()
		nodetest.Await(t, "the new credentials", func() error {
			gotToken, gotCA, err := credentials([]byte(n.Read(kubeconfig)))
			if err == nil && (gotToken != token || gotCA != ca) {
				err = notYet("they are the old ones")
			}
			return err
		})
		t.Logf("in the kubeconfig %s after the kubelet's exchange", time.Since(began))
	}
	for i := range 10 {
		n.API.SetToken(fmt.Sprintf("token-%d", i))
		follow(n.API.Token(), string(n.API.CA()))
	}
	n.API.Stop()
	n.StartAPI()
	n.API.SetToken("token-of-the-new-server")
	follow(n.API.Token(), string(n.API.CA()))
	stopReading()
	stopAsking()

	pod := n.NewPod("apps", "mesh", chaintest.Sidecar)
	if _, err := n.Add(pod); err != nil || !pod.Captured(n) {
		t.Errorf("ADD with the new credentials: %v", err)
	}
	if got := a.Metric(`istio_cni_rewrites_total{artifact="kubeconfig"}`); got != "0" {
		t.Errorf("a rotation counts as tampering: %s", got)
	}
	if info, err := os.Stat(n.Path(kubeconfig)); err != nil || info.Mode() != 0o600 {
		t.Errorf("the kubeconfig has mode %v, %v", info.Mode(), err)
	}
}

func TestAgentFollowsItsConfigMap(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	a := n.Start("EXCLUDE_NAMESPACES=kube-system")
	a.AwaitReady()
	followsConfiguration(t, n, a, "configmap", func(excluded string) {
		n.API.Set(configMap(map[string]string{"EXCLUDE_NAMESPACES": excluded}))
	})
	// A key that is taken out has its default, whatever the environment was at the start; without the object the environment
	// counts again.
	n.API.Set(configMap(map[string]string{"UNRELATED": "key"}))
	awaitExcluded(t, n)
	n.API.Delete("/api/v1/namespaces/" + nodetest.Namespace + "/configmaps/istio-cni-config")
	awaitExcluded(t, n, "kube-system")
}

func TestAgentFollowsItsConfigDirectory(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.Project("/etc/config", map[string]string{"EXCLUDE_NAMESPACES": "before-the-start"})
	a := n.Start("EXCLUDE_NAMESPACES=kube-system", "--config-dir=/etc/config", "--config-map=")
	a.AwaitReady()
	awaitExcluded(t, n, "before-the-start")
	followsConfiguration(t, n, a, "directory", func(excluded string) {
		n.Project("/etc/config", map[string]string{"EXCLUDE_NAMESPACES": excluded})
	})
	// The environment has of a key what the source said when the container was started.
	n.Project("/etc/config", map[string]string{"UNRELATED": "key"})
	awaitExcluded(t, n)
}

// followsConfiguration gives an agent good and bad content.
func followsConfiguration(t *testing.T, n *nodetest.Node, a *nodetest.Agent, source string, set func(excluded string)) {
	t.Helper()
	stopAsking := background(t, "readiness", a.Ready)
	began := time.Now()
	set("shop,bank")
	awaitExcluded(t, n, "shop", "bank")
	t.Logf("in the stanza after %s", time.Since(began))

	set("Not_A_Namespace")
	a.AwaitLog("live configuration is not usable: the last good one stays in force")
	nodetest.Await(t, "the event", func() error { return eventOf(n, "CNIConfigRefused", "Not_A_Namespace") })
	awaitExcluded(t, n, "shop", "bank")

	set("shop")
	awaitExcluded(t, n, "shop")
	if err := a.Running(); err != nil {
		t.Error(err)
	}
	// One bad content is one problem, however many events the kubelet's exchange makes.
	if got := a.Metric(`istio_cni_config_problems_total{source="` + source + `"}`); got != "1" {
		t.Errorf("1 bad content was counted as %s", got)
	}
	stopAsking()
}

// awaitExcluded waits for namespaces in the stanza of what the runtime loads.
func awaitExcluded(t *testing.T, n *nodetest.Node, want ...string) {
	t.Helper()
	nodetest.Await(t, fmt.Sprintf("%q in the stanza", want), func() error {
		list, err := n.Load()
		if err != nil {
			return err
		}
		var stanza struct {
			Excluded []string `json:"exclude_namespaces"`
		}
		last := list.Plugins[len(list.Plugins)-1]
		if err := errors.Join(json.Unmarshal(last.Bytes, &stanza)); err != nil {
			return err
		}
		if last.Network.Type != "istio-cni" || !slices.Equal(stanza.Excluded, want) {
			return notYet("the last plugin is %s", last.Bytes)
		}
		return nil
	})
}

// A restart takes nothing back that live configuration has brought: what the agent can read at its start is in the first
// stanza that it writes.
func TestRestartedAgentKeepsItsLiveConfiguration(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	args := []string{"EXCLUDE_NAMESPACES=kube-system", "--config-dir=/etc/config", "--config-map="}
	n.Project("/etc/config", map[string]string{"EXCLUDE_NAMESPACES": "shop"})
	a := n.Start(args...)
	a.AwaitReady()
	awaitExcluded(t, n, "shop")
	stop := background(t, "the stanza", func() error {
		list, err := n.Load()
		if err == nil && !strings.Contains(string(list.Plugins[len(list.Plugins)-1].Bytes), `"shop"`) {
			err = notYet("it is %s", list.Plugins[len(list.Plugins)-1].Bytes)
		}
		return err
	})
	for range 3 {
		a.Kill()
		a = n.Start(args...)
		a.AwaitLog("agent is ready")
	}
	stop()
}
