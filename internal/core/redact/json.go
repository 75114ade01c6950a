package redact

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// Bounds of another program's JSON document.
const (
	maxDepth  = 32
	maxValues = 20_000
)

var (
	errDepth  = fmt.Errorf("JSON with more than %d levels", maxDepth)
	errValues = fmt.Errorf("JSON with more than %d values", maxValues)
)

// known are the keys with shown values: none of them holds a credential.
const known = `
	cniVersion cniVersions name type plugins capabilities disableCheck disableGC loadOnlyInlinedPlugins delegates
	ipam dns nameservers domain search prevResult interfaces mac sandbox ips address gateway interface routes dst gw mtu advmss
	priority table scope portMappings hostPort containerPort protocol hostIP ipRanges aliases cgroupPath deviceID

	bridge isGateway isDefaultGateway forceAddress ipMasq ipMasqBackend hairpinMode promiscMode vlan vlanTrunk minID maxID id macspoofchk
	enabledad preserveDefaultVlan portIsolation disableContainerInterface master mode linkInContainer vlanId bcqueuelen device hwaddr
	kernelpath pciBusID runtimeConfig multiQueue owner group selinuxContext ranges subnet rangeStart rangeEnd dataDir resolvConf addresses
	daemonSocketPath snat masqAll markMasqBit externalSetMarkChain conditionsV4 conditionsV6 backend ingressRate ingressBurst egressRate
	egressBurst shapedSubnets unshapedSubnets iptablesAdminChainName firewalldZone ingressPolicy promisc allmulti txQLen vrfname
	addSourceHints

	plugin_log_level log_level cni_agent_run_dir ambient_enabled enablement_selectors exclude_namespaces pod_namespace native_nftables
	enable_ambient_detection_retry second_ip_family sandboxed_runtimes api_timeout force_iptables_binary kubernetes kubeconfig log_uds_address
	io.kubernetes.cri.pod-annotations`

// ofObjects are the known keys of a pod, a namespace, a DaemonSet, a ConfigMap and a webhook configuration. Not among them are values of
// environment variables, arguments, messages, and everything below a volume but hostPath.
const ofObjects = `
	apiVersion kind items metadata name namespace uid creationTimestamp deletionTimestamp generation generateName ownerReferences controller
	spec status nodeName hostNetwork hostPID hostUsers restartPolicy runtimeClassName priorityClassName serviceAccountName dnsPolicy
	shareProcessNamespace securityContext runAsUser runAsGroup runAsNonRoot fsGroup privileged allowPrivilegeEscalation capabilities add drop
	readOnlyRootFilesystem seccompProfile appArmorProfile type initContainers containers ephemeralContainers image imagePullPolicy ports
	containerPort hostPort protocol env envFrom configMapRef volumeMounts mountPath readOnly mountPropagation volumes hostPath path
	selector updateStrategy rollingUpdate maxUnavailable maxSurge template tolerations key operator effect
	phase podIP podIPs ip hostIP hostIPs startTime qosClass conditions lastTransitionTime reason containerStatuses initContainerStatuses
	ephemeralContainerStatuses state lastState running startedAt waiting terminated exitCode signal finishedAt ready restartCount started
	imageID containerID observedGeneration currentNumberScheduled desiredNumberScheduled numberAvailable numberMisscheduled numberReady
	numberUnavailable updatedNumberScheduled resourceVersion priority terminationGracePeriodSeconds tolerationSeconds limits requests cpu memory
	webhooks namespaceSelector objectSelector matchExpressions values reinvocationPolicy failurePolicy matchPolicy sideEffects
	timeoutSeconds rules apiGroups apiVersions operations resources scope`

