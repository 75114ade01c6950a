// Package completion has the completion of a program's arguments in bash, zsh and fish.
//
// It promises that the program itself finds the candidates, so that a script does not age, and that no candidate reaches a shell with a
// control character. The answer to the argument __complete has the form of kubectl's plugins: a candidate and its description in each
// line, and a last line for the shell.
//
// Start at Run.
package completion

import (
	_ "embed"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/meshcni/istio-cni/internal/core/printable"
	"github.com/meshcni/istio-cni/internal/core/settings"
)

// The scripts. A second one is for the program as a plugin of kubectl.
var (
	//go:embed script.bash
	bash string
	//go:embed kubectl.bash
	bashKubectl string
	//go:embed script.zsh
	zsh string
	//go:embed kubectl.zsh
	zshKubectl string
	//go:embed script.fish
	fish string
	//go:embed kubectl.fish
	fishKubectl string
)

// Command is the argument for candidates: the arguments behind it are completed.
const Command = "__complete"

// Help returns the help of the command completion, which is called by the words of command. more ends it.
func Help(command, more string) string {
	return fmt.Sprintf(`NAME:
   %[1]s completion - prints the completion of commands, flags and values for a shell

USAGE:
   %[1]s completion bash|zsh|fish

In ~/.bashrc:                   source <(%[1]s completion bash)
In ~/.zshrc, behind compinit:   source <(%[1]s completion zsh)
In ~/.config/fish/config.fish:  %[1]s completion fish | source
%[2]s`, command, more)
}

// Shells are the known shells.
func Shells() []string { return []string{"bash", "zsh", "fish"} }

// Run returns the output of the command completion: the script for the shell that its arguments name, or its help.
func Run(args []string, program string, ofKubectl bool, help string) (text string, err error) {
	pairs := map[string][2]string{"bash": {bash, bashKubectl}, "zsh": {zsh, zshKubectl}, "fish": {fish, fishKubectl}}
	switch arg := strings.Join(args, " "); {
	case arg == "--help" || arg == "-h":
		return help, nil
	case !slices.Contains(Shells(), arg):
		return "", fmt.Errorf("want one shell of %s", strings.Join(Shells(), ", "))
	case ofKubectl:
		text = pairs[arg][0] + pairs[arg][1]
	default:
		text = pairs[arg][0]
	}
	return strings.NewReplacer("@program@", program, "@name@", strings.ReplaceAll(program, "-", "_")).Replace(text), nil
}

// Print writes candidates.
func Print(w io.Writer, found []settings.Candidate) error {
	const (
		most    = 512
		noFiles = ":4\n"
	)
	var b strings.Builder
	for _, c := range found {
		b.WriteString(printable.Text(c.Text, most))
		if c.Use != "" {
			b.WriteString("\t" + printable.Text(c.Use, most))
		}
		b.WriteString("\n")
	}
	_, err := io.WriteString(w, b.String()+noFiles)
	return err
}

// Matching returns the candidates that begin with a prefix.
func Matching(prefix string, of ...settings.Candidate) []settings.Candidate {
	return slices.DeleteFunc(of, func(c settings.Candidate) bool { return !strings.HasPrefix(c.Text, prefix) })
}

// Words returns the words that begin with a prefix, as candidates.
func Words(prefix string, words ...string) (found []settings.Candidate) {
	for _, w := range words {
		found = append(found, settings.Candidate{Text: w})
	}
	return Matching(prefix, found...)
}
