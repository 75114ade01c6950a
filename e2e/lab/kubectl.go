package lab

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Result is the end of a program.
type Result struct {
	Code           int
	Stdout, Stderr string
}

func (r Result) String() string {
	return fmt.Sprintf("exit code %d, stdout:\n%s\nstderr:\n%s", r.Code, r.Stdout, r.Stderr)
}

// Kubectl runs kubectl with the administrator's kubeconfig. "istio-cni" is our plugin.
func (l *Lab) Kubectl(args ...string) Result {
	l.Helper()
	var stdout, stderr bytes.Buffer
	command := exec.CommandContext(l.Context(), filepath.Join(l.bin, "kubectl"), args...)
	command.Env = append(os.Environ(), "PATH="+l.bin+":"+os.Getenv("PATH"), "KUBECONFIG="+l.Kubeconfig())
	command.Stdout, command.Stderr = &stdout, &stderr
	err := command.Run()
	var ended *exec.ExitError
	if err != nil && !errors.As(err, &ended) {
		l.Fatal(err)
	}
	return Result{command.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}
