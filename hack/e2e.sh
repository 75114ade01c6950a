#!/usr/bin/env bash
# Builds all programs of the tests against a real Kubernetes, and runs e2e/.
# See e2e/README.md.
#
#   hack/e2e.sh                             what CI runs
#   hack/e2e.sh --all                       everything, before a release
#   hack/e2e.sh --oldest                    node and pods on the oldest Kubernetes
#   PKG=./taint RUN=TestLegacy hack/e2e.sh  a part
#
# KUBE_BIN names an existing kube binary, REFERENCE_BIN and CONTAINERD_BIN
# directories built by hack/reference.sh and hack/containerd.sh, E2E_LOGS the
# directory for logs of failed tests (bin/e2e-logs). The script installs missing
# packages with hack/setup.sh; it skips nothing, and PKG or RUN without a match
# is a failure.
#
# The tests use the released artifacts: the image of hack/image.sh and its
# program.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
need_root "the tests make namespaces, mounts and control groups"
find_go || hack/setup.sh e2e
use_go

# Packages that take long and that few changes can break: --all runs them.
release_only=(./ambient ./gvisor ./nodes ./scale)

kube=()
if [[ ${1:-} == --oldest ]]; then
  kube=(--oldest)
  PKG=${PKG:-./node ./mesh}
fi
read -r -a patterns <<<"${PKG:-./...}"
packages=()
for pattern in "${patterns[@]}"; do
  found=$(cd e2e && go list -find -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}' "$pattern" |
    sed -n 's,^.*/istio-cni/e2e,.,p') || die "PKG=$pattern names no package of e2e/"
  [[ -n $found ]] || die "PKG=$pattern names no package of e2e/ that has tests"
  mapfile -t -O "${#packages[@]}" packages <<<"$found"
done
if [[ -z ${PKG:-} && ${1:-} != --all ]]; then
  for package in "${!packages[@]}"; do
    [[ " ${release_only[*]} " != *" ${packages[package]} "* ]] || unset "packages[package]"
  done
fi

