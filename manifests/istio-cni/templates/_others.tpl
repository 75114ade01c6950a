{{/* Names of values: unknown ones, and those of other charts in values that are shared with them; and types that values may have. */}}

{{/*
cni.known are the top-level values of Istio's other charts, of its operator's API and of its add-ons, which are ignored:
e2e/renderings holds the list to those charts.
*/}}
{{- define "cni.known" -}}
additionalContainers annotations autoscaleBehavior autoscaleEnabled autoscaleMax autoscaleMin autoscaling base caAddress
certmanager configMap containerSecurityContext cpu defaultRevision defaults deploymentAnnotations deploymentLabels dnsConfig
dnsPolicy envVarFrom experimental extraContainerArgs gateway gatewayClasses gateways grafana imagePullPolicy imagePullSecrets
initContainers ipFamilies ipFamilyPolicy istioNamespace istio_cni istiod istiodRemote jaeger jwksResolverExtraRootCA
keepaliveMaxServerConnectionAge kiali kind labels lifecycle logAsJson logLevel memory meshConfig minReadySeconds multiCluster
name network networkGateway networkGatewayPorts pdb peerCaCrl pilot podDisruptionBudget prometheus rbac readinessProbe
replicaCount resourceName resourceScope revisionTags rollingMaxSurge rollingMaxUnavailable securityContext service
serviceAccount serviceAccountAnnotations serviceAnnotations sidecarInjectorWebhook sidecarInjectorWebhookAnnotations strategy
telemetry topologySpreadConstraints traceSampling tracing trustedZtunnelName trustedZtunnelNamespace volumeMounts volumes
xdsAddress zipkin ztunnel
{{- end -}}

{{/*
cni.others is a space-separated list of the given values that are ignored: those above, names that begin with "x-" or "." (YAML
anchors), the image of another component, and _internal_defaults_do_not_set if it has values of another chart. .given are the
values, .own the names of this chart's.
*/}}
{{- define "cni.others" -}}
{{- $known := regexSplit "\\s+" (include "cni.known" .) -1 -}}
{{- $out := list -}}
{{- range $name := keys .given -}}
{{- if or (has $name $known) (hasPrefix "x-" $name) (hasPrefix "." $name) -}}{{- $out = append $out $name -}}{{- end -}}
{{- end -}}
{{- if has .given.image (list "auto" "pilot" "proxyv2" "ztunnel") -}}{{- $out = append $out "image" -}}{{- end -}}
{{- /* Names that the defaults of older charts of the reference have. */ -}}
{{- $own := concat .own (list "logLevel" "privileged" "psp_cluster_role" "rollingMaxUnavailable") -}}
{{- range $name := keys (.given._internal_defaults_do_not_set | default dict) -}}
{{- if not (has $name $own) -}}{{- $out = append $out "_internal_defaults_do_not_set" -}}{{- end -}}
{{- end -}}
{{- uniq $out | sortAlpha | join " " -}}
{{- end -}}

{{/* cni.elsewhere says where the setting of a name is that older charts of Istio have, other charts, or nobody but users. */}}
{{- define "cni.elsewhere" -}}
ambient.redirectMode: not supported, remove it
audit.enabled: use audit.interval; 0 switches the audit off
imagePullPolicy: use pullPolicy, or global.imagePullPolicy
imagePullSecrets: use global.imagePullSecrets
istio-cni: unknown; values of this chart have no prefix, or cni
labels: use podLabels or daemonSetLabels
logAsJson: use global.logAsJson
logLevel: use logging.level
networkPolicy: use global.networkPolicy
privileged: not supported, remove it; the agent has only the capabilities that it needs
psp_cluster_role: not supported, remove it; PodSecurityPolicies ended with Kubernetes 1.25
resourceScope: use global.resourceScope
rollingMaxUnavailable: use updateStrategy.rollingUpdate.maxUnavailable
strategy: use updateStrategy
taint.namespace: use taint.namespaces; this name is of istiod's chart
values: of istioctl; what is below values.cni is at the top level here, or below cni
{{- end -}}

