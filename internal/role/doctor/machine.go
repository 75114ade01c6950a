package doctor

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/meshcni/istio-cni/internal/node/hostfs"
	"github.com/meshcni/istio-cni/internal/node/selfcheck"
)

// selfTest shows the verdict that the agent has recorded. Without one it makes the test, in namespaces of its own.
func selfTest(ctx context.Context, v *view) check {
	verdict, source := selfcheck.Recorded(v.runDir), "recorded by the agent"
	if len(verdict.Results) == 0 {
		var err error
		if verdict, err = selfcheck.Run(ctx, v.searchPath, slog.New(slog.DiscardHandler)); err != nil {
			return warn("run it as root with CAP_SYS_ADMIN and CAP_NET_ADMIN, or see the log of the agent, which makes the test at its start",
				"no self-test was made: %v", err)
		}
		source = "made now, with the programs of this file system"
	}
	if err := verdict.Err(); err != nil {
		return fail("load the modules that the text names, or install iptables on the node: see docs/errors.md", "%v (%s)", err, source)
	}
	if text := verdict.Summary(); text != "" {
		return warn("none if pods do not need it; else load the modules that the text names",
			"packets are redirected by %s; not everything works: %s (%s)", verdict.Choice, text, source)
	}
	return ok("packets are redirected by %s (%s)", verdict.Choice, source)
}

// options are the kernel's that the rules need, with what each is for. One of the alternatives suffices.
func options() []struct{ any, use string } {
	return []struct{ any, use string }{
		{"NF_TABLES IP_NF_IPTABLES", "any rule"},
		{"NFT_NAT IP_NF_NAT", "REDIRECT"},
		{"NFT_COMPAT IP_NF_IPTABLES", "matches of iptables"},
		{"NETFILTER_XT_MATCH_OWNER", "leaving out the proxy's own traffic"},
		{"NETFILTER_XT_TARGET_REDIRECT NFT_REDIR", "REDIRECT"},
		{"NETFILTER_XT_MATCH_CONNTRACK", "matching the state of connections"},
		{"NETFILTER_XT_TARGET_TPROXY NFT_TPROXY", "mode TPROXY"},
		{"NF_CONNTRACK_ZONES", "capture of DNS"},
		{"NETFILTER_XT_TARGET_CT", "capture of DNS"},
		{"INET_DIAG", "the audit's view of listeners"},
	}
}

// kernel looks for the options in the configuration that the kernel or its package shows.
func kernel(_ context.Context, v *view) check {
	release, _, err := hostfs.ReadFile(v.kernel+"/sys/kernel/osrelease", maxConf)
	name := strings.TrimSpace(string(release))
	if err != nil {
		return warn("run it as root", "the kernel's release cannot be read: %v", err)
	}
	text, from := v.kernelConfig(name)
	if from == "" {
		return warn("see the check self-test, which sends packets", "the configuration of kernel %s is neither at /proc/config.gz nor on the node", name)
	}
	set := map[string]bool{}
	for line := range strings.Lines(text) {
		option, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		set[strings.TrimPrefix(option, "CONFIG_")] = value == "y" || value == "m"
	}
	var missing []string
	for _, o := range options() {
		found := false
		for name := range strings.FieldsSeq(o.any) {
			found = found || set[name]
		}
		if !found {
			missing = append(missing, fmt.Sprintf("CONFIG_%s (%s)", strings.ReplaceAll(o.any, " ", " or CONFIG_"), o.use))
		}
	}
	if len(missing) > 0 {
		return warn("the check self-test shows whether pods are redirected without it; if not, take a kernel with the option",
			"kernel %s (%s) is built without %s", name, from, strings.Join(missing, ", "))
	}
	return ok("kernel %s (%s) has the %d options that the rules need; modules may still be absent", name, from, len(options()))
}

// kernelConfig returns the configuration of the running kernel and its file.
func (v *view) kernelConfig(release string) (text, from string) {
	const most = 1 << 20
	if packed, _, err := hostfs.ReadFile(v.kernel+"/config.gz", most); err == nil {
		if plain, err := gzip.NewReader(bytes.NewReader(packed)); err == nil {
			text, _ := io.ReadAll(io.LimitReader(plain, most))
			return string(text), "/proc/config.gz"
		}
	}
	if v.root == "" {
		return "", ""
	}
	for _, file := range []string{"/boot/config-" + release, "/lib/modules/" + release + "/config", "/usr/lib/modules/" + release + "/config"} {
		if text, _, err := hostfs.ReadFile(v.below(file), most); err == nil {
			return string(text), file
		}
	}
	return "", ""
}

// inotify compares the limits for root with what its processes have (inotify(7)): kubelet, runtime and the agent watch files.
func inotify(ctx context.Context, v *view) check {
	limit := map[string]int{}
	for _, name := range []string{"max_user_instances", "max_user_watches"} {
		text, _, err := hostfs.ReadFile(v.kernel+"/sys/fs/inotify/"+name, maxConf)
		if err == nil {
			limit[name], err = strconv.Atoi(strings.TrimSpace(string(text)))
		}
		if err != nil {
			return warn("run it as root", "the limits of inotify cannot be read: %v", err)
		}
	}
	if v.proc == "" {
		return warn("run it on the node, or with hostPID or the node's /proc", "the use of inotify is not seen here; the limits are %d instances and %d watches",
			limit["max_user_instances"], limit["max_user_watches"])
	}
	instances, watches := inotifyUse(ctx, v.proc)
	text := fmt.Sprintf("root's processes have %d of %d instances and %d of %d watches", instances, limit["max_user_instances"], watches, limit["max_user_watches"])
	const remedy = "raise them: sysctl -w fs.inotify.max_user_instances=8192 fs.inotify.max_user_watches=524288"
	tenth := func(use, limit int) bool { return use >= limit-limit/10 } //nolint:mnd // nine tenths
	switch {
	case instances >= limit["max_user_instances"] || watches >= limit["max_user_watches"]:
		return fail(remedy, "%s: the agent, the kubelet and the runtime cannot watch files", text)
	case tenth(instances, limit["max_user_instances"]) || tenth(watches, limit["max_user_watches"]):
		return warn(remedy, "%s: few are left", text)
	}
	return ok("%s", text)
}

// inotifyUse counts root's instances and watches, as far as the processes can be read before ctx ends.
func inotifyUse(ctx context.Context, proc string) (instances, watches int) {
	processes, _ := os.ReadDir(proc)
	for _, p := range processes {
		if _, err := strconv.Atoi(p.Name()); err != nil {
			continue
		}
		if ctx.Err() != nil {
			break
		}
		dir := filepath.Join(proc, p.Name())
		status, _, _ := hostfs.ReadFile(filepath.Join(dir, "status"), maxConf)
		if !bytes.Contains(status, []byte("\nUid:\t0\t")) {
			continue
		}
		open, _ := os.ReadDir(filepath.Join(dir, "fd"))
		for _, fd := range open {
			if target, _ := os.Readlink(filepath.Join(dir, "fd", fd.Name())); target == "anon_inode:inotify" {
				instances++
				info, _, _ := hostfs.ReadFile(filepath.Join(dir, "fdinfo", fd.Name()), maxFDInfo)
				watches += bytes.Count(info, []byte("inotify wd:"))
			}
		}
	}
	return instances, watches
}

// maxFDInfo bounds the list of an instance's watches, of some 100 bytes each.
const maxFDInfo = 64 << 20