// free are the keys of objects whose members have names that a user chooses; ofFree are those with shown values.
const (
	free   = `labels annotations data matchLabels nodeSelector`
	ofFree = `
	istio-injection istio.io/rev istio.io/tag istio.io/dataplane-mode istio.io/use-waypoint istio.io/reroute-virtual-interfaces k8s-app
	sidecar.istio.io/inject sidecar.istio.io/interceptionMode kubernetes.io/metadata.name kubernetes.io/os kubernetes.io/arch
	app.kubernetes.io/name app.kubernetes.io/version app.kubernetes.io/managed-by helm.sh/chart ambient.istio.io/redirection
	ambient.istio.io/bypass-inbound-capture ambient.istio.io/dns-capture cni.istio.io/uninitialized
	traffic.sidecar.istio.io/includeOutboundIPRanges traffic.sidecar.istio.io/excludeOutboundIPRanges
	traffic.sidecar.istio.io/includeInboundPorts traffic.sidecar.istio.io/excludeInboundPorts
	traffic.sidecar.istio.io/includeOutboundPorts traffic.sidecar.istio.io/excludeOutboundPorts
	traffic.sidecar.istio.io/excludeInterfaces traffic.sidecar.istio.io/kubevirtInterfaces
	cni.istio.io/includeInboundPorts cni.istio.io/excludeInboundPorts cni.istio.io/includeOutboundPorts
	cni.istio.io/excludeOutboundPorts

	ALLOW_SWITCH_TO_HOST_NS AMBIENT_DNS_CAPTURE AMBIENT_ENABLED AMBIENT_ENABLEMENT_SELECTOR AMBIENT_IPV6
	AMBIENT_RECONCILE_POD_RULES_ON_STARTUP API_TIMEOUT AUDIT_INTERVAL AUDIT_MODE AUDIT_POD_CONDITION CHAINED_CNI_PLUGIN CNI_BACKEND
	CNI_CACHE_DIR CNI_CONF_GROUP_READ CNI_CONF_MODE CNI_CONF_NAME CNI_CONF_VERSION CNI_NET_DIR CNI_OBSERVE CONFIG_MAP
	CURRENT_AGENT_VERSION DAEMONSET_NAME ENABLE_AMBIENT_DETECTION_RETRY EXCLUDE_NAMESPACES FORCE_IPTABLES_BINARY HEALTH_PORT
	ISTIO_OWNED_CNI_CONFIG ISTIO_OWNED_CNI_CONFIG_FILENAME MONITORING_PORT MOUNTED_CNI_BIN_DIRS MOUNTED_CNI_NET_DIR NATIVE_NFTABLES
	NETNS_DIRS PLUGIN_LOG_LEVEL REPAIR_BROKEN_POD_LABEL_KEY REPAIR_BROKEN_POD_LABEL_VALUE REPAIR_DELETE_PODS REPAIR_ENABLED REPAIR_EVICT
	REPAIR_INIT_CONTAINER_NAME REPAIR_LABEL_PODS REPAIR_REPAIR_PODS SANDBOXED_RUNTIMES SECOND_IP_FAMILY UNINSTALL_ON_EXIT`
)

// table is what documents of another program may show.
type table struct {
	keys, free, ofFree map[string]bool
	// other matches other keys to show, of at most longest bytes; maxShown bounds a shown value in bytes.
	other             *regexp.Regexp
	longest, maxShown int
	// ignored are keys that are left out with their values.
	ignored map[string]bool
}

func set(words string) map[string]bool {
	keys := map[string]bool{}
	for key := range strings.FieldsSeq(words) {
		keys[key] = true
	}
	return keys
}

func newTables() (foreign, object *table) {
	foreign = &table{keys: set(known), other: regexp.MustCompile(`^[A-Za-z_][A-Za-z_.-]*(?:\d{1,3}[A-Za-z_.-]*)?$`), longest: 32, maxShown: 256}
	object = &table{
		keys: set(ofObjects + " " + free), free: set(free), ofFree: set(ofFree), longest: 64, maxShown: 1 << 10,
		other:   regexp.MustCompile(`^[A-Za-z_][A-Za-z_./-]*(?:\d{1,3}[A-Za-z_./-]*)?$`),
		ignored: set("managedFields kubectl.kubernetes.io/last-applied-configuration"),
	}
	return foreign, object
}

// document rewrites a JSON document.
type document struct {
	*Redactor

	// foreign is the table of another program, nil for a document of this program.
	foreign *table
	in      *json.Decoder
	out     bytes.Buffer
	values  int
}

// JSON returns this program's JSON document without credentials, indented.
func (r *Redactor) JSON(text []byte) ([]byte, error) { return r.document(text, nil) }

// Foreign returns another program's JSON document, indented. It shows booleans, null, and the values of known keys whose parents are
// all known. Type and length replace every other value, and every key that is not an identifier. Foreign returns an error for a
// document that is too deep or has too many values. No error contains a part of the document.
func (r *Redactor) Foreign(text []byte) ([]byte, error) { return r.document(text, r.foreign) }

