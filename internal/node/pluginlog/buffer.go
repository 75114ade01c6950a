package pluginlog

import "slices"

// record is a line that waits for Close.
type record struct {
	level Level
	line  []byte
	shown bool // stderr has it
}

// buffer holds the records of one invocation within a limit of bytes. When they are too many the lowest level goes
// first and within it the latest: the beginning of a story is worth more than its middle, and its failure most of all.
type buffer struct {
	limit   int
	size    int
	records []record
	dropped map[Level]int
}

// add keeps the record if there is room or lower ones can make room.
func (b *buffer) add(r record) {
	free := b.limit - b.size
	for _, k := range b.records {
		if k.level < r.level {
			free += len(k.line)
		}
	}
	if free < len(r.line) {
		b.drop(r.level)
		return
	}
	for b.limit-b.size < len(r.line) {
		b.evict()
	}
	b.records = append(b.records, r)
	b.size += len(r.line)
}

// evict drops the latest record of the lowest level.
func (b *buffer) evict() {
	victim := 0
	for i, k := range b.records {
		if k.level <= b.records[victim].level {
			victim = i
		}
	}
	b.drop(b.records[victim].level)
	b.size -= len(b.records[victim].line)
	b.records = slices.Delete(b.records, victim, victim+1)
}

func (b *buffer) drop(level Level) {
	if b.dropped == nil {
		b.dropped = make(map[Level]int)
	}
	b.dropped[level]++
}

// show returns the lines the level admits that stderr does not have yet, and counts them as shown.
func (b *buffer) show(level Level) []byte {
	var lines []byte
	for i := range b.records {
		if r := &b.records[i]; !r.shown && r.level >= level {
			lines = append(lines, r.line...)
			r.shown = true
		}
	}
	return lines
}

// take empties the buffer and returns the records the level admits. If such records were dropped the last one returned
// is the notice of it: a warning, or of the highest level that was dropped.
func (b *buffer) take(level Level, notice func(Level, int) []byte) []record {
	records := slices.DeleteFunc(b.records, func(r record) bool { return r.level < level })
	lost, highest := 0, LevelWarn
	for at, n := range b.dropped {
		if at >= level {
			lost += n
			highest = max(highest, at)
		}
	}
	if lost > 0 {
		records = append(records, record{level: highest, line: notice(highest, lost)})
	}
	*b = buffer{limit: b.limit}
	return records
}

// join returns the lines of the records as one text.
func join(records []record) []byte {
	var lines []byte
	for _, r := range records {
		lines = append(lines, r.line...)
	}
	return lines
}
