// Command oldest reads a YAML stream of Kubernetes objects and decodes each one into the type of the Kubernetes release
// that it is built with, as an API server with strict field validation does.
//
// It promises to report every object with an unknown or duplicate field, a value of the wrong type, or a kind that the
// release does not have. It never validates beyond types. go.mod selects the release. Start reading at run.
package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
)

func main() {
	if err := run(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1) //nolint:forbidigo // this is a main.go, too
	}
}

func run(in io.Reader, out io.Writer) error {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		appsv1.AddToScheme, batchv1.AddToScheme, corev1.AddToScheme, networkingv1.AddToScheme, rbacv1.AddToScheme,
	} {
		if err := add(scheme); err != nil {
			return err
		}
	}
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
	objects := yaml.NewYAMLReader(bufio.NewReader(in))
	var problems []error
	for count := 0; ; count++ {
		text, err := objects.Read()
		if errors.Is(err, io.EOF) {
			_, err = fmt.Fprintln(out, count, "objects")
			return errors.Join(append(problems, err)...)
		}
		if err != nil {
			return fmt.Errorf("reading objects: %w", err)
		}
		if _, _, err := decoder.Decode(text, nil, nil); err != nil {
			problems = append(problems, fmt.Errorf("object %d: %w\n%s", count, err, text))
		}
	}
}
