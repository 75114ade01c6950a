package hostfs

// Knows reports whether the digest of the path would be told without reading.
func (d *Digests) Knows(path string) bool {
	_, ok := d.recall(path)
	return ok
}
