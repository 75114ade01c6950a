package output

import (
	"fmt"
	"runtime"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/service"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/settings"
)

const versionHead = `NAME:
   istio-cni version - the version of this program

USAGE:
   istio-cni version [flags]

EXIT CODES:
   %d  done
   %d  the output cannot be written
   %d  a bad value or flag

`

// VersionRows are the flags of the command version.
func VersionRows() []settings.Setting { return versionRows(new(Form)) }

func versionRows(form *Form) []settings.Setting { return []settings.Setting{Flag(form)} }

// PrintVersion is the role that prints the version.
func PrintVersion(c applet.Call) int {
	var form Form
	if code, done := service.Settings(c, "version", versionRows(&form), versionHead); done {
		return code
	}
	v := document.Version{Version: applet.Version(), GoVersion: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	v.Revision, v.Modified = applet.Revision()
	return c.End(Print(c.Stdout, v, form, func() error {
		_, err := fmt.Fprintln(c.Stdout, "istio-cni "+applet.Build())
		return err
	}))
}