{{/* cni.shapes has the names in values whose default does not show them. A name without a value may have any. */}}
{{- define "cni.shapes" -}}
resources: &resources {requests: {}, limits: {}, claims: }
taint.resources: *resources
global.defaultResources: *resources
tolerations: &tolerations [{key: , operator: , value: , effect: , tolerationSeconds: }]
taint.tolerations: *tolerations
affinity: &affinity {nodeAffinity: , podAffinity: , podAntiAffinity: }
taint.affinity: *affinity
updateStrategy: {type: , rollingUpdate: {maxUnavailable: , maxSurge: }}
seccompProfile: {type: , localhostProfile: }
seLinuxOptions: {type: , level: , role: , user: }
taint.requirements: [{name: , selector: , namespace: }]
monitoring.dashboard.labels: {}
ambient.enablementSelectors: [{podSelector: &selector {matchLabels: {}, matchExpressions: }, namespaceSelector: *selector}]
agent: {cniEnableReinstall: true, updateCniBinaries: true, skipCniBinaries: "", kubeconfigMode: "", skipTlsVerify: true, logSocketMode: "", profiling: true, repairSidecarAnnotation: "", repairInitContainerTerminationMessage: "", repairInitContainerExitCode: 0, repairLabelSelectors: "", repairFieldSelectors: ""}
{{- end -}}

{{/* cni.shown is a name for messages: bounded, with control characters escaped. */}}
{{- define "cni.shown" -}}{{ trunc 100 . | printf "%q" | trimPrefix "\"" | trimSuffix "\"" }}{{- end -}}

{{/* cni.kind is what a value is, for messages; null is nothing. */}}
{{- define "cni.kind" -}}
{{- if kindIs "map" . -}}a map{{- else if kindIs "slice" . -}}a list{{- else if not (kindIs "invalid" .) -}}one value{{- end -}}
{{- end -}}

{{/*
cni.names refuses unknown names in .in, which .like has with values of their types, and gives each scalar its default's type. Names
that other charts may share (.global) are only named, if they look like one of this chart's. .path is the prefix of names.
*/}}
{{- define "cni.names" -}}
{{- $ := . -}}
{{- $inherited := hasPrefix "_internal_defaults_do_not_set." .path -}}
{{- $shared := and (regexMatch "^(cni[.])?global[.]" .path) (not (contains "defaultResources" .path)) -}}
{{- range $key, $value := .in -}}
{{- $name := print $.path (include "cni.shown" $key) -}}
{{- $plain := trimPrefix "_internal_defaults_do_not_set." $name | trimPrefix "cni." -}}
{{- if hasKey $.like $key -}}
{{- $like := ternary (get $.shapes $plain) (get $.like $key) (hasKey $.shapes $plain) -}}
{{- $want := include "cni.kind" $like -}}
{{- $nullable := or (eq $want "one value") (regexMatch "esources|^updateStrategy[.]" $plain) -}}
{{- if and (kindIs "map" $like) (kindIs "map" $value) -}}
{{- if $like -}}{{- include "cni.names" (dict "root" $.root "in" $value "like" $like "path" (print $name ".") "shapes" $.shapes) -}}{{- end -}}
{{- else if and (kindIs "slice" $like) (kindIs "slice" $value) -}}
{{- $first := first $like -}}
{{- range $i, $item := $value -}}
{{- if and (kindIs "map" $first) (kindIs "map" $item) -}}
{{- include "cni.names" (dict "root" $.root "in" $item "like" $first "path" (printf "%s[%d]." $name $i) "shapes" $.shapes) -}}
{{- end -}}
{{- end -}}
{{- else if and (not $inherited) $want (ne (include "cni.kind" $value) $want) (or (not (kindIs "invalid" $value)) (not $nullable)) -}}
{{- if and (kindIs "map" $like) $like -}}{{- $want = printf "%s of %s" $want (keys $like | sortAlpha | join ", ") -}}{{- end -}}
{{- include "cni.fault" (list $.root (printf "%s: got %s, want %s" $name (toJson $value | trunc 100) $want)) -}}
{{- $_ := unset $.in $key -}}
{{- else if not (kindIs "invalid" $value) -}}
{{- include "cni.typed" (dict "root" $.root "in" $.in "key" $key "like" $like "name" $name "plain" $plain) -}}
{{- end -}}
{{- else if or $inherited (and (eq $plain "taint.namespace") (not $value)) -}}
{{- else if $shared -}}
{{- with include "cni.near" (dict "name" $key "among" (keys $.like)) -}}
{{- $_ := set $.root "Ignored" (append $.root.Ignored (printf "%s is ignored: did you mean %s%s?" $name $.path .)) -}}
{{- end -}}
{{- else -}}
{{- include "cni.unknown" (dict "root" $.root "key" $key "like" $.like "name" $name "plain" $plain "path" $.path) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* cni.unknown refuses an unknown name, with the name that was meant, or those that there are. */}}
{{- define "cni.unknown" -}}
{{- $key := .key -}}
{{- $known := keys .like -}}
{{- if not .path -}}{{- $known = concat $known (regexSplit "\\s+" (include "cni.known" .) -1) -}}{{- end -}}
{{- $hint := "" -}}
{{- with get (fromYaml (include "cni.elsewhere" .)) .plain -}}{{- $hint = . -}}{{- end -}}
{{- if not $hint -}}
{{- $same := list -}}
{{- range include "cni.paths" (dict "in" (fromYaml (.root.Files.Get "files/defaults.yaml")) "path" "") | splitList " " | compact -}}
{{- if eq (splitList "." . | last | lower) (lower $key) -}}{{- $same = append $same . -}}{{- end -}}
{{- end -}}
{{- $near := include "cni.near" (dict "name" .key "among" $known) -}}
{{- $alike := list -}}
{{- range keys .like | sortAlpha -}}{{- if eq (lower . | trunc 3) (lower $key | trunc 3) -}}{{- $alike = append $alike . -}}{{- end -}}{{- end -}}
{{- if and $same (ne (lower $near) (lower .key)) -}}{{- $hint = printf "unknown; did you mean %s?" (join " or " $same) -}}
{{- else if $near -}}{{- $hint = printf "unknown; did you mean %s%s?" .path $near -}}
{{- else if and .path $alike -}}{{- $hint = printf "unknown; did you mean %s%s?" .path (join (print " or " .path) $alike) -}}
{{- else if .path -}}{{- $hint = printf "unknown; %s has %s" (trimSuffix "." .path) (.like | keys | sortAlpha | join ", ") -}}
{{- else -}}{{- $hint = printf "unknown to this chart and to Istio's other charts%s" (ternary (printf "; did you mean %s?" (join " or " $alike)) "" (gt (len $alike) 0)) -}}
{{- end -}}
{{- end -}}
{{- include "cni.fault" (list .root (printf "%s: %s" .name $hint)) -}}
{{- end -}}

