#!/usr/bin/env bash
# Writes manifests/istio-cni.yaml, the chart's default rendering, for
# "kubectl apply" without Helm.
#
#   hack/manifests.sh            write it
#   hack/manifests.sh --check    fail if it is out of step with the chart
#   hack/manifests.sh --test     run the chart's tests; ISTIO_CNI names an existing binary, else it is built
#   hack/manifests.sh --render   print the chart with other values: -f FILE, --namespace NAME, …
set -euo pipefail
. "$(dirname "$0")/lib.sh"
use_go

file=manifests/istio-cni.yaml
header='The default rendering of manifests/istio-cni. Rewritten by hack/manifests.sh: do not edit.

  kubectl create namespace istio-system
  kubectl label namespace istio-system pod-security.kubernetes.io/enforce=privileged
  kubectl apply -f manifests/istio-cni.yaml

The image has to be on the nodes under the name it has below, or the name replaced by that of your registry.
docs/install.md tells more.'

chart() {
  local bin=$root/bin/chart
  (cd hack/chart && CGO_ENABLED=0 go build -buildvcs=false -trimpath -o "$bin" .)
  "$bin" "$@"
}

case ${1:-write} in
  write)
    text=$(chart --managed-by kubectl --header "$header")
    printf '%s\n' "$text" >"$file"
    ;;
  --check)
    chart --managed-by kubectl --header "$header" --check "$file"
    ;;
  --test)
    shift
    cd hack/chart
    go vet ./...
    exec go test -count=1 "$@" ./...
    ;;
  --render)
    shift
    chart "$@"
    ;;
  *) die "unknown mode $1" ;;
esac
