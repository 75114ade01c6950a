package nftables

// OnSend calls show with every request to the kernel before it is sent.
func (s *Session) OnSend(show func([]byte)) { s.conn.Sent = show }
