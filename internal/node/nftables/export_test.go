package nftables

// OnSend shows every request to the kernel before it goes out.
func (s *Session) OnSend(show func([]byte)) { s.conn.Sent = show }
