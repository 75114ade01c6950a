package podcache

// Known counts the pods that the watch has delivered.
func (s *Store) Known() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.pods)
}
