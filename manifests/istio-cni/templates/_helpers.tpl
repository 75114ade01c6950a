{{/* Values derived from several settings. All templates need .Config, see _merge.tpl. */}}

{{/* cni.name is the name of the chart's objects, cni.agent of the DaemonSet: an observer's are not those of Istio's agent. */}}
{{- define "cni.name" -}}{{ ternary "istio-cni-observer" "istio-cni" .Config.observe }}{{- end -}}
{{- define "cni.agent" -}}{{ ternary "istio-cni-observer" "istio-cni-node" .Config.observe }}{{- end -}}

{{- define "cni.hub" -}}
{{- .Config.hub | default .Config.global.hub -}}
{{- end -}}

{{- define "cni.tag" -}}
{{- .Config.tag | default .Config.global.tag | default .Chart.AppVersion -}}
{{- end -}}

{{- define "cni.image" -}}
{{- if contains "/" .Config.image -}}
{{- .Config.image -}}
{{- else -}}
{{- printf "%s/%s:%s" (include "cni.hub" .) .Config.image (include "cni.tag" .) -}}
{{- end -}}
{{- end -}}

{{/* cni.pullPolicy sets Kubernetes' default explicitly: a defaulted policy would not change when an upgrade changes the tag. */}}
{{- define "cni.pullPolicy" -}}
{{- $name := include "cni.image" . | base -}}
{{- $latest := or (not (contains ":" $name)) (hasSuffix ":latest" (splitList "@" $name | first)) -}}
{{- .Config.pullPolicy | default .Config.global.imagePullPolicy | default (ternary "Always" "IfNotPresent" $latest) -}}
{{- end -}}

{{- define "cni.pullSecrets" -}}
{{- with .Config.global.imagePullSecrets -}}
imagePullSecrets:
{{- range . }}
- name: {{ if kindIs "map" . }}{{ .name | quote }}{{ else }}{{ . | quote }}{{ end }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* cni.networkPolicy is the name of the NetworkPolicy. */}}
{{- define "cni.networkPolicy" -}}
{{ include "cni.name" . }}{{ with .Config.revision }}-{{ . }}{{ end }}
{{- end -}}

{{/* cni.text converts a scalar to a string: Helm decodes integers as floating point numbers. */}}
{{- define "cni.text" -}}
{{- if and (kindIs "float64" .) (eq (toString .) (toString (floor .))) -}}
{{- int64 . -}}
{{- else -}}
{{- toString . -}}
{{- end -}}
{{- end -}}

{{/* cni.strings merges maps into one map of strings; later maps override earlier ones. */}}
{{- define "cni.strings" -}}
{{- $out := dict -}}
{{- range . -}}
{{- range $key, $value := . -}}{{- $_ := set $out $key (include "cni.text" $value) -}}{{- end -}}
{{- end -}}
{{- toYaml $out -}}
{{- end -}}