{{/* cni.paths are the paths of the settings below .in, separated by blanks. */}}
{{- define "cni.paths" -}}
{{- range $key, $value := .in }} {{ $.path }}{{ $key }}{{ if kindIs "map" $value }}{{ include "cni.paths" (dict "in" $value "path" (print $.path $key ".")) }}{{ end }}{{ end -}}
{{- end -}}

{{/*
cni.near is the name in .among that is nearest to .name, or "": at most every fourth letter is missing, superfluous or another,
in any order. Case and separators do not count.
*/}}
{{- define "cni.near" -}}
{{- $name := regexReplaceAll "[-_]" (lower .name) "" | trunc 50 -}}
{{- $best := "" -}}
{{- $least := add 1 (max 1 (div (add1 (len $name)) 4)) -}}
{{- range $candidate := sortAlpha .among -}}
{{- $rest := regexReplaceAll "[-_]" (lower $candidate) "" -}}
{{- $missing := 0 -}}
{{- if eq $name $rest -}}
{{- $rest = "" -}}
{{- else -}}
{{- range splitList "" $name -}}
{{- $parts := splitn . 2 $rest -}}
{{- if contains . $rest -}}{{- $rest = print $parts._0 $parts._1 -}}{{- else -}}{{- $missing = add1 $missing -}}{{- end -}}
{{- end -}}
{{- $missing = max $missing (len $rest) 1 -}}
{{- end -}}
{{- if lt $missing $least -}}{{- $least = $missing -}}{{- $best = $candidate -}}{{- end -}}
{{- end -}}
{{- $best -}}
{{- end -}}

