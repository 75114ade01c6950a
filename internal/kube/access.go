package kube

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Right is what an RBAC rule allows. Group is "" for the core API; an empty Namespace means all namespaces, an empty Name all
// objects. Its JSON is the ResourceAttributes of a SelfSubjectAccessReview.
type Right struct {
	Verb        string `json:"verb"`
	Group       string `json:"group"`
	Resource    string `json:"resource"`
	Subresource string `json:"subresource,omitempty"`
	Namespace   string `json:"namespace,omitempty"`
	Name        string `json:"name,omitempty"`
}

// String returns the right as the arguments of "kubectl auth can-i".
func (r Right) String() string {
	text := r.Verb + " " + strings.TrimSuffix(r.Resource+"."+r.Group, ".")
	if r.Subresource != "" {
		text += "/" + r.Subresource
	}
	if r.Name != "" {
		text += " " + r.Name
	}
	if r.Namespace != "" {
		text += " in namespace " + r.Namespace
	}
	return text
}

// Allowed reports whether the client's identity has a right, by POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews, which
// every authenticated identity may send.
func (c *Client) Allowed(ctx context.Context, right Right) (bool, error) {
	// Linking k8s.io/api/authorization/v1 would slow down each start of the plugin.
	reviews := apiResource{"authorization.k8s.io", "v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview"}
	body, x, err := c.transmit(ctx, &call{verb: "create", resource: reviews, asJSON: true, body: map[string]any{
		"kind": reviews.kind, "apiVersion": reviews.group + "/" + reviews.version, "spec": map[string]any{"resourceAttributes": right},
	}})
	if err != nil {
		return false, err
	}
	var answer struct {
		Kind   string
		Status struct{ Allowed bool }
	}
	if err := json.Unmarshal(body, &answer); err != nil || answer.Kind != reviews.kind {
		return false, x.fail(Undecodable, fmt.Errorf("requested %s, got kind %q", reviews.kind, answer.Kind))
	}
	return answer.Status.Allowed, nil
}

// ConfigMap fetches the text of a ConfigMap: GET /api/v1/namespaces/NAMESPACE/configmaps/NAME.
func (c *Client) ConfigMap(ctx context.Context, namespace, name string) (map[string]string, error) {
	object, err := get[*corev1.ConfigMap](ctx, c, configMaps(), namespace, name)
	if err != nil {
		return nil, err
	}
	return object.Data, nil
}

// Object fetches a pod, a DaemonSet or a ConfigMap, by the plural of its kind, as the API server's JSON.
func (c *Client) Object(ctx context.Context, plural, namespace, name string) ([]byte, error) {
	all := []apiResource{pods(), daemonSets(), configMaps()}
	at := slices.IndexFunc(all, func(of apiResource) bool { return of.plural == plural })
	what := &call{verb: "get", resource: all[max(at, 0)], namespace: namespace, name: name, asJSON: true}
	if at < 0 || !validName(namespace) || !validName(name) {
		return nil, c.invalid(what, errNoSegment)
	}
	body, _, err := c.transmit(ctx, what)
	return body, err
}

// Pods lists at most limit pods of a node from the API server's cache: GET /api/v1/pods?fieldSelector=spec.nodeName=NODE.
func (c *Client) Pods(ctx context.Context, node string, limit int64) ([]Pod, error) {
	what := &call{verb: "list", resource: pods(), options: &metav1.ListOptions{
		FieldSelector: PodScope{Node: node}.fields(), Limit: limit, ResourceVersion: "0",
	}}
	if !validName(node) {
		return nil, c.invalid(what, errors.New("it is not the name of a node"))
	}
	object, x, err := c.send(ctx, what)
	if err != nil {
		return nil, err
	}
	list, is := object.(*corev1.PodList)
	if !is {
		return nil, x.fail(Undecodable, fmt.Errorf("not a list of pods: kind %q", object.GetObjectKind().GroupVersionKind().Kind))
	}
	all := make([]Pod, 0, len(list.Items))
	for i := range list.Items {
		all = append(all, podOf(&list.Items[i]))
	}
	return all, nil
}

// Token has the claims of a bearer token, unverified.
type Token struct {
	// Subject is the holder, such as system:serviceaccount:NAMESPACE:NAME.
	Subject string
	// Expires is zero for a token without an expiry.
	Expires time.Time
}

// Namespace returns the namespace of a service account, "" for another subject.
func (t Token) Namespace() string {
	parts := strings.Split(t.Subject, ":")
	if len(parts) != 4 || parts[1] != "serviceaccount" { //nolint:mnd // as above
		return ""
	}
	return parts[2]
}

var errNoToken = errors.New("it has no token that names its holder, a JSON web token")

// Token returns the claims of the client's token, which is in the kubeconfig or in a file. No error contains the token.
func (c *Client) Token() (Token, error) {
	file, token := c.config.TokenFile, ""
	if c.config.Kubeconfig != "" {
		config, _, err := readKubeconfig(c.config.Kubeconfig)
		if err != nil {
			return Token{}, &Error{Class: InvalidConfig, File: c.config.Kubeconfig, Err: err}
		}
		file, token = config.BearerTokenFile, config.BearerToken
	}
	if token == "" {
		text, err := readFile(file)
		if err != nil {
			return Token{}, fmt.Errorf("reading the token: %w", err)
		}
		token = strings.TrimSpace(string(text))
	}
	var claims struct {
		Subject string  `json:"sub"`
		Expires float64 `json:"exp"` // RFC 7519, NumericDate
	}
	parts := strings.Split(token, ".")
	if len(parts) != 3 { //nolint:mnd // header, claims, signature: RFC 7515
		return Token{}, errNoToken
	}
	text, err := base64.RawURLEncoding.DecodeString(strings.TrimRight(parts[1], "="))
	if err != nil || json.Unmarshal(text, &claims) != nil {
		return Token{}, errNoToken
	}
	t := Token{Subject: clean(claims.Subject)}
	if claims.Expires > 0 {
		t.Expires = time.Unix(int64(claims.Expires), 0)
	}
	return t, nil
}
