//go:build !race

package logserver

// most is the memory that an attack may cost the agent, in bytes.
const most = 120 << 20