{{/*
cni.typed gives the scalar .key of .in the type of its default .like: "true" and "5000" are a boolean and a number, and a number
is a text, unless YAML took a zero off its end.
*/}}
{{- define "cni.typed" -}}
{{- $value := get .in .key -}}
{{- $text := include "cni.text" $value -}}
{{- $got := ternary (quote $value) $text (kindIs "string" $value) -}}
{{- $want := get (dict "audit.interval" "5m, or 0 for none" "apiTimeout" "10s" "taint.hysteresis" "2m" "monitoring.podMonitor.interval" "30s") .plain -}}
{{- if kindIs "bool" .like -}}
{{- if has $text (list "true" "false") -}}{{- $_ := set .in .key (eq $text "true") -}}
{{- else -}}{{- include "cni.fault" (list .root (printf "%s: got %s, want true or false" .name $got)) -}}{{- end -}}
{{- else if kindIs "float64" .like -}}
{{- $most := ternary 65535 999999999 (hasSuffix "Port" .key) -}}
{{- $least := ternary 1 0 (eq .key "healthPort") -}}
{{- if and (regexMatch "^(0|[1-9][0-9]{0,8})$" $text) (le $least (int $text)) (le (int $text) $most) -}}{{- $_ := set .in .key (int64 $text) -}}
{{- else -}}{{- include "cni.fault" (list .root (printf "%s: got %s, want a number from %d to %d" .name $got $least $most)) -}}{{- end -}}
{{- else if $want -}}
{{- if or (regexMatch "^([0-9]+([.][0-9]+)?(ms|s|m|h))+$" $text) (and (eq $text "") (ne .plain "audit.interval")) (and (eq $text "0") (eq .plain "audit.interval")) -}}{{- $_ := set .in .key $text -}}
{{- else -}}{{- include "cni.fault" (list .root (printf "%s: got %s, want a duration such as %s" .name $got $want)) -}}{{- end -}}
{{- else if kindIs "string" .like -}}
{{- if and (kindIs "float64" $value) (regexMatch "^[0-9]+[.][0-9]$" $text) -}}
{{- include "cni.fault" (list .root (printf "%s: %s is a number, and YAML takes %s and %s0 for the same number: write it in quotes" .name $text $text $text)) -}}
{{- end -}}
{{- $_ := set .in .key $text -}}
{{- end -}}
{{- end -}}

{{/* cni.ignored collects what has no effect: values of .others, among them those that a user may expect to have one, and own ones. */}}
{{- define "cni.ignored" -}}
{{- $v := .root.Config -}}
{{- $given := .root.Values -}}
{{- $out := .root.Ignored -}}
{{- $elsewhere := fromYaml (include "cni.elsewhere" .) -}}
{{- $shown := list -}}
{{- range .others -}}{{- $shown = append $shown (include "cni.shown" .) -}}{{- end -}}
{{- with $shown -}}{{- $out = append $out (printf "Ignored: values of other charts: %s." (join ", " .)) -}}{{- end -}}
{{- range .others -}}
{{- if and (hasKey $elsewhere .) (ne (get $given . | toString) (get $v.global . | toString)) -}}
{{- $out = append $out (printf "%s is ignored: for this chart %s." . (get $elsewhere .)) -}}
{{- end -}}
{{- end -}}
{{- if kindIs "map" $given.pilot -}}
{{- if kindIs "map" $given.pilot.cni -}}
{{- range $given.pilot.cni | keys | sortAlpha -}}
{{- $out = append $out (printf "pilot.cni.%s is ignored: istiod's chart reads it, so istiod's release must get it." (include "cni.shown" .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $path, $value := dict "enabled" $given.enabled "cni.enabled" (dig "enabled" "" ($given.cni | default dict)) -}}
{{- if eq (toString $value) "false" -}}{{- $out = append $out (printf "%s=false is ignored: this chart is installed; a parent chart can use it as a condition." $path) -}}{{- end -}}
{{- end -}}
{{- with $v.variant | default $v.global.variant -}}
{{- $out = append $out (printf "variant=%s is ignored: the image has no variants, and the tag gets no suffix." .) -}}
{{- end -}}
{{- range $path, $value := dict "repair.hub" $v.repair.hub "repair.tag" $v.repair.tag "ambient.configDir" $v.ambient.configDir -}}
{{- with $value -}}{{- $out = append $out (printf "%s is ignored, as in Istio's chart." $path) -}}{{- end -}}
{{- end -}}
{{- $_ := set .root "Ignored" $out -}}
{{- end -}}

{{/* cni.counts converts quoted numbers in the fields of Kubernetes that have none of the chart's defaults. */}}
{{- define "cni.counts" -}}
{{- $in := . -}}
{{- if kindIs "map" . -}}
{{- range $key, $value := . -}}
{{- if and (has $key (list "maxSurge" "maxUnavailable" "tolerationSeconds" "weight")) (kindIs "string" $value) (regexMatch "^-?[0-9]+$" (toString $value)) -}}
{{- $_ := set $in $key (toString $value | int64) -}}
{{- else -}}
{{- include "cni.counts" $value -}}
{{- end -}}
{{- end -}}
{{- else if kindIs "slice" . -}}
{{- range . -}}{{- include "cni.counts" . -}}{{- end -}}
{{- end -}}
{{- end -}}
