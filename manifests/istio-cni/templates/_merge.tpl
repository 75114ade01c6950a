{{/*
Merges the values into .Config. Every template begins with

    {{- include "cni.merge" . }}{{ $v := .Config }}

Precedence, later overrides earlier: defaults (files/defaults.yaml, and _internal_defaults_do_not_set, which with --reuse-values
is the previous release's), profile, compatibilityVersion, platform, cni.NAME,
NAME.
*/}}

{{/* cni.overlay merges .from into .onto: maps are merged, other values are replaced, null removes a key. */}}
{{- define "cni.overlay" -}}
{{- $onto := .onto -}}
{{- range $key, $new := .from -}}
{{- $old := get $onto $key -}}
{{- if and (kindIs "map" $new) (kindIs "map" $old) -}}
{{- include "cni.overlay" (dict "onto" $old "from" $new) -}}
{{- else if kindIs "invalid" $new -}}
{{- $_ := unset $onto $key -}}
{{- else -}}
{{- $_ := set $onto $key $new -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* cni.file merges a file of files/ into .onto; a missing file is an error. */}}
{{- define "cni.file" -}}
{{- if .name -}}
{{- $text := .root.Files.Get (printf "files/%s-%s.yaml" .kind .name) -}}
{{- if not $text -}}
{{- fail (printf "%s: %q is unknown" .kind .name) -}}
{{- end -}}
{{- include "cni.overlay" (dict "onto" .onto "from" (fromYaml $text)) -}}
{{- end -}}
{{- end -}}

{{/*
cni.older takes back defaults of another chart that --reuse-values keeps: the usual directories, because the agent looks for the runtime's
where none is set, and the tag of the reference's image.
*/}}
{{- define "cni.older" -}}
{{- if eq (toString .given.cniBinDir) "/opt/cni/bin" -}}{{- $_ := set .v "cniBinDir" "" -}}{{- end -}}
{{- if eq (toString .given.cniConfDir) "/etc/cni/net.d" -}}{{- $_ := set .v "cniConfDir" "" -}}{{- end -}}
{{- if include "cni.reference" .v.global.hub -}}{{- $_ := set .v.global "tag" "" -}}{{- end -}}
{{- end -}}

