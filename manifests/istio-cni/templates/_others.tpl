{{/* What belongs to other charts in values that are shared with them, and types that values may have besides their own. */}}

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
anchors), and _internal_defaults_do_not_set if it has values of another chart. Any other unknown name is an error. .given are
the values, .defaults this chart's defaults.
*/}}
{{- define "cni.others" -}}
{{- $own := concat (keys .defaults) (list "_internal_defaults_do_not_set" "cni" "compatibilityVersion" "enabled" "platform" "profile") -}}
{{- $known := regexSplit "\\s+" (include "cni.known" .) -1 -}}
{{- $out := list -}}
{{- range $name := keys .given | sortAlpha -}}
{{- if has $name $own -}}
{{- else if or (has $name $known) (hasPrefix "x-" $name) (hasPrefix "." $name) -}}
{{- $out = append $out $name -}}
{{- else -}}
{{- $like := list -}}
{{- range $own -}}{{- if eq (lower . | trunc 3) (lower $name | trunc 3) -}}{{- $like = append $like . -}}{{- end -}}{{- end -}}
{{- $hint := "" -}}
{{- with $like -}}{{- $hint = printf "; did you mean %s?" (. | sortAlpha | join ", ") -}}{{- end -}}
{{- fail (printf "%s: neither this chart nor another of Istio's charts has this value%s" $name $hint) -}}
{{- end -}}
{{- end -}}
{{- /* Names that the defaults of older charts of the reference have. */ -}}
{{- $own = concat $own (list "logLevel" "privileged" "psp_cluster_role" "rollingMaxUnavailable") -}}
{{- range $name := keys (.given._internal_defaults_do_not_set | default dict) -}}
{{- if not (has $name $own) -}}{{- $out = append $out "_internal_defaults_do_not_set" -}}{{- end -}}
{{- end -}}
{{- uniq $out | join " " -}}
{{- end -}}

{{/*
cni.typed gives each scalar of .in the type of its default in .like: "true" and "5000" are a boolean and a number, and a number
is a text, unless YAML took a zero off its end. The schema has rejected what cannot be converted. .path is the prefix of names.
*/}}
{{- define "cni.typed" -}}
{{- $in := .in -}}
{{- range $key, $like := .like -}}
{{- $value := get $in $key -}}
{{- $name := print $.path $key -}}
{{- if or (kindIs "invalid" $value) (not (hasKey $in $key)) -}}
{{- else if kindIs "map" $like -}}
{{- if kindIs "map" $value -}}{{- include "cni.typed" (dict "in" $value "like" $like "path" (print $name ".")) -}}{{- end -}}
{{- else if kindIs "bool" $like -}}
{{- if has $value (list "true" "false") -}}{{- $_ := set $in $key (eq $value "true") -}}{{- end -}}
{{- else if kindIs "float64" $like -}}
{{- if regexMatch "^[0-9]+$" (toString $value) -}}{{- $_ := set $in $key (toString $value | int64) -}}{{- end -}}
{{- else if kindIs "string" $like -}}
{{- $text := include "cni.text" $value -}}
{{- if and (kindIs "float64" $value) (regexMatch "^[0-9]+[.][0-9]$" $text) -}}
{{- fail (printf "%s: %s is a number, and YAML takes %s and %s0 for the same number: write it in quotes" $name $text $text $text) -}}
{{- end -}}
{{- $_ := set $in $key $text -}}
{{- end -}}
{{- end -}}
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
