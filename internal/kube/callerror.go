package kube

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// CallError is a request of an [API] that failed. Its text is one line for a person, without any credential.
type CallError struct {
	// Class is NotFound, Unauthorized or Forbidden only where the API server itself said so, about this very object:
	// the same status from whoever else answers at its address is Undecodable or Rejected.
	Class  Class
	Verb   string // as in RBAC: get, list, watch, create, update, patch, delete
	Object string // resource, namespace and name
	Server string // URL of the API server
	Proxy  string // URL of the proxy in between, empty when there is none
	Status int    // HTTP status, 0 when there was no answer
	// Message is what the server said, bounded and printable.
	Message string
	// RetryAfter is the time for which the server wants to be left alone.
	RetryAfter time.Duration
	// Err is the cause; nil when the server's answer is the cause.
	Err error
}

// ClassOf is the class of an error of this package, empty for any other.
func ClassOf(err error) Class {
	if failed, ok := errors.AsType[*CallError](err); ok {
		return failed.Class
	}
	if failed, ok := errors.AsType[*Error](err); ok {
		return failed.Class
	}
	return ""
}

// Error says what was asked of whom and how it ended.
func (e *CallError) Error() string {
	var text strings.Builder
	fmt.Fprintf(&text, "asking API server %s", e.Server)
	if e.Proxy != "" {
		fmt.Fprintf(&text, " through proxy %s", e.Proxy)
	}
	fmt.Fprintf(&text, " to %s %s: %s", e.Verb, e.Object, e.kind())
	if e.Status != 0 {
		fmt.Fprintf(&text, " (%d)", e.Status)
	}
	switch {
	case e.Message != "":
		text.WriteString(": " + e.Message)
	case e.Err != nil:
		text.WriteString(": " + clean(e.Err.Error()))
	}
	return strings.TrimRight(text.String(), ". ")
}

// kind is the class without the pod that look-ups are about.
func (e *CallError) kind() string {
	switch e.Class { //nolint:exhaustive // the others are about no pod
	case NotFound:
		return "not found"
	case InvalidKey:
		return "not an object's name"
	}
	return string(e.Class)
}

// Unwrap gives the cause, for instance context.Canceled or an x509 error.
func (e *CallError) Unwrap() error { return e.Err }

// Transient tells whether the failure may pass by itself: another try is worth its while, later.
func (e *CallError) Transient() bool { return e.Class.attempts() == 0 && e.Class != NotFound }

func (a *API) failed(c *call, proxy string, f *failure) *CallError {
	return &CallError{
		Class:      f.class,
		Verb:       c.verb,
		Object:     c.String(),
		Server:     a.server.String(),
		Proxy:      proxy,
		Status:     f.status,
		Message:    f.message,
		RetryAfter: f.retryAfter,
		Err:        f.err,
	}
}
