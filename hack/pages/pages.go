// Package pages reads the pages of the documentation: README.md, docs/, .github/, internal and e2e.
//
// A block with commands has the language sh (commands alone) or console (a prompt, "$ " or "# ", a command, and its output).
// The line before the block is
//
//	<!-- test: NAME -->
//
// where NAME is what runs all blocks of that name, page by page in their order: Runners has the names. Package e2e/pages, of
// another module, is this same source by links.
package pages

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Page is a file of the documentation. Its name is the path in the repository.
type Page struct {
	Name   string
	Text   string
	Blocks []Block
	Links  []Link
	// Spans are the code spans of the prose.
	Spans []Span
	// Anchors has the anchors of headings, and explicit ones.
	Anchors []string
}

// Block is a block of code. Line is the number of its first line after the fence. An indented block has no language.
type Block struct {
	Page     string
	Line     int
	Language string
	// Runner is the name in the comment before the block, "" without.
	Runner string
	Text   string
}

// Link is a link or a picture, with its target as it is written.
type Link struct {
	Line   int
	Target string
}

// Span is a code span, with its blanks as one each.
type Span struct {
	Line int
	Text string
}

// Read reads all pages below the root of the repository, in the order of their names.
func Read(root string) ([]Page, error) {
	var found []Page
	for _, pattern := range []string{"README.md", "docs/*.md", ".github/*.md", ".github/ISSUE_TEMPLATE/*.md", "internal/*.md", "e2e/*.md"} {
		names, err := filepath.Glob(filepath.Join(root, filepath.FromSlash(pattern)))
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			text, err := os.ReadFile(name)
			if err != nil {
				return nil, err
			}
			relative, err := filepath.Rel(root, name)
			if err != nil {
				return nil, err
			}
			found = append(found, Parse(filepath.ToSlash(relative), string(text)))
		}
	}
	return found, nil
}

// Of returns the blocks of one runner, grouped by page, in their order.
func Of(all []Page, runner string) map[string][]Block {
	found := map[string][]Block{}
	for _, page := range all {
		for _, b := range page.Blocks {
			if b.Runner == runner {
				found[page.Name] = append(found[page.Name], b)
			}
		}
	}
	return found
}

var (
	fenceLine  = regexp.MustCompile("^( *)(```+|~~~+) *([^`\\s]*)[^`]*$")
	runnerLine = regexp.MustCompile(`^ *<!-- test: (\S+) -->$`)
	listLine   = regexp.MustCompile(`^ *([-*+]|\d+[.)]) `)
	heading    = regexp.MustCompile(`^ {0,3}#{1,6} +(.*?)[ #]*$`)
)

// Parse reads a page.
func Parse(name, text string) Page {
	p := parser{page: Page{Name: name, Text: text}}
	for line := range strings.Lines(text) {
		p.line(strings.TrimRight(line, "\r\n"))
	}
	p.end()
	p.page.Links = links(strings.Join(p.prose, "\n"))
	p.page.Spans = spans(strings.Join(p.prose, "\n"))
	p.page.Anchors = anchors(p.prose)
	return p.page
}

// parser reads a page line by line.
type parser struct {
	page  Page
	prose []string // the lines; lines of blocks are empty

	number int
	last   string // the line before
	inList bool
	open   *Block
	fence  string // of the open block, "" if it is indented
	indent int
	lines  []string // the lines of the open block
}

func (p *parser) line(line string) {
	p.number++
	defer func() { p.last = line }()
	if p.open != nil && p.inside(line) {
		p.prose = append(p.prose, "")
		return
	}
	if m := fenceLine.FindStringSubmatch(line); m != nil {
		p.start(m[3], m[2], len(m[1]))
		p.prose = append(p.prose, "")
		return
	}
	const code = "    "
	if strings.HasPrefix(line, code) && strings.TrimSpace(p.last) == "" && !p.inList {
		p.number--
		p.start("", "", len(code))
		p.number++
		p.lines = append(p.lines, line[len(code):])
		p.prose = append(p.prose, "")
		return
	}
	if strings.TrimSpace(line) != "" && (line[0] != ' ' || listLine.MatchString(line)) {
		p.inList = listLine.MatchString(line)
	}
	p.prose = append(p.prose, line)
}

