package redirector

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"

	"github.com/meshcni/istio-cni/internal/applet"
	"github.com/meshcni/istio-cni/internal/applet/output"
	"github.com/meshcni/istio-cni/internal/core/cniconf"
	"github.com/meshcni/istio-cni/internal/core/document"
	"github.com/meshcni/istio-cni/internal/core/redirect"
	"github.com/meshcni/istio-cni/internal/core/ruleset"
	"github.com/meshcni/istio-cni/internal/node/iptables"
	"github.com/meshcni/istio-cni/internal/node/netns"
	"github.com/meshcni/istio-cni/internal/node/probe"
	"github.com/meshcni/istio-cni/internal/node/redirection"
	"github.com/meshcni/istio-cni/internal/node/selfcheck"
)

// run is one execution of the command.
type run struct {
	applet.Call
	config
	at  *netns.Namespace
	log *slog.Logger
}

func (r run) namespace() redirection.Namespace {
	return redirection.Namespace{
		NetNS: r.at, Log: r.log, Backend: r.backend, Auto: selfcheck.Recorded(cniconf.DefaultRunDir).Choice,
		Tools: iptables.Host{Path: r.path, Force: r.forceIptables},
	}
}

// differs compares the namespace with the wanted rules: of the given backend, or of any backend if no backend is given.
func (r run) differs(ctx context.Context) (redirection.Report, error) {
	if r.backend == redirect.Auto && r.forceIptables == "" {
		return r.namespace().VerifyAny(ctx, r.spec)
	}
	return r.namespace().Verify(ctx, r.spec)
}

// do opens the namespace once. It only reads it (--dry-run, --explain, --verify), or applies the rules and then validates. The
// exit code is valid with and without an error.
func (r run) do(ctx context.Context) (code int, err error) {
	if r.at, err = openNetNS(r.netns); err != nil {
		return exitError, err
	}
	defer r.at.Close()
	switch {
	case r.explain || r.dryRun && !r.cleanup:
		return exitCode(r.show())
	case r.verify:
		return r.compare(ctx)
	case r.dryRun:
		return exitCode(r.showCleanup(ctx))
	case r.skip:
	case r.cleanup:
		err = r.clean(ctx)
	default:
		err = r.apply(ctx)
	}
	if err != nil || !r.validate {
		return exitCode(err)
	}
	if err := r.probe(ctx); err != nil {
		return exitValidation, err
	}
	return exitOK, nil
}

func exitCode(err error) (int, error) {
	if err != nil {
		return exitError, err
	}
	return exitOK, nil
}

// openNetNS opens the namespace of a name or path, or the current one. It refuses a path that leads to the current or the node's namespace:
// the rules would be the caller's own.
func openNetNS(path string) (*netns.Namespace, error) {
	at, err := netns.OpenNamed(path)
	if err != nil || path == "" {
		return at, err
	}
	host, err := at.IsHost()
	if err == nil && host {
		err = fmt.Errorf("--network-namespace %q is the network namespace of this command or of process 1: "+
			"leave the flag out to work in the current one", path)
	}
	if err != nil {
		at.Close()
		return nil, err
	}
	return at, nil
}

func (r run) apply(ctx context.Context) error {
	policy := redirection.FailOnConflict
	if r.reconcile || r.force {
		policy = redirection.Reconcile
	}
	report, err := r.namespace().Apply(ctx, r.spec, policy)
	if errors.Is(err, redirection.ErrConflict) {
		if same, failed := r.differs(ctx); failed == nil && same.Clean() { // by another backend
			r.summarize(same, "the rules are up to date")
			return nil
		}
		printf(r.Stderr, "%s", differences(report))
		return fmt.Errorf("%w: --reconcile replaces them, --cleanup-only removes them", err)
	}
	if err != nil {
		return err
	}
	if report.Families.IPv6 == redirect.Bypassed {
		printf(r.Stderr, "warning: IPv6 of this namespace bypasses the mesh: its first address is IPv4; see --dual-stack and --second-ip-family\n")
	}
	r.summarize(report, "the rules are up to date")
	return nil
}

func (r run) clean(ctx context.Context) error {
	report, err := r.namespace().Clean(ctx, r.spec)
	if err != nil {
		return err
	}
	r.summarize(report, "there are no rules of the mesh")
	return nil
}

// summarize reports changes on stderr; stdout is for rules and differences.
func (r run) summarize(report redirection.Report, nothing string) {
	if len(report.Programs) == 0 {
		printf(r.Stderr, "no rule changed: %s (%s)\n", nothing, strings.Join(report.Tools, ", "))
	} else {
		var by []string
		for _, program := range report.Programs {
			by = append(by, program.By)
		}
		printf(r.Stderr, "done with %s\n", strings.Join(by, ", "))
	}
	r.notes(report)
}

func (r run) notes(report redirection.Report) {
	for _, note := range report.Notes {
		printf(r.Stderr, "note: %s\n", note)
	}
}

// compare prints the differences between the namespace and the desired rules.
func (r run) compare(ctx context.Context) (code int, err error) {
	report, err := r.differs(ctx)
	if err != nil {
		return exitError, err
	}
	code, text := exitDifferent, differences(report)
	if report.Clean() {
		code, text = exitOK, fmt.Sprintf("the namespace is up to date (%s)\n", strings.Join(report.Tools, ", "))
	}
	if r.output == output.Table {
		r.notes(report)
	}
	if err = r.print(verified(report), text); err != nil {
		return exitError, err
	}
	return code, nil
}

