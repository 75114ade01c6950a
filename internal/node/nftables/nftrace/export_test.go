package nftrace

// OpenUnowned is Open on a kernel without table owners.
func OpenUnowned(f Filter) (*Tracer, error) { return open(f, 0) }

// Abandon ends a trace like the end of its process.
func (t *Tracer) Abandon() error { return t.conn.Close() }