// inside takes a line of the open block, and reports false if it is not one, but the next one behind an indented block.
func (p *parser) inside(line string) bool {
	switch {
	case p.fence == "" && line != "" && !strings.HasPrefix(line, "    "):
		p.end()
		return false
	case p.fence != "" && strings.HasPrefix(strings.TrimSpace(line), p.fence) && strings.Trim(line, " `~") == "":
		p.end()
		return true
	}
	blanks := len(line) - len(strings.TrimLeft(line, " "))
	p.lines = append(p.lines, line[min(p.indent, blanks):])
	return true
}

func (p *parser) start(language, fence string, indent int) {
	p.open = &Block{Page: p.page.Name, Line: p.number + 1, Language: language}
	if m := runnerLine.FindStringSubmatch(p.last); m != nil {
		p.open.Runner = m[1]
	}
	p.fence, p.indent, p.lines = fence, indent, nil
}

func (p *parser) end() {
	if p.open == nil {
		return
	}
	if p.fence == "" {
		for len(p.lines) > 0 && p.lines[len(p.lines)-1] == "" {
			p.lines = p.lines[:len(p.lines)-1]
		}
	}
	p.open.Text = strings.Join(append(p.lines, ""), "\n")
	p.page.Blocks = append(p.page.Blocks, *p.open)
	p.open = nil
}

var (
	codeSpan   = regexp.MustCompile("(?s)``.+?``|`[^`]+`")
	inlineLink = regexp.MustCompile(`\]\(\s*<?([^()\s>]*(?:\([^()\s]*\)[^()\s>]*)*)>?(?:\s+"[^"]*")?\s*\)`)
	reference  = regexp.MustCompile(`(?m)^ {0,3}\[[^\]]+\]:\s*(\S+)`)
	attribute  = regexp.MustCompile(`<(?:a|img)\s[^>]*?(?:href|src)="([^"]*)"`)
	autolink   = regexp.MustCompile(`<((?:https?|mailto):[^>\s]*)>`)
)

func spans(prose string) (found []Span) {
	for _, at := range codeSpan.FindAllStringIndex(prose, -1) {
		text := strings.Join(strings.Fields(strings.Trim(prose[at[0]:at[1]], "`")), " ")
		found = append(found, Span{Line: 1 + strings.Count(prose[:at[0]], "\n"), Text: text})
	}
	return found
}

// links are those in prose, in the order of lines.
func links(prose string) (found []Link) {
	plain := codeSpan.ReplaceAllStringFunc(prose, func(span string) string {
		return strings.Repeat("\n", strings.Count(span, "\n"))
	})
	for _, kind := range []*regexp.Regexp{inlineLink, reference, attribute, autolink} {
		for _, at := range kind.FindAllStringSubmatchIndex(plain, -1) {
			found = append(found, Link{Line: 1 + strings.Count(plain[:at[2]], "\n"), Target: plain[at[2]:at[3]]})
		}
	}
	slices.SortStableFunc(found, func(a, b Link) int { return a.Line - b.Line })
	return found
}

var (
	explicit = regexp.MustCompile(`<a\s[^>]*?(?:id|name)="([^"]*)"`)
	linkText = regexp.MustCompile(`!?\[([^\]]*)\]\([^)]*\)`)
	tag      = regexp.MustCompile(`<[^>]*>`)
	dropped  = regexp.MustCompile(`[^\p{L}\p{M}\p{N}\p{Pc} -]`)
)

// anchors are the names by which a link can refer to a heading of GitHub's rendering.
func anchors(prose []string) (found []string) {
	for _, line := range prose {
		for _, m := range explicit.FindAllStringSubmatch(line, -1) {
			found = append(found, m[1])
		}
		m := heading.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		slug := dropped.ReplaceAllString(strings.ToLower(text(m[1])), "")
		slug = strings.ReplaceAll(slug, " ", "-")
		unique := slug
		for n := 1; slices.Contains(found, unique); n++ {
			unique = slug + "-" + strconv.Itoa(n)
		}
		found = append(found, unique)
	}
	return found
}

// text is a heading without its markup. What is in code spans stays as it is.
func text(heading string) string {
	heading = linkText.ReplaceAllString(heading, "$1")
	var kept strings.Builder
	for i, part := range strings.Split(heading, "`") {
		if i%2 == 0 {
			part = tag.ReplaceAllString(part, "")
		}
		kept.WriteString(part)
	}
	return kept.String()
}
