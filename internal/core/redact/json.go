package redact

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// Bounds of another program's JSON document, and of a shown value.
const (
	maxDepth  = 32
	maxValues = 20_000
	maxShown  = 256 // bytes of a value
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

// newForeign returns the known keys as a set, and the pattern of other keys to show.
func newForeign() (keys map[string]bool, other *regexp.Regexp) {
	keys = map[string]bool{}
	for key := range strings.FieldsSeq(known) {
		keys[key] = true
	}
	return keys, regexp.MustCompile(`^[A-Za-z_][A-Za-z_.-]*(?:\d{1,3}[A-Za-z_.-]*)?$`)
}

// document rewrites a JSON document.
type document struct {
	*Redactor

	// foreign reports whether another program wrote it.
	foreign bool
	in      *json.Decoder
	out     bytes.Buffer
	values  int
}

// JSON returns this program's JSON document without credentials, indented.
func (r *Redactor) JSON(text []byte) ([]byte, error) { return r.document(text, false) }

// Foreign returns another program's JSON document, indented. It shows booleans, null, and the values of known keys whose parents are
// all known. Type and length replace every other value, and every key that is not an identifier. Foreign returns an error for a
// document that is too deep or has too many values. No error contains a part of the document.
func (r *Redactor) Foreign(text []byte) ([]byte, error) { return r.document(text, true) }

func (r *Redactor) document(text []byte, foreign bool) ([]byte, error) {
	var all json.RawMessage
	if err := json.Unmarshal(text, &all); err != nil {
		if bad := (*json.SyntaxError)(nil); errors.As(err, &bad) {
			err = fmt.Errorf("not valid JSON: an error at byte %d", bad.Offset)
		}
		return nil, err
	}
	d := document{Redactor: r, foreign: foreign, in: json.NewDecoder(bytes.NewReader(text))}
	d.in.UseNumber()
	if err := d.value(!foreign, 0); err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err := json.Indent(&out, d.out.Bytes(), "", "  ")
	out.WriteByte('\n')
	return out.Bytes(), err
}

// value rewrites one value; shown reports whether its key is known.
func (d *document) value(shown bool, depth int) error {
	token, err := d.in.Token()
	if d.values++; err == nil && d.foreign && d.values > maxValues {
		err = errValues
	}
	if err != nil {
		return err
	}
	switch v := token.(type) {
	case json.Delim:
		return d.members(v, shown, depth+1)
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
func (d *document) members(begin json.Delim, shown bool, depth int) error {
	if depth > maxDepth {
		return errDepth
	}
	d.out.WriteString(begin.String())
	hidden := d.foreign && depth > 1 && !shown // whatever is below an unknown key
	for first := true; d.in.More(); first = false {
		if !first {
			d.out.WriteByte(',')
		}
		if begin == '{' {
			name, err := d.name()
			if err != nil {
				return err
			}
			shown = !d.foreign || d.keys[name] && !hidden
		}
		if err := d.value(shown, depth); err != nil {
			return err
		}
	}
	end, err := d.in.Token()
	_, _ = fmt.Fprint(&d.out, end)
	return err
}

// name rewrites the name of a member, and returns it.
func (d *document) name() (string, error) {
	token, err := d.in.Token()
	if err != nil {
		return "", err
	}
	name, _ := token.(string) // JSON keys are strings
	err = d.write(d.key(name))
	d.out.WriteByte(':')
	return name, err
}

func (d *document) key(name string) string {
	const longest = 32
	if d.foreign && !d.keys[name] && (len(name) > longest || !d.other.MatchString(name)) {
		return length("key", name)
	}
	return string(d.Text([]byte(name)))
}

func (d *document) text(value string, shown bool) string {
	if value != "" && !shown || d.foreign && len(value) > maxShown {
		return length("string", value)
	}
	clean := string(d.Text([]byte(value)))
	if d.foreign && clean != value {
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
