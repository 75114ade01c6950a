package metrics

import "slices"

// family is a name with what Prometheus shows of it.
type family struct{ name, kind, help string }

const (
	counter = "counter"
	gauge   = "gauge"
)

// The first two names are the reference's.
const (
	installsTotal = "istio_cni_installs_total"
	installReady  = "istio_cni_install_ready"

	rewritesTotal = "istio_cni_rewrites_total"
	fightsTotal   = "istio_cni_config_fights_total"
	problemsTotal = "istio_cni_config_problems_total"
	recordsTotal  = "istio_cni_log_records_total"
	refusalsTotal = "istio_cni_log_connections_refused_total"
	eventsTotal   = "istio_cni_events_total"
	filesPolled   = "istio_cni_files_polled"
	healSeconds   = "istio_cni_heal_seconds"
	buildInfo     = "istio_cni_build_info"

	unauthorizedPeer = "stranger"
)

func ownFamilies() []family {
	return slices.Concat(repairFamilies(), addFamilies(), []family{
		{installsTotal, counter, "Installations of the CNI plugin on this node, by how they ended."},
		{installReady, gauge, "1 while the CNI plugin is installed and watched, 0 while pods may start without it."},
		{rewritesTotal, counter, "Artifacts on the node put back after somebody else changed or removed them."},
		{
			fightsTotal, counter,
			"Fights with another writer of the CNI configuration: the agent holds back and pods may bypass the mesh.",
		},
		{problemsTotal, counter, "Live configurations refused for bad content; the last good one stayed in force."},
		{
			recordsTotal, counter,
			"Log records sent by CNI plugins: relayed to the agent's log, dropped for being too many, or rejected.",
		},
		{
			refusalsTotal, counter,
			"Connections to the log socket that were refused, as their user is not root.",
		},
		{filesPolled, gauge, "1 while the node's files are polled, as the kernel has no inotify instance or watch left, else 0."},
		{healSeconds, "histogram", "Time from noticing that an artifact was tampered with to having it back, in seconds."},
		{buildInfo, gauge, "Always 1; the label is the version of this program."},
	})
}

// processFamilies are those of the process, and of the Go runtime's many the few that an operator asks for.
func processFamilies() []family {
	return []family{
		{"process_cpu_seconds_total", counter, "CPU time used, in seconds."},
		{"process_cpu_seconds_user_total", counter, "CPU time used in user space, in seconds."},
		{"process_cpu_seconds_system_total", counter, "CPU time used in the kernel, in seconds."},
		{"process_resident_memory_bytes", gauge, "Resident memory."},
		{"process_resident_memory_peak_bytes", gauge, "Highest resident memory so far."},
		{"process_resident_memory_anon_bytes", gauge, "Resident memory that no file backs."},
		{"process_resident_memory_file_bytes", gauge, "Resident memory that files back, the program included."},
		{"process_resident_memory_shared_bytes", gauge, "Resident shared memory."},
		{"process_virtual_memory_bytes", gauge, "Address space."},
		{"process_virtual_memory_peak_bytes", gauge, "Highest address space so far."},
		{"process_major_pagefaults_total", counter, "Page faults that read from disk."},
		{"process_minor_pagefaults_total", counter, "Page faults that did not read from disk."},
		{"process_num_threads", gauge, "Threads of the operating system."},
		{"process_start_time_seconds", gauge, "When the process started, in seconds since 1970."},
		{"process_io_read_bytes_total", counter, "Bytes read by system calls."},
		{"process_io_written_bytes_total", counter, "Bytes written by system calls."},
		{"process_io_read_syscalls_total", counter, "System calls that read."},
		{"process_io_write_syscalls_total", counter, "System calls that write."},
		{"process_io_storage_read_bytes_total", counter, "Bytes read from disk."},
		{"process_io_storage_written_bytes_total", counter, "Bytes written to disk."},
		{"process_open_fds", gauge, "Open file descriptors."},
		{"process_max_fds", gauge, "Limit of open file descriptors."},

		{"go_info", gauge, "Always 1; the label is the version of Go the program was built with."},
		{"go_goroutines", gauge, "Goroutines."},
		{"go_gomaxprocs", gauge, "Threads that may run Go code at the same time."},
		{"go_memlimit_bytes", gauge, "Soft memory limit of the Go runtime (GOMEMLIMIT)."},
		{"go_memstats_heap_inuse_bytes", gauge, "Bytes of the heap in use."},
		{"go_memstats_sys_bytes", gauge, "Memory the Go runtime has from the operating system."},
		{"go_memstats_alloc_bytes_total", counter, "Bytes ever allocated on the heap."},
		{"go_gc_cpu_seconds_total", counter, "CPU time used by the garbage collector, in seconds."},
	}
}
