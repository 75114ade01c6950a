package plugin

import "strings"

// env has the variables that the plugin reads, besides those that the CNI library reads.
type env struct {
	command, container, path string
	override                 bool
}

func environment(getenv func(string) (string, bool)) env {
	get := func(name string) string {
		v, _ := getenv(name)
		return v
	}
	// The CNI library accepts the same values.
	override := get("CNI_NETNS_OVERRIDE")
	return env{
		command: get("CNI_COMMAND"), container: get("CNI_CONTAINERID"), path: get("PATH"),
		override: override == "1" || strings.EqualFold(override, "true"),
	}
}
