package readiness

import "time"

// boot is the node's present boot. The API has its ID and not its time, so the time lies between two reports of the kubelet. Those
// and a pod's readiness are by the same clock, the node's.
type boot struct {
	id string
	// noticed is when the ID was seen first, by our clock.
	noticed time.Time
	// witnessed means that another ID was seen before.
	witnessed bool
	// before is the last report of the boot before this one, first the first that was seen of this one.
	before, first time.Time
	// last is the latest report of this boot.
	last time.Time
}

// WithHeartbeat takes in a report in which nothing but the heartbeat changed. It makes the time of a later reboot better known.
func (m Memory) WithHeartbeat(n Node) Memory {
	if n.BootID == m.boot.id && n.Heartbeat.After(m.boot.last) {
		m.boot.last = n.Heartbeat
	}
	return m
}

// learn takes in a report. After a reboot everything begins anew.
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

// believe says whether the readiness of a pod is believed, and if not, when it will be even if nothing changes.
func (m Memory) believe(n Node, p Pod, settle time.Duration, now time.Time) (Reason, time.Time) {
	b := m.boot
	if b.witnessed {
		switch settled := b.noticed.Add(settle); {
		case !p.Since.Before(b.first):
			return AgentReady, time.Time{}
		case !p.Since.After(b.before):
			return Rebooted, time.Time{}
		// It became ready between two reports that have the reboot between them. A kubelet that still reports it after all
		// this time has looked.
		case now.Before(settled):
			return Rebooted, settled
		}
		return AgentReady, time.Time{}
	}
	// A node that came back may have been rebooted, unless this boot was seen before: then it was out of reach only, and
	// its kubelet goes on with the readiness of before.
	settled := n.ReadySince.Add(settle)
	if n.Ready && p.Since.Before(n.ReadySince) && !b.noticed.Before(n.ReadySince) && now.Before(settled) {
		return MaybeRebooted, settled
	}
	return AgentReady, time.Time{}
}
