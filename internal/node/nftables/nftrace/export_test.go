package nftrace

// OpenUnowned is Open of a kernel without owners of tables.
func OpenUnowned(f Filter) (*Tracer, error) { return open(f, 0) }

// Abandon ends a trace as the end of its process does.
func (t *Tracer) Abandon() error { return t.conn.Close() }
