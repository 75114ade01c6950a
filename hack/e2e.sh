#!/usr/bin/env bash
# Runs the tests against a real Kubernetes: builds what they run, and tests
# e2e/. See docs/e2e.md.
#
#   hack/e2e.sh                             everything
#   PKG=./taint RUN=TestLegacy hack/e2e.sh  a part
#
#   V=1 PKG=./upgrade hack/e2e.sh           with what the tests tell
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
export KUBE_BIN ISTIO_CNI_BIN=$root/bin/istio-cni E2E_BOX_BIN=$root/bin/box E2E_LOGS=${E2E_LOGS:-$root/bin/e2e-logs}
rm -rf "$E2E_LOGS"
# Five minutes, and for one package only.
case ${PKG:-./...} in
  *...* | *upgrade*)
    REFERENCE_BIN=$(hack/reference.sh)
    export REFERENCE_BIN
    ;;
esac

args=(-count=1 -timeout "${TIMEOUT:-15m}" -p 1 -exec "'$root/hack/in-netns.sh'")
if [[ -n ${RUN:-} ]]; then
  args+=(-run "$RUN")
fi
if [[ -n ${V:-} ]]; then
  args+=(-v)
fi
read -r -a packages <<<"${PKG:-./...}"
cd e2e
started=$SECONDS status=0
CGO_ENABLED=0 go test "${args[@]}" "${packages[@]}" || status=$?
say "e2e: status $status after $((SECONDS - started)) s"
if [[ $status -ne 0 && -d $E2E_LOGS ]]; then
  say "e2e: logs of the servers are in $E2E_LOGS"
fi
exit "$status"