hack/setup.sh e2e
KUBE_BIN=$(hack/kube.sh "${kube[@]}")
env -u IMAGE -u ARCHS hack/image.sh
pack() { # NAME /PATH=FILE...
  local args=() file name=localhost/$1:e2e tar=${1%%/*}
  [[ $1 != *:* ]] || name=$1 tar=$(basename "${1%:*}")
  for file in "${@:2}"; do args+=(--file "$file"); done
  bin/pack-image --name "$name" --out bin/e2e-images --tar "$tar.tar" "${args[@]}"
}
(cd e2e && CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags '-s -w' -o "$root/bin/box" ./images/box)
(cd e2e && CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags '-s -w' -o "$root/bin/metered" ./scale/metered)
pack box /box=bin/box
CGO_ENABLED=0 go test -c -o bin/contract ./internal/kube/kubetest
CGO_ENABLED=0 go build -trimpath -o bin/ztunnel ./internal/agent/ztunnels/ztunneltest/ztunnel
CGO_ENABLED=0 go build -trimpath -o bin/kubectl-istio_cni ./internal/role/fleet/kubectl-istio_cni
(cd hack/chart && CGO_ENABLED=0 go build -buildvcs=false -trimpath -o "$root/bin/chart" .)
# The last release of the reference CNI plugins with this plugin.
GOBIN=$root/bin CGO_ENABLED=0 GOFLAGS='' go install -trimpath -ldflags '-s -w' github.com/containernetworking/plugins/plugins/meta/flannel@v0.9.1

# CustomResourceDefinitions come from the modules of their projects.
crd() { # MODULE FILE
  local dir
  dir=$(cd e2e/renderings/crds && go mod download "$1" && go list -m -f '{{.Dir}}' "$1")
  install -D -m 644 -t bin/crds "$dir/$2"
}
rm -rf bin/crds
crd github.com/prometheus-operator/prometheus-operator example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml
crd github.com/k8snetworkplumbingwg/network-attachment-definition-client artifacts/networks-crd.yaml

ISTIO_CNI_BIN=$root/bin/image/istio-cni-$(go env GOARCH)
export KUBE_BIN ISTIO_CNI_BIN E2E_IMAGE=$root/bin/image/istio-cni.tar
export E2E_BOX_BIN=$root/bin/box E2E_BOX_IMAGE=$root/bin/e2e-images/box.tar E2E_CHART_BIN=$root/bin/chart
export E2E_FLANNEL_BIN=$root/bin/flannel E2E_CONTRACT_BIN=$root/bin/contract E2E_KUBECTL_BIN=$root/bin/kubectl-istio_cni E2E_METERED_BIN=$root/bin/metered E2E_ZTUNNEL_BIN=$root/bin/ztunnel E2E_CRDS=$root/bin/crds E2E_LOGS=${E2E_LOGS:-$root/bin/e2e-logs}
rm -rf "$E2E_LOGS"
if [[ " ${packages[*]} " == *' ./page '* ]]; then
  hack/setup.sh page
fi
# The reference takes long to build, and only these packages need it.
if [[ " ${packages[*]} " =~ \ \./(ambient|ambientmesh|docs|imageonly|istiod|renderings|scale|upgrade)\  ]]; then
  REFERENCE_BIN=$(hack/reference.sh)
  # For pods of ambient mode its agent runs iptables in its container, as the reference's image has it.
  mapfile -t tools < <({
    printf '%s\n' /usr/sbin/ip{,6}tables{,-nft,-legacy}{,-save,-restore} /usr/lib/*-linux-gnu/xtables/lib{xt,ipt,ip6t}_*.so
    ldd /usr/sbin/xtables-{nft,legacy}-multi | grep -o '/[^ :]*\.so[^ :]*' | sort -u
  } | sed 's,.*,&=&,; s,^/usr/sbin/,/usr/local/bin/,')
  pack reference/install-cni "/usr/local/bin/install-cni=$REFERENCE_BIN/install-cni" "/opt/cni/bin/istio-cni=$REFERENCE_BIN/istio-cni" "${tools[@]}"
  E2E_REFERENCE_CHARTS=$(cd e2e/reference && go mod download istio.io/istio && go list -m -f '{{.Dir}}' istio.io/istio)/manifests/charts
  export REFERENCE_BIN E2E_REFERENCE_CHARTS E2E_REFERENCE_IMAGE=$root/bin/e2e-images/reference.tar
fi
if [[ " ${packages[*]} " == *' ./docs '* ]]; then
  pack docker.io/library/busybox:1.37 /bin/busybox=/bin/busybox /bin/sh=/bin/busybox /bin/httpd=/bin/busybox
fi
if [[ " ${packages[*]} " == *' ./istiod '* ]]; then
  pack pilot "/usr/local/bin/pilot-discovery=$REFERENCE_BIN/pilot-discovery"
  pack proxy /usr/local/bin/pilot-agent=bin/box
  export E2E_PILOT_IMAGE=$root/bin/e2e-images/pilot.tar E2E_PROXY_IMAGE=$root/bin/e2e-images/proxy.tar
fi

if [[ " ${packages[*]} " == *' ./runtimes '* ]]; then
  CONTAINERD_BIN=$(hack/containerd.sh)
  export CONTAINERD_BIN
fi

if [[ " ${packages[*]} " == *' ./gvisor '* ]]; then
  (cd e2e/runsc && CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags '-s -w' -o "$root/bin/runsc" gvisor.dev/gvisor/runsc)
  export E2E_RUNSC_BIN=$root/bin/runsc
fi

args=(-count=1 -v -timeout "${TIMEOUT:-15m}" -exec "'$root/hack/in-netns.sh'")
if [[ -n ${RUN:-} ]]; then
  args+=(-run "$RUN")
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
cd e2e

# Packages run one by one, so that each has the whole machine, and failed
# packages are listed by name.
passed=0 failed=()
for package in "${packages[@]}"; do
  started=$SECONDS
  if CGO_ENABLED=0 go test "${args[@]}" "$package" | tee -a "$log"; then
    passed=$((passed + 1))
    summary+=("passed in $((SECONDS - started)) s: $package")
  else
    failed+=("$package")
    summary+=("FAILED in $((SECONDS - started)) s: $package")
  fi
done
printf '\n'
printf 'e2e: %s\n' "${summary[@]}"
say "e2e: $passed passed, ${#failed[@]} failed, of packages${RUN:+ with tests $RUN}"
if [[ ${#failed[@]} -gt 0 ]]; then
  [[ ! -d $E2E_LOGS ]] || say "e2e: logs, objects, configurations and rules are in $E2E_LOGS"
  exit 1
fi
grep -q '^=== RUN' "$log" || die "RUN=${RUN:-} names no test of ${packages[*]}"