// Object is Foreign for an object of Kubernetes or a list of them.
func (r *Redactor) Object(text []byte) ([]byte, error) { return r.document(text, r.object) }

func (r *Redactor) document(text []byte, foreign *table) ([]byte, error) {
	var all json.RawMessage
	if err := json.Unmarshal(text, &all); err != nil {
		if bad := (*json.SyntaxError)(nil); errors.As(err, &bad) {
			err = fmt.Errorf("not valid JSON: an error at byte %d", bad.Offset)
		}
		return nil, err
	}
	d := document{Redactor: r, foreign: foreign, in: json.NewDecoder(bytes.NewReader(text))}
	d.in.UseNumber()
	if err := d.value(foreign == nil, false, 0); err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err := json.Indent(&out, d.out.Bytes(), "", "  ")
	out.WriteByte('\n')
	return out.Bytes(), err
}

// value rewrites one value. shown reports whether its key is known, free whether a user chooses its keys.
func (d *document) value(shown, free bool, depth int) error {
	token, err := d.in.Token()
	if d.values++; err == nil && d.foreign != nil && d.values > maxValues {
		err = errValues
	}
	if err != nil {
		return err
	}
	switch v := token.(type) {
	case json.Delim:
		return d.members(v, shown, free, depth+1)
	case string:
		return d.write(d.text(v, shown))
	case json.Number:
		if !shown {
			return d.write(length("number", v.String()))
		}
	}
	return d.write(token)
}

// members rewrites an object or an array; shown applies to an array's elements too.
func (d *document) members(begin json.Delim, shown, free bool, depth int) error {
	if depth > maxDepth {
		return errDepth
	}
	d.out.WriteString(begin.String())
	hidden := d.foreign != nil && depth > 1 && !shown // whatever is below an unknown key
	for separator := ""; d.in.More(); {
		var err error
		if begin == '{' {
			err = d.member(&separator, free, hidden, depth)
		} else {
			d.out.WriteString(separator)
			separator = ","
			err = d.value(shown, false, depth)
		}
		if err != nil {
			return err
		}
	}
	end, err := d.in.Token()
	_, _ = fmt.Fprint(&d.out, end)
	return err
}

// member rewrites an object's member, after the separator if there is one before it.
func (d *document) member(separator *string, free, hidden bool, depth int) error {
	token, err := d.in.Token()
	if err != nil {
		return err
	}
	key, _ := token.(string) // JSON keys are strings
	if d.foreign != nil && d.foreign.ignored[key] {
		return d.in.Decode(&json.RawMessage{})
	}
	shown, below := d.known(key, free, hidden)
	d.out.WriteString(*separator)
	*separator = ","
	if err := d.write(d.key(key, shown)); err != nil {
		return err
	}
	d.out.WriteByte(':')
	return d.value(shown, below, depth)
}

// known reports whether an object's member is shown, and whether a user chooses the keys below it. free is whether a user chose its key.
func (d *document) known(key string, free, hidden bool) (shown, below bool) {
	switch {
	case d.foreign == nil:
		return true, false
	case hidden:
		return false, false
	case free:
		return d.foreign.ofFree[key], false
	}
	return d.foreign.keys[key], d.foreign.free[key]
}

func (d *document) key(name string, shown bool) string {
	if d.foreign != nil && !shown && !d.foreign.keys[name] && (len(name) > d.foreign.longest || !d.foreign.other.MatchString(name)) {
		return length("key", name)
	}
	return string(d.Text([]byte(name)))
}

func (d *document) text(value string, shown bool) string {
	if value != "" && !shown || d.foreign != nil && len(value) > d.foreign.maxShown {
		return length("string", value)
	}
	clean := string(d.Text([]byte(value)))
	if d.foreign != nil && clean != value {
		return length("string", value)
	}
	return clean
}

// length replaces a hidden value.
func length(kind, of string) string { return fmt.Sprintf("%s of %d bytes", kind, len(of)) }

// write adds a string, number, boolean or null.
func (d *document) write(value any) error {
	encoder := json.NewEncoder(&d.out)
	encoder.SetEscapeHTML(false)
	return encoder.Encode(value)
}
