package enrol

// Searching returns the number of pods whose namespace is searched.
func (c *Controller) Searching() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.lost)
}
