package installer

import (
	"fmt"
	"strings"
)

// helpHead has verbs for the three exit codes.
const helpHead = `NAME:
   istio-cni install - node agent: installs the plugin on this node, keeps it installed and gives the node back

USAGE:
   istio-cni install [flags]   (also: install-cni [flags])

EXAMPLES:
   install-cni --log_output_level=info --log_as_json
      entrypoint of the DaemonSet's container; settings come from the environment
   istio-cni install --once --uninstall-on-exit=never
      init container: install, leave everything in place, exit
   istio-cni install --dry-run --mounted-cni-net-dir=/etc/cni/net.d --mounted-cni-bin-dirs=/opt/cni/bin
      by hand on a node: say what would be done
   istio-cni install --uninstall --mounted-cni-net-dir=/etc/cni/net.d --mounted-cni-bin-dirs=/opt/cni/bin
      by hand on a node: give it back

EXIT CODES:
   %d  done
   %d  failed: the node is not as wanted
   %d  a bad value or flag; nothing was touched

A flag beats live configuration (--config-map, --config-dir; what the plugin is told only), that beats the environment,
and that beats the default. An empty variable counts as unset. All problems are reported together.
`

// help is the text of --help.
func help() string {
	var b strings.Builder
	fmt.Fprintf(&b, helpHead, exitOK, exitFailed, exitUsage)
	none := environment{executable: func() (string, error) { return "", nil }}
	for _, g := range groups() {
		fmt.Fprintf(&b, "\n%s:\n", strings.ToUpper(g.title))
		for _, s := range g.settings(none) {
			s.describe(&b)
		}
	}
	return b.String()
}

// describe prints the names on a line and the rest below it.
func (s setting) describe(b *strings.Builder) {
	var all []string
	if s.flag != "" {
		all = append(all, strings.TrimSpace("--"+s.flag+" "+s.arg))
	}
	for _, name := range s.env {
		all = append(all, "$"+name)
	}
	fmt.Fprintf(b, "   %s\n", strings.Join(all, ", "))
	use := s.use
	if s.def != "" {
		use += " (default: " + s.def + ")"
	}
	for _, l := range wrapped(use) {
		fmt.Fprintf(b, "      %s\n", l)
	}
}

// wrapped breaks a text into lines at blanks.
func wrapped(text string) []string {
	const columns = 100
	var out []string
	row := ""
	for word := range strings.FieldsSeq(text) {
		if row != "" && len(row)+1+len(word) > columns {
			out = append(out, row)
			row = ""
		}
		row = strings.TrimSpace(row + " " + word)
	}
	return append(out, row)
}
