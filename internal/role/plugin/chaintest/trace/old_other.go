//go:build !amd64

package trace

// pathsOfOld is paths for calls that only old architectures have.
func pathsOfOld(uint64) []int { return nil }