func differences(report redirection.Report) string {
	var b strings.Builder
	for _, d := range report.Diffs {
		b.WriteString(d.String())
	}
	for _, sentence := range report.Routing {
		fmt.Fprintf(&b, "- %s\n", sentence)
	}
	return b.String()
}

// show prints the desired rules of each family.
func (r run) show() error {
	families, err := r.namespace().Families(r.spec)
	if errors.Is(err, redirect.ErrNoAddress) {
		printf(r.Stderr, "note: this namespace has no address yet; showing both families\n")
		families, err = redirect.Families{IPv6: redirect.Captured, HasIPv4: true}, nil
	}
	if err != nil {
		return err
	}
	report, text := r.wanted(families)
	if err := r.print(report, text); err != nil {
		return fmt.Errorf("printing the rules: %w", err)
	}
	if r.dryRun && r.dryRunFile != "" {
		return save(r.dryRunFile, text)
	}
	return nil
}

// showCleanup prints the commands of --cleanup-only.
func (r run) showCleanup(ctx context.Context) error {
	plan, err := r.namespace().PlanClean(ctx)
	if err != nil {
		return err
	}
	report, text := document.RuleReport{}, ""
	for _, p := range plan.Programs {
		text += addProgram(&report, p.Of, feeding(p), p.Text)
	}
	return r.print(report, cmp.Or(text, "# there are no rules of the mesh\n"))
}

// feeding returns the command that accepts a program's text.
func feeding(p redirection.Program) string {
	switch p.By {
	case string(redirect.Native):
		return "by netlink, as nft -f"
	case string(redirect.Netlink):
		return "by netlink, as iptables-nft-restore --noflush"
	}
	return p.By + " --noflush"
}

// program returns the text that sets up a set of rules, and the command that reads it.
func (r run) program(set ruleset.Set) (by, text string) {
	if r.backend == redirect.Native {
		return "nft -f", redirect.Sidecar().NativeScript(set)
	}
	none := ruleset.Set{Family: set.Family}
	return iptables.Names(set.Family) + " --noflush", fmt.Sprint(ruleset.Reconcile(set, none, redirect.Sidecar().Owned(set, none)))
}

// routing returns the commands for the routes and addresses besides the rules.
func routing(want redirect.Routing) (all []string) {
	if want.PassthroughV6 {
		all = append(all, "ip -6 addr add ::6/128 dev lo")
	}
	for _, f := range want.MarkFamilies {
		option := map[ruleset.Family]string{ruleset.IPv4: "-4", ruleset.IPv6: "-6"}[f]
		all = append(all, fmt.Sprintf("ip %s route add local default dev lo table %d", option, want.Table),
			fmt.Sprintf("ip %s rule add fwmark %d lookup %d", option, want.Mark, want.Table))
	}
	return all
}

// save writes the text of a dry run for the user; the file need not survive a crash.
func save(path, text string) error {
	err := os.WriteFile(path, []byte(text), 0o644) //nolint:gosec,forbidigo // a report without secrets
	if err != nil {
		err = fmt.Errorf("writing the dry run (DRY_RUN_FILE_PATH): %w", err)
	}
	return err
}

// probe checks every captured family.
func (r run) probe(ctx context.Context) error {
	families, err := r.namespace().Families(r.spec)
	if err != nil {
		return r.notRedirected(err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, r.probeTimeout, fmt.Errorf("no redirected connection within %s", r.probeTimeout))
	defer cancel()
	p := probe.Redirection{
		Namespace: r.at, Listeners: []uint16{r.spec.OutboundPort, r.spec.InboundPort}, Port: r.probePort,
	}
	all := probed(families)
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, f := range all {
		wg.Go(func() { errs[i] = p.Run(ctx, f) })
	}
	wg.Wait()
	for i, f := range all {
		if errs[i] == nil {
			printf(r.Stderr, "validation: %s traffic is redirected\n", f)
		} else {
			errs[i] = fmt.Errorf("%s: %w", f, errs[i])
		}
	}
	if err := errors.Join(errs...); err != nil {
		return r.notRedirected(err)
	}
	return nil
}

// probed lists the captured families that the pod has an address of.
func probed(f redirect.Families) []ruleset.Family {
	var out []ruleset.Family
	if f.HasIPv4 {
		out = append(out, ruleset.IPv4)
	}
	if f.HasIPv6 && f.IPv6 == redirect.Captured {
		out = append(out, ruleset.IPv6)
	}
	return out
}

// notRedirected explains the failure and its remedies to the reader of the pod's events.
func (r run) notRedirected(cause error) error {
	return fmt.Errorf(`traffic of this pod is not redirected to the sidecar: %w

If the istio-cni plugin sets up redirection, the pod most likely started before the plugin was in this node's
CNI configuration (a new node, or a restart of the node agent). The pod must be created again, or repaired:
  - the node agent does either by itself when cni.repair is enabled (cni.repair.repairPods or cni.repair.deletePods);
  - by hand: kubectl delete pod.
The probe only works as the proxy's user: it ran as uid %d gid %d, the rules exempt uids %v gids %v`,
		cause, os.Getuid(), os.Getgid(), r.spec.UIDs, r.spec.GIDs)
}
