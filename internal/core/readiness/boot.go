package readiness

import "time"

// boot is the node's present boot. The API has its ID but not its time, so the time lies between two reports of the kubelet. The
// reports and a pod's readiness use the same clock, the node's.
type boot struct {
	id string
	// noticed is the time of the first report with this ID, by our clock.
	noticed time.Time
	// witnessed is set if an earlier report had another ID.
	witnessed bool
	// before is the last report of the previous boot, first the first report of this boot.
	before, first time.Time
	// last is the latest report of this boot.
	last time.Time
}

// WithHeartbeat applies a report in which only the heartbeat changed. It narrows the time of a later reboot.
func (m Memory) WithHeartbeat(n Node) Memory {
	if n.BootID == m.boot.id && n.Heartbeat.After(m.boot.last) {
		m.boot.last = n.Heartbeat
	}
	return m
}

// learn applies a report of the node. A new boot ID resets the memory, except the times around the reboot.
func (m Memory) learn(n Node, now time.Time) Memory {
	switch n.BootID {
	case "", m.boot.id:
		return m.WithHeartbeat(n)
	}
	fresh := boot{id: n.BootID, noticed: now, last: n.Heartbeat}
	if m.boot.id == "" {
		m.boot = fresh
		return m
	}
	fresh.witnessed, fresh.before, fresh.first = true, m.boot.last, n.Heartbeat
	if fresh.first.IsZero() {
		fresh.first = now
	}
	return Memory{boot: fresh}
}

// believe returns AgentReady if a pod's readiness is valid, otherwise the reason and the time at which it becomes valid, if any.
func (m Memory) believe(n Node, p Pod, settle time.Duration, now time.Time) (Reason, time.Time) {
	b := m.boot
	if b.witnessed {
		switch settled := b.noticed.Add(settle); {
		case !p.Since.Before(b.first):
			return AgentReady, time.Time{}
		case !p.Since.After(b.before):
			return Rebooted, time.Time{}
		// The pod became ready between the last report before the reboot and the first report after it. If the kubelet still
		// reports the pod as ready after the settle time, it has checked the pod.
		case now.Before(settled):
			return Rebooted, settled
		}
		return AgentReady, time.Time{}
	}
	// A node that became ready again may have been rebooted. If an earlier report had this boot ID, the node was only
	// unreachable, and its kubelet keeps the earlier readiness.
	settled := n.ReadySince.Add(settle)
	if n.Ready && p.Since.Before(n.ReadySince) && !b.noticed.Before(n.ReadySince) && now.Before(settled) {
		return MaybeRebooted, settled
	}
	return AgentReady, time.Time{}
}
