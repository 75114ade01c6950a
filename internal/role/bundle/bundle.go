// Package bundle is the role "istio-cni bundle": it writes what a bug report needs as a tar file, compressed by gzip.
//
// It promises that values which others wrote are in it for known keys only: of a CNI configuration those of the specification, of the
// reference plugins and of this program, of a pod the annotations that this program reads. Any other value is its type and length. It
// has no other program's log. In texts of this program credentials of known forms are replaced, and so is the agent's token; a text that
// quotes a secret of another form keeps it. It is bounded in size and time; what is missing is listed with the reason. It changes
// nothing on the node, and never writes to a terminal.
//
// Start at Run; parts.go has the files.
package bundle

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/settings"
	"github.com/meshcni/istio-cni/internal/node/agentapi"
	"github.com/meshcni/istio-cni/internal/node/subject"
)

const head = `NAME:
   istio-cni bundle - collects what a bug report needs (root)

USAGE:
   istio-cni bundle [NAMESPACE/NAME] [flags] > file.tar.gz

Its README.txt says what each file is, missing.txt what could not be had and why. Rules and differences are those of the named pod,
else of the pods of this node that are not captured. Of configurations of other programs it has the values of known keys,
of others type and length. Read it before you pass it on: names of pods, addresses and this program's settings and logs are in it.

EXIT CODES:
   %d  done; something may be missing
   %d  the node agent does not answer (what the node has is written), or the output cannot be written
   %d  a bad value or flag

`

// timeout bounds the whole command.
const timeout = time.Minute

type config struct {
	socket, netDir, pod, node string
	since                     time.Duration
}

func (c *config) rows() []settings.Setting {
	const since = 2 * time.Hour
	return []settings.Setting{
		{
			Name: "since", Arg: "DURATION", Default: since.String(), Use: "log and decisions of the last DURATION",
			Value: settings.Duration(&c.since, time.Nanosecond, 0),
		},
		{
			Name: "net-dir", Arg: "DIR", Use: "the directory of CNI configurations; by default that of the agent or, without one, /etc/cni/net.d",
			Value: settings.Text(&c.netDir, nil),
		},
		{
			Name: "node-name", Arg: "NAME", Env: []string{"KUBERNETES_NODE_NAME", "NODE_NAME"},
			Use: "the node in the names of the files; by default that of the agent", Value: settings.Text(&c.node, nil),
		},
		agentapi.SocketSetting(&c.socket),
	}
}

// Run runs the role.
func Run(c applet.Call) int {
	c.Stderr = printable.NewWriter(c.Stderr) // the standard output is passed on unchanged
	var cfg config
	cfg.pod, c.Args = settings.Operand(cfg.rows(), c.Args)
	if code, done := service.Settings(c, "bundle", cfg.rows(), head); done {
		return code
	}
	_, _, err := subject.SplitPod(cfg.pod)
	switch {
	case cfg.pod != "" && err != nil:
		return c.Refuse("bundle", err)
	case c.Terminal != nil && c.Terminal() > 0:
		return c.Refuse("bundle", errors.New("the bundle is a compressed tar file: redirect the standard output to a file"))
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	answered, err := write(ctx, c.Stdout, cfg)
	switch {
	case err != nil:
		return c.Fail(fmt.Errorf("writing the bundle: %w", err))
	case answered != nil:
		return c.Fail(fmt.Errorf("%w: the bundle has the files of the node only", answered))
	}
	return applet.ExitOK
}
