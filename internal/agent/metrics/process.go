package metrics

import (
	"fmt"
	"os"
	"runtime"
	"syscall"
	"time"
)

// started is the start time of the program, to within its initialisation.
var started = time.Now() //nolint:forbidigo,gochecknoglobals // the process's start, not a value's time

// process returns the metrics of the process and of the Go runtime, under the names of Prometheus' own client.
func process() []*family {
	var r registry
	row := func(kind, name, help string, value float64) { r.declare(kind, name, help).set(value) }
	var usage syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &usage) == nil {
		seconds := time.Duration(usage.Utime.Nano() + usage.Stime.Nano()).Seconds()
		row(counter, "process_cpu_seconds_total", "CPU time used, in seconds.", seconds)
	}
	var virtual, resident int
	if text, err := os.ReadFile("/proc/self/statm"); err == nil {
		_, _ = fmt.Sscan(string(text), &virtual, &resident)
		row(gauge, "process_resident_memory_bytes", "Resident memory.", float64(resident*os.Getpagesize()))
		row(gauge, "process_virtual_memory_bytes", "Address space.", float64(virtual*os.Getpagesize()))
	}
	row(gauge, "process_start_time_seconds", "When the process started, in seconds since 1970.", float64(started.UnixMilli())/1000)
	if open, err := os.ReadDir("/proc/self/fd"); err == nil {
		row(gauge, "process_open_fds", "Open file descriptors.", float64(len(open)-1)) // less the fd of the directory
	}
	var limit syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) == nil {
		row(gauge, "process_max_fds", "Limit of open file descriptors.", float64(limit.Cur))
	}
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	row(gauge, "go_goroutines", "Goroutines.", float64(runtime.NumGoroutine()))
	row(gauge, "go_memstats_alloc_bytes", "Bytes of allocated objects on the heap.", float64(memory.Alloc))
	row(gauge, "go_memstats_heap_alloc_bytes", "Bytes of allocated objects on the heap.", float64(memory.HeapAlloc))
	row(gauge, "go_memstats_heap_inuse_bytes", "Bytes of the heap in use.", float64(memory.HeapInuse))
	row(gauge, "go_memstats_heap_sys_bytes", "Memory the heap has from the operating system.", float64(memory.HeapSys))
	row(gauge, "go_memstats_stack_inuse_bytes", "Bytes of stacks in use.", float64(memory.StackInuse))
	row(gauge, "go_memstats_sys_bytes", "Memory the Go runtime has from the operating system.", float64(memory.Sys))
	row(counter, "go_memstats_alloc_bytes_total", "Bytes ever allocated on the heap.", float64(memory.TotalAlloc))
	row(counter, "go_memstats_mallocs_total", "Objects ever allocated on the heap.", float64(memory.Mallocs))
	const info = "Always 1; the label is the version of Go the program was built with."
	version := label("version", runtime.Version())
	r.declare(gauge, "go_info", info, version).add(1, version)
	return r.families
}
