package pages

import (
	"fmt"
	"regexp"
	"strings"
)

// Command is one command of a console, or all of a block of sh.
type Command struct {
	Line int
	Text string
	// Output is what the page shows, if the block is a console.
	Output string
}

// programs begin a line that is a command.
const programs = `(sudo|istio-cni|istio-iptables|install-cni|istio-cni-\w+|kubectl|helm|istioctl|make|hack/\S+\.sh|curl|docker|podman|ctr|crictl|` +
	`skopeo|crane|cosign|nsenter|cnitool|git|go (run|test|build|install|tool|mod)|apt-get|systemctl|sysctl|tar|jq|perf|conntrack|iptables\S*|nft)`

var (
	commandLine = regexp.MustCompile(`^(\$ \S|# ` + programs + `(\s|$)|(\w+=\S* )*` + programs + ` )`)
	// output is a line behind the prompt "# " that is a comment of the program.
	output = regexp.MustCompile(`^# [\w]+( [\w]+)?:`)
)

// HasCommands reports whether a block is one of commands by its language or has a line that looks like a command.
func (b Block) HasCommands() bool {
	if b.Language == "sh" || b.Language == "console" {
		return true
	}
	for line := range strings.Lines(b.Text) {
		if commandLine.MatchString(line) {
			return true
		}
	}
	return false
}

// Commands returns the commands of a block. The prompt of a console is the one in its first line; a command goes on behind a
// backslash at the end of a line.
func (b Block) Commands() ([]Command, error) {
	if b.Language == "sh" {
		return []Command{{Line: b.Line, Text: b.Text}}, nil
	}
	if len(b.Text) < 2 || !strings.Contains("$ # ", b.Text[:2]) {
		return nil, fmt.Errorf("%s:%d: a console begins with a prompt, \"$ \" or \"# \"", b.Page, b.Line)
	}
	prompt := b.Text[:2]
	var found []Command
	number, open := b.Line-1, false
	for line := range strings.Lines(b.Text) {
		number++
		switch {
		case open:
			found[len(found)-1].Text += line
		case strings.HasPrefix(line, prompt) && !output.MatchString(line):
			line = strings.TrimPrefix(line, prompt)
			found = append(found, Command{Line: number, Text: line})
		default:
			found[len(found)-1].Output += line
			continue
		}
		open = strings.HasSuffix(line, "\\\n")
	}
	return found, nil
}