{{/* cni.appLabels are the common labels of objects and pods. */}}
{{- define "cni.appLabels" -}}
app.kubernetes.io/name: {{ include "cni.name" . }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/part-of: istio
app.kubernetes.io/version: {{ include "cni.tag" . | trunc 63 | trimAll "-_." | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") | trunc 63 | trimSuffix "-" | quote }}
{{- end -}}

{{- define "cni.labels" -}}
release: {{ .Release.Name | quote }}
istio.io/rev: {{ .Config.revision | default "default" | quote }}
{{- if not .Config.observe }}
install.operator.istio.io/owning-resource: {{ .Config.ownerName | default "unknown" | quote }}
operator.istio.io/component: Cni
{{- end }}
{{ include "cni.appLabels" . }}
{{- end -}}

{{/* cni.clusterScope and cni.namespaceScope are "yes" if global.resourceScope selects such objects. */}}
{{- define "cni.clusterScope" -}}
{{- if has .Config.global.resourceScope (list "all" "cluster") -}}yes{{- end -}}
{{- end -}}

{{- define "cni.namespaceScope" -}}
{{- if has .Config.global.resourceScope (list "all" "namespace") -}}yes{{- end -}}
{{- end -}}

{{/*
cni.binDirs are the directories of plugins on the node, separated by blanks. Without any the agent looks for the runtime's, and
the one here is mounted in case that it may not.
*/}}
{{- define "cni.binDirs" -}}
{{- $usual := get (dict "gke" "/home/kubernetes/bin" "k3s" "/var/lib/rancher/k3s/data/cni" "k3d" "/var/lib/rancher/k3s/data/cni") .Config.platform -}}
{{- $usual = $usual | default (ternary "/home/kubernetes/bin" "/opt/cni/bin" (contains "-gke" .Capabilities.KubeVersion.Version)) -}}
{{- join " " (prepend .Config.cniBinDirs .Config.cniBinDir | compact | uniq | default (list $usual)) -}}
{{- end -}}

{{/* cni.confDir is the directory of configurations on the node. */}}
{{- define "cni.confDir" -}}
{{- .Config.cniConfDir | default "/etc/cni/net.d" -}}
{{- end -}}

{{/* cni.mountedBinDir is where the agent sees the first, second ... directory of plugins: the argument counts from 0. */}}
{{- define "cni.mountedBinDir" -}}
/host{{ if . }}/cni-bin-{{ add1 . }}{{ else }}/opt/cni/bin{{ end }}
{{- end -}}

{{/*
cni.repair is a space-separated list of the repair modes that may be used; "" is no repair. A pod that cannot be
redirected in place is deleted or labelled, if that is enabled; deletion takes precedence over labels.
*/}}
{{- define "cni.repair" -}}
{{- $r := .Config.repair -}}
{{- if $r.enabled -}}
look
{{- if $r.repairPods }} repair{{ end -}}
{{- if $r.deletePods }} delete{{ else if $r.labelPods }} label{{ end -}}
{{- end -}}
{{- end -}}

{{/* cni.audit is "yes" if the agent verifies the redirection of running pods. */}}
{{- define "cni.audit" -}}
{{- if regexMatch "[1-9]" (toString .Config.audit.interval) -}}yes{{- end -}}
{{- end -}}

{{/* cni.ambient is "yes" if the agent serves pods of ambient mode. */}}
{{- define "cni.ambient" -}}
{{- if and .Config.ambient.enabled (not .Config.observe) (ne (toString (get .Config.env "AMBIENT_PODS")) "ignore") -}}yes{{- end -}}
{{- end -}}

{{/* cni.hostNetwork is "yes" if the agent runs in the node's network namespace. */}}
{{- define "cni.hostNetwork" -}}
{{- if or .Config.hostNetwork (and (include "cni.ambient" .) .Config.ambient.shareHostNetworkNamespace) -}}yes{{- end -}}
{{- end -}}

{{/* cni.enters is "yes" if the agent enters network namespaces of pods: for the audit, for repair in place, or for ambient mode. */}}
{{- define "cni.enters" -}}
{{- if or (include "cni.audit" .) (contains "repair" (include "cni.repair" .)) (include "cni.ambient" .) -}}yes{{- end -}}
{{- end -}}

{{/* cni.capabilities are the agent's capabilities, see docs/security.md. */}}
{{- define "cni.capabilities" -}}
drop:
- ALL
{{- $enters := include "cni.enters" . }}
{{- if or $enters .Config.foreignOwners }}
add:
{{- end }}
{{- if $enters }}
- NET_ADMIN
{{- if eq .Config.forceIptablesBinary "legacy" }}
- NET_RAW
{{- end }}
- SYS_ADMIN
- SYS_PTRACE
{{- end }}
{{- if .Config.foreignOwners }}
- CHOWN
- DAC_OVERRIDE
- FOWNER
{{- end }}
{{- end -}}

{{/* cni.resources omits null values and empty maps. */}}
{{- define "cni.resources" -}}
{{- $out := dict -}}
{{- range $kind, $amounts := . -}}
{{- $kept := dict -}}
{{- range $name, $amount := $amounts -}}
{{- if not (kindIs "invalid" $amount) -}}{{- $_ := set $kept $name $amount -}}{{- end -}}
{{- end -}}
{{- if $kept -}}{{- $_ := set $out $kind $kept -}}{{- end -}}
{{- end -}}
{{- toYaml $out -}}
{{- end -}}

{{- define "cni.seccomp" -}}
{{- toYaml (.Config.seccompProfile | default (dict "type" "RuntimeDefault")) -}}
{{- end -}}

{{/*
cni.liveKeys are the variables that the agent reads from its ConfigMap without a restart. A change of these alone does
not roll out the DaemonSet.
*/}}
{{- define "cni.liveKeys" -}}
CNI_NETWORK_CONFIG EXCLUDE_NAMESPACES SECOND_IP_FAMILY SANDBOXED_RUNTIMES NATIVE_NFTABLES CNI_BACKEND FORCE_IPTABLES_BINARY CNI_CONF_VERSION API_TIMEOUT PLUGIN_LOG_LEVEL LOG_OUTPUT_LEVEL AMBIENT_ENABLEMENT_SELECTOR ENABLE_AMBIENT_DETECTION_RETRY AMBIENT_DNS_CAPTURE
{{- end -}}

{{/* cni.checksum is the checksum of the settings that need a restart of the agent. */}}
{{- define "cni.checksum" -}}
{{- $data := fromYaml (include "cni.configData" .) -}}
{{- if .Config.liveConfiguration -}}
{{- range splitList " " (include "cni.liveKeys" .) -}}
{{- $_ := unset $data . -}}
{{- end -}}
{{- end -}}
{{- $data | toJson | sha256sum -}}
{{- end -}}

{{/* cni.configData is the agent's environment, the data of ConfigMap istio-cni-config. */}}
{{- define "cni.configData" -}}
{{- $v := .Config -}}
{{- $data := dict
  "CURRENT_AGENT_VERSION" (include "cni.tag" .)
  "AMBIENT_ENABLED" $v.ambient.enabled
  "AMBIENT_ENABLEMENT_SELECTOR" (toYaml $v.ambient.enablementSelectors)
  "AMBIENT_DNS_CAPTURE" $v.ambient.dnsCapture
  "AMBIENT_IPV6" $v.ambient.ipv6
  "AMBIENT_RECONCILE_POD_RULES_ON_STARTUP" $v.ambient.reconcileIptablesOnStartup
  "ENABLE_AMBIENT_DETECTION_RETRY" $v.ambient.enableAmbientDetectionRetry
  "CHAINED_CNI_PLUGIN" $v.chained
  "ISTIO_OWNED_CNI_CONFIG" $v.istioOwnedCNIConfig
  "EXCLUDE_NAMESPACES" (join "," $v.excludeNamespaces)
  "NATIVE_NFTABLES" $v.global.nativeNftables
  "REPAIR_ENABLED" $v.repair.enabled
  "REPAIR_REPAIR_PODS" $v.repair.repairPods
  "REPAIR_DELETE_PODS" $v.repair.deletePods
  "REPAIR_LABEL_PODS" $v.repair.labelPods
  "REPAIR_INIT_CONTAINER_NAME" $v.repair.initContainerName
  "REPAIR_BROKEN_POD_LABEL_KEY" $v.repair.brokenPodLabelKey
  "REPAIR_BROKEN_POD_LABEL_VALUE" $v.repair.brokenPodLabelValue
  "AUDIT_INTERVAL" $v.audit.interval
  "AUDIT_MODE" $v.audit.mode
  "CNI_NET_DIR" (include "cni.confDir" .)
  "CNI_CACHE_DIR" (printf "%s/results" $v.cniCacheDir)
  "NETNS_DIRS" $v.cniNetnsDir
  "UNINSTALL_ON_EXIT" $v.uninstallOnExit
  "HEALTH_PORT" $v.healthPort
  "MONITORING_PORT" $v.monitoringPort
-}}
{{- $optional := dict
  "CNI_CONF_NAME" $v.cniConfFileName
  "CNI_CONF_MODE" $v.confMode
  "CNI_CONF_VERSION" $v.confVersion
  "CNI_NETWORK_CONFIG" $v.networkConfig
  "SECOND_IP_FAMILY" $v.secondIPFamily
  "SANDBOXED_RUNTIMES" (join "," $v.sandboxedRuntimes)
  "API_TIMEOUT" $v.apiTimeout
  "CNI_BACKEND" (ternary "" $v.backend (eq $v.backend "auto"))
  "FORCE_IPTABLES_BINARY" $v.forceIptablesBinary
  "PLUGIN_LOG_LEVEL" $v.logging.pluginLevel
-}}
{{- if or $v.istioOwnedCNIConfig (eq $v.confMode "owned") -}}
{{- $_ := set $optional "ISTIO_OWNED_CNI_CONFIG_FILENAME" $v.istioOwnedCNIConfigFileName -}}
{{- end -}}
{{- /* A directory that is set is one that the agent does not look for. */ -}}
{{- if $v.cniConfDir -}}{{- $_ := set $data "MOUNTED_CNI_NET_DIR" "/host/etc/cni/net.d" -}}{{- end -}}
{{- if or $v.cniBinDir $v.cniBinDirs -}}
{{- $mounted := list -}}
{{- range $i, $_ := splitList " " (include "cni.binDirs" .) -}}{{- $mounted = append $mounted (include "cni.mountedBinDir" $i) -}}{{- end -}}
{{- $_ := set $data "MOUNTED_CNI_BIN_DIRS" (join "," $mounted) -}}
{{- end -}}
{{- if $v.confGroupRead -}}{{- $_ := set $data "CNI_CONF_GROUP_READ" true -}}{{- end -}}
{{- if $v.repair.evict -}}{{- $_ := set $data "REPAIR_EVICT" true -}}{{- end -}}
{{- if include "cni.ambient" . -}}{{- $_ := set $data "ALLOW_SWITCH_TO_HOST_NS" (not (include "cni.hostNetwork" .)) -}}{{- end -}}
{{- if $v.audit.podCondition -}}{{- $_ := set $data "AUDIT_POD_CONDITION" true -}}{{- end -}}
{{- range $name, $value := $optional -}}
{{- if $value -}}{{- $_ := set $data $name $value -}}{{- end -}}
{{- end -}}
{{- $agent := dict -}}
{{- range $name, $value := $v.agent -}}{{- $_ := set $agent (snakecase $name | upper) $value -}}{{- end -}}
{{- $observer := dict -}}
{{- if $v.observe -}}
{{- $observer = dict "CNI_OBSERVE" true "DAEMONSET_NAME" (include "cni.agent" .) "CONFIG_MAP" (printf "%s-config" (include "cni.name" .)) "AMBIENT_ENABLED" $v.ambient.enabled -}}
{{- end -}}
{{- include "cni.strings" (list $data $agent $v.env $observer) -}}
{{- end -}}
