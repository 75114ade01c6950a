#!/usr/bin/env bash
# golangci-lint over the Go code, shellcheck over the scripts, actionlint over the workflows.
set -euo pipefail
. "$(dirname "$0")/lib.sh"
hack/setup.sh lint
use_go
tool golangci-lint

status=0
# Wait for another run on this machine, for example an editor's.
"$tool_bin" run --allow-serial-runners ./... || status=1
for module in hack/chart hack/chart/oldest hack/release e2e; do
  config=$root/.golangci.yml
  [[ ! -f $module/.golangci.yml ]] || config=$root/$module/.golangci.yml
  (cd "$module" && "$tool_bin" run --allow-serial-runners -c "$config" ./...) || status=1
done
shellcheck --external-sources --source-path=SCRIPTDIR hack/*.sh .ci/run || status=1
tool actionlint
"$tool_bin" || status=1
exit "$status"
