//go:build race

package logserver

// most is the memory that an attack may cost the agent, in bytes. The race detector has its own beside.
const most = 640 << 20
