#!/usr/bin/env bash
# Runs the tests against a real Kubernetes: builds what they run, and tests
# e2e/. See docs/e2e.md.
#
#   hack/e2e.sh                             everything
#   PKG=./taint RUN=TestLegacy hack/e2e.sh  a part
#
#
# KUBE_BIN names a ready-made kube binary, REFERENCE_BIN a directory as
# hack/reference.sh makes it, E2E_LOGS a directory for the logs of what failed
# (bin/e2e-logs). Installs what is missing, as hack/setup.sh does; nothing is
# skipped.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
need_root "the tests make namespaces, mounts and control groups"
hack/setup.sh e2e

use_go
KUBE_BIN=$(hack/kube.sh)
hack/build.sh
(cd e2e && CGO_ENABLED=0 go build -buildvcs=false -trimpath -ldflags '-s -w' -o "$root/bin/box" ./images/box)
(cd hack/chart && CGO_ENABLED=0 go build -buildvcs=false -trimpath -o "$root/bin/chart" .)
# The last release of the reference plugins that had this one.
GOBIN=$root/bin CGO_ENABLED=0 GOFLAGS='' go install -trimpath -ldflags '-s -w' github.com/containernetworking/plugins/plugins/meta/flannel@v0.9.1

# Custom resources are defined by files of the modules of their projects.
crd() { # MODULE FILE
  local dir
  dir=$(cd e2e/renderings/crds && go mod download "$1" && go list -m -f '{{.Dir}}' "$1")
  install -D -m 644 -t bin/crds "$dir/$2"
}
rm -rf bin/crds
crd github.com/prometheus-operator/prometheus-operator example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml
crd github.com/k8snetworkplumbingwg/network-attachment-definition-client artifacts/networks-crd.yaml

export KUBE_BIN ISTIO_CNI_BIN=$root/bin/istio-cni E2E_BOX_BIN=$root/bin/box E2E_CHART_BIN=$root/bin/chart
export E2E_FLANNEL_BIN=$root/bin/flannel E2E_CRDS=$root/bin/crds E2E_LOGS=${E2E_LOGS:-$root/bin/e2e-logs}
rm -rf "$E2E_LOGS"
# Five minutes, and for one package only.
case ${PKG:-./...} in
  *...* | *upgrade*)
    REFERENCE_BIN=$(hack/reference.sh)
    export REFERENCE_BIN
    ;;
esac

args=(-count=1 -v -timeout "${TIMEOUT:-15m}" -exec "'$root/hack/in-netns.sh'")
if [[ -n ${RUN:-} ]]; then
  args+=(-run "$RUN")
fi
read -r -a packages <<<"${PKG:-./...}"
cd e2e
mapfile -t packages < <(go list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}' "${packages[@]}" | sed -n 's,^.*/istio-cni/e2e,.,p')

# One after the other: each has the machine for itself, and is told by name when it fails.
passed=0 failed=()
for package in "${packages[@]}"; do
  started=$SECONDS
  if CGO_ENABLED=0 go test "${args[@]}" "$package"; then
    passed=$((passed + 1))
    summary+=("passed in $((SECONDS - started)) s: $package")
  else
    failed+=("$package")
    summary+=("FAILED in $((SECONDS - started)) s: $package")
  fi
done
printf '%s\n' "${failed[@]}" >"$root/bin/e2e-failed"
printf '\n'
printf 'e2e: %s\n' "${summary[@]}"
say "e2e: $passed passed, ${#failed[@]} failed, of packages${RUN:+ with tests $RUN}"
if [[ ${#failed[@]} -gt 0 ]]; then
  [[ ! -d $E2E_LOGS ]] || say "e2e: logs, objects, configurations and rules are in $E2E_LOGS"
  exit 1
fi