{{/* cni.reference is not empty if a hub is of the reference's images. */}}
{{- define "cni.reference" -}}
{{- $hub := toString . -}}
{{- range list "docker.io/istio" "istio" "gcr.io/istio-release" "gcr.io/istio-testing" "registry.istio.io" -}}
{{- if or (eq $hub .) (hasPrefix (print . "/") $hub) -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{- define "cni.merge" -}}
{{- if not (hasKey . "Config") -}}
{{- $_ := set . "Faults" list -}}
{{- $_ := set . "Ignored" list -}}
{{- $defaults := fromYaml (.Files.Get "files/defaults.yaml") -}}
{{- $chosen := list "enabled" "profile" "platform" "compatibilityVersion" -}}
{{- $others := include "cni.others" (dict "given" .Values "own" (concat (keys $defaults) $chosen (list "cni"))) | splitList " " | compact -}}
{{- $inherited := dict -}}
{{- if not (has "_internal_defaults_do_not_set" $others) -}}{{- $inherited = deepCopy (.Values._internal_defaults_do_not_set | default dict) -}}{{- end -}}
{{- $own := omit (deepCopy .Values) "cni" "_internal_defaults_do_not_set" -}}
{{- range concat $others $chosen -}}{{- $_ := unset $own . -}}{{- end -}}
{{- $historic := deepCopy (.Values.cni | default dict) -}}
{{- $chosenBefore := pick $historic "profile" "platform" "compatibilityVersion" -}}
{{- range $chosen -}}{{- $_ := unset $historic . -}}{{- end -}}
{{- range $path, $given := dict "" $own "cni." $historic "_internal_defaults_do_not_set." $inherited -}}
{{- include "cni.names" (dict "root" $ "in" $given "like" $defaults "path" $path "shapes" (fromYaml (include "cni.shapes" $))) -}}
{{- end -}}
{{- $global := .Values.global | default dict -}}
{{- $v := deepCopy $defaults -}}
{{- include "cni.overlay" (dict "onto" $v "from" $inherited) -}}
{{- include "cni.older" (dict "v" $v "given" $inherited) -}}
{{- range $kind := list "profile" "compatibilityVersion" "platform" -}}
{{- $name := coalesce (get $.Values $kind) (get $chosenBefore $kind) (get $global $kind) | default "" | toString -}}
{{- include "cni.file" (dict "root" $ "onto" $v "kind" (trimSuffix "Version" $kind) "name" $name) -}}
{{- $_ := set $v $kind $name -}}
{{- end -}}
{{- if eq (ternary $own.observe $historic.observe (hasKey $own "observe") | toString) "true" -}}
{{- include "cni.overlay" (dict "onto" $v "from" (dict "priorityClassName" "" "foreignOwners" false "repair" (dict "enabled" false))) -}}
{{- end -}}
{{- include "cni.overlay" (dict "onto" $v "from" $historic) -}}
{{- include "cni.overlay" (dict "onto" $v "from" $own) -}}
{{- $_ := set $v "priorityClassName" ($v.priorityClassName | default (ternary "" $defaults.priorityClassName $v.observe)) -}}
{{- include "cni.counts" (list $v.tolerations $v.taint.tolerations $v.affinity $v.taint.affinity $v.updateStrategy) -}}
{{- $_ := set . "Config" $v -}}
{{- include "cni.ignored" (dict "root" . "others" $others) -}}
{{- include "cni.check" . -}}
{{- /* The first line is Helm's. Each fault has a line of its own, which begins with the value's path. */ -}}
{{- with .Faults -}}{{- fail (join "\n" . | print "\n") -}}
{{- /* "helm lint" goes on after fail, but not without a template. */ -}}
{{- include (join "; " . | print "refused: ") $ -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/* cni.fault collects what is wrong with a value, so that all faults are printed at once: (list ROOT TEXT). */}}
{{- define "cni.fault" -}}
{{- $_ := set (first .) "Faults" (append (first .).Faults (last .) | uniq) -}}
{{- end -}}

{{/* cni.checkObserver rejects what an observer does not do. */}}
{{- define "cni.checkObserver" -}}
{{- $v := .Config -}}
{{- range $what, $on := dict
  "repair.enabled=true" $v.repair.enabled
  "audit.mode=repair" (eq $v.audit.mode "repair")
  "audit.podCondition=true" $v.audit.podCondition
  "taint.enabled=true" $v.taint.enabled
  "taint.newNodes=true" $v.taint.newNodes
  "hostNetwork=true" $v.hostNetwork
-}}
{{- if $on -}}{{- include "cni.fault" (list $ (printf "%s contradicts observe=true: an observer changes nothing" $what)) -}}{{- end -}}
{{- end -}}
{{- if not (include "cni.audit" .) -}}
{{- include "cni.fault" (list . "audit.interval=0 contradicts observe=true: an observer does nothing but audit") -}}
{{- end -}}
{{- end -}}

{{/* cni.check rejects values that render but do not work. */}}
{{- define "cni.check" -}}
{{- $v := .Config -}}
{{- if $v.observe -}}{{- include "cni.checkObserver" . -}}{{- end -}}
{{- if and (not (or $v.observe $v.ambient.enabled)) (eq (toString (get $v.env "AMBIENT_ENABLED")) "true") (ne (toString (get $v.env "AMBIENT_PODS")) "ignore") -}}
{{- include "cni.fault" (list . "env.AMBIENT_ENABLED: set ambient.enabled=true instead: the agent also needs volumes and rights for ambient mode") -}}
{{- end -}}
{{- if not (has (default "all" .Values.resourceScope) (list "all" "cluster" "namespace")) -}}
{{- include "cni.fault" (list . (printf "resourceScope: got %s, want all, cluster or namespace; this chart reads global.resourceScope" (toJson .Values.resourceScope))) -}}
{{- end -}}
{{- if and $v.confMode (ne $v.confMode "standalone") (not $v.chained) -}}
{{- include "cni.fault" (list . (printf "confMode: %q contradicts chained=false, which is standalone" $v.confMode)) -}}
{{- end -}}
{{- if and $v.confMode (ne $v.confMode "owned") $v.istioOwnedCNIConfig -}}
{{- include "cni.fault" (list . (printf "confMode: %q contradicts istioOwnedCNIConfig=true, which is owned" $v.confMode)) -}}
{{- end -}}
{{- if and $v.istioOwnedCNIConfig (not $v.chained) -}}
{{- include "cni.fault" (list . "istioOwnedCNIConfig: true contradicts chained=false") -}}
{{- end -}}
{{- if and (or $v.istioOwnedCNIConfig (eq $v.confMode "owned")) $v.istioOwnedCNIConfigFileName (not (hasSuffix ".conflist" $v.istioOwnedCNIConfigFileName)) -}}
{{- include "cni.fault" (list . (printf "istioOwnedCNIConfigFileName: %q: want a name that ends in .conflist" $v.istioOwnedCNIConfigFileName)) -}}
{{- end -}}
{{- if and $v.global.nativeNftables (not (has $v.backend (list "auto" "native"))) -}}
{{- include "cni.fault" (list . (printf "backend: %q contradicts global.nativeNftables=true, which is native" $v.backend)) -}}
{{- else if and $v.forceIptablesBinary (has $v.backend (list "netlink" "native")) (not $v.global.nativeNftables) -}}
{{- include "cni.fault" (list . (printf "backend: %q contradicts forceIptablesBinary=%s: it starts no program" $v.backend $v.forceIptablesBinary)) -}}
{{- end -}}
{{- if regexMatch "h|(^|[a-z])([2-9]|[0-9]{2,})([.][0-9]+)?m([0-9]|$)|(^|[a-z])(9[1-9]|[1-9][0-9]{2,})([.][0-9]+)?s|1m(3[1-9]|[4-9][0-9])" (toString $v.apiTimeout) -}}
{{- include "cni.fault" (list . (printf "apiTimeout: %q is longer than 1m30s" $v.apiTimeout)) -}}
{{- end -}}
{{- if and $v.networkConfig (ne (regexReplaceAll "__[A-Z0-9_]+?__" (toString $v.networkConfig) "0" | fromJson | dig "type" "" | toString) "istio-cni") -}}
{{- include "cni.fault" (list . "networkConfig: want a JSON object with \"type\": \"istio-cni\"") -}}
{{- end -}}
{{- range list "healthPort" "monitoringPort" -}}
{{- if eq (int (get $v .)) 9876 -}}{{- include "cni.fault" (list $ (printf "%s: 9876 is the port of the agent's page" .)) -}}{{- end -}}
{{- end -}}
{{- if and (not $v.useAppArmorAnnotation) (semverCompare "<1.30.0-0" .Capabilities.KubeVersion.Version) -}}
{{- include "cni.fault" (list . (printf "useAppArmorAnnotation: false needs Kubernetes 1.30, but this is %s" .Capabilities.KubeVersion.Version)) -}}
{{- end -}}
{{- if and $v.taint.newNodes (semverCompare "<1.36.0-0" .Capabilities.KubeVersion.Version) -}}
{{- include "cni.fault" (list . (printf "taint.newNodes: true needs Kubernetes 1.36 (MutatingAdmissionPolicy), but this is %s; helm template takes the version from --kube-version" .Capabilities.KubeVersion.Version)) -}}
{{- end -}}
{{- if eq (int $v.healthPort) (int $v.monitoringPort) -}}
{{- include "cni.fault" (list . (printf "healthPort: %d is also the monitoringPort" (int $v.healthPort))) -}}
{{- end -}}
{{- $image := include "cni.image" . -}}
{{- if include "cni.reference" $image -}}
{{- $path := ternary "image" (ternary "hub" "global.hub" (ne $v.hub "")) (contains "/" $v.image) -}}
{{- include "cni.fault" (list . (printf "%s: %q is Istio's image, not this one: set global.hub and global.tag to this program's image; if other charts read global, too, set cni.hub and cni.tag" $path $image)) -}}
{{- end -}}
{{- end -}}
