package page

import (
	"bytes"
	"context"
	"fmt"
	"image/png"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"golang.org/x/sys/unix"

	"github.com/meshcni/istio-cni/e2e/cluster"
	"github.com/meshcni/istio-cni/e2e/lab"
)

// browser is a tab of a headless Chromium. What its console says, and each request that leaves the page's origin, fails the test.
type browser struct {
	lab.Test
	ctx    context.Context //nolint:containedctx // chromedp's context is the tab
	origin string
	window window

	mu       sync.Mutex
	problems []string
	requests int
}

// window is the window's size and colours.
type window struct {
	width, height int64
	dark          bool
}

var (
	wide   = window{1280, 800, false}
	narrow = window{390, 740, true}
)

// open starts Chromium, which Debian's package has at /usr/bin/chromium, and a tab for pages of an origin.
func open(t *testing.T, origin string) *browser {
	t.Helper()
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath("/usr/bin/chromium"), chromedp.NoSandbox, // root has no sandbox
		chromedp.Flag("hide-scrollbars", true), chromedp.Flag("disable-component-update", true), chromedp.Env("HOME="+t.TempDir()))
	program, end := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(end)
	tab, endTab := chromedp.NewContext(program)
	t.Cleanup(endTab)
	limited, endTime := context.WithTimeout(tab, cluster.Timeout)
	t.Cleanup(endTime)
	b := &browser{Test: lab.Test{T: t}, ctx: limited, origin: origin}
	b.Must(chromedp.Listen(limited, b.request))
	console := chromedp.Console(limited)
	go func() {
		for message, err := range console {
			// A failed request is shown on the page, where the tests read it.
			if err == nil && message.Source != "network" {
				b.problem("console: " + message.String())
			}
		}
	}()
	t.Cleanup(b.check)
	return b
}

func (b *browser) problem(text string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.problems = append(b.problems, text)
}

// request wants requests to the page's origin alone.
func (b *browser) request(event any) {
	e, is := event.(*network.EventRequestWillBeSent)
	if !is {
		return
	}
	if !strings.HasPrefix(e.Request.URL, b.origin+"/") {
		b.problem("request to another origin: " + e.Request.URL)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.requests++
}

func (b *browser) check() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, problem := range b.problems {
		b.Error(problem)
	}
	if b.requests == 0 {
		b.Error("no request was seen")
	}
}

func (b *browser) do(steps ...chromedp.Action[chromedp.Void]) {
	b.Helper()
	ctx, end := context.WithTimeout(b.ctx, patience)
	defer end()
	b.Must(chromedp.Do(ctx, steps...))
}

// evaluate returns the value of an expression of JavaScript.
func evaluate[T any](b *browser, format string, args ...any) T {
	b.Helper()
	value, err := chromedp.Run(b.ctx, chromedp.Evaluate[T](fmt.Sprintf(format, args...)))
	b.Must(err)
	return value
}

// count is the number of elements.
func (b *browser) count(selector string) int {
	b.Helper()
	return evaluate[int](b, `document.querySelectorAll(%q).length`, selector)
}

// look sets size and colours of the window.
func (b *browser) look(w window) {
	b.Helper()
	scheme := map[bool]string{false: "light", true: "dark"}[w.dark]
	b.window = w
	b.do(chromedp.EmulateViewport(w.width, w.height))
	_, err := chromedp.Call(b.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
		Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}},
	})
	b.Must(err)
}

// visit opens the page, of a pod if there is a fragment.
func (b *browser) visit(fragment string) {
	b.Helper()
	b.do(chromedp.Navigate(b.origin + "/" + fragment))
}

// see waits until an element is visible and has all texts.
func (b *browser) see(selector string, texts ...string) {
	b.Helper()
	var got string
	deadline := time.Now().Add(patience)
	for {
		got = evaluate[string](b, `[...document.querySelectorAll(%q)].filter(e => e.checkVisibility()).map(e => e.textContent)[0] ?? ""`, selector)
		if got != "" && !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(got, text) }) {
			return
		}
		if time.Now().After(deadline) {
			b.Fatalf("%s has %q, want %q", selector, got, texts)
		}
		b.do(chromedp.Sleep(20 * time.Millisecond))
	}
}

// patience bounds a wait: the page asks every five seconds, and the machine may be slow.
const patience = 8 * time.Second

// click clicks on the first element.
func (b *browser) click(selector string) {
	b.Helper()
	b.do(chromedp.Click(chromedp.CSS(selector), chromedp.NodeVisible))
}

// fill types into a field of the form.
func (b *browser) fill(field, text string) {
	b.Helper()
	b.write(`#walk input[name="`+field+`"]`, text)
}

// press presses a key where the focus is.
func (b *browser) press(key string) {
	b.Helper()
	b.do(chromedp.KeyEvent(key))
}

const (
	enter  = kb.Enter
	killed = unix.SIGKILL
)

// write types a text in place of what a field has.
func (b *browser) write(selector, text string) {
	b.Helper()
	evaluate[string](b, `document.querySelector(%q).value = ""`, selector)
	b.do(chromedp.SendKeys(chromedp.CSS(selector), text))
}

func focus(selector string) chromedp.Action[chromedp.Void] {
	return chromedp.Focus(chromedp.CSS(selector))
}

// survives wants the page to ask the agent again and to keep an element, with the focus that it has.
func (b *browser) survives(selector string) {
	b.Helper()
	b.do(focus(selector))
	evaluate[bool](b, `window.kept = document.querySelector(%q), performance.clearResourceTimings(), true`, selector)
	b.Until("the next requests", func() bool { return evaluate[int](b, `performance.getEntriesByType("resource").length`) >= 4 })
	if !evaluate[bool](b, `kept.isConnected && document.activeElement === kept`) {
		b.Errorf("%s is another element after a refresh, or has lost the focus", selector)
	}
}

// fits wants no part of the page to be wider than the window.
func (b *browser) fits() {
	b.Helper()
	if more := evaluate[int](b, `document.documentElement.scrollWidth - document.documentElement.clientWidth`); more > 0 {
		b.Errorf("the page is %d pixels wider than its window", more)
	}
}

// keep writes a screenshot of the window, with another height, to PAGE_SCREENSHOTS, if that names a directory; docs/images has them.
func (b *browser) keep(name, selector string, height int64) {
	b.Helper()
	dir := os.Getenv("PAGE_SCREENSHOTS")
	if dir == "" {
		return
	}
	b.do(chromedp.EmulateViewport(b.window.width, height))
	defer b.look(b.window)
	evaluate[bool](b, `document.activeElement.blur(), document.querySelector(%q).scrollIntoView(), true`, selector)
	b.do(chromedp.Sleep(100 * time.Millisecond))
	image, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
	b.Must(err)
	decoded, err := png.Decode(bytes.NewReader(image))
	b.Must(err)
	var small bytes.Buffer
	b.Must((&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&small, decoded))
	b.Must(os.WriteFile(filepath.Join(dir, name), small.Bytes(), 0o644))
}
