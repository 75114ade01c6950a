package sidecar

import "slices"

// Keys lists the keys of annotations and of variables that rules read.
func Keys() (annotations, variables []string) {
	for _, in := range inputs {
		switch in.kind {
		case annotation, setting:
			annotations = append(annotations, in.key)
		case variable:
			variables = append(variables, in.key)
		case label, container, field:
		}
	}
	return annotations, variables
}

// InputsOf returns the sorted keys of all inputs of a version.
func InputsOf(version int) []string {
	var all []string
	for _, in := range inputs {
		if in.since == version {
			all = append(all, in.key)
		}
	}
	slices.Sort(all)
	return all
}
