// Package hostfs reads and changes the files of the node: durable atomic writes, copies and links, bounded reads,
// a lock, and a watch.
//
// It promises that a reader of a file that [Disk] writes finds the complete old or the complete new content, also after a
// crash of the process or a loss of power; that a crash leaves only temporary files behind, which [Disk.Sweep] finds by
// their names; that no kind of file makes a read hang; and that a [Watch] misses no change: it notices a change without
// an inotify event within ten seconds. Errors name the path and the operation and keep the errno for errors.Is. [Hint]
// returns a remedy for the errors that occur on real nodes.
//
// It never interprets a file and never decides on its content. It writes through a symbolic link only if the target is
// an existing regular file.
//
// Every system call that changes the file system is a [Call], so that package hostfstest can interrupt an operation at each
// call.
//
// Start reading at [Disk.WriteFile] in disk.go, for the watch at [Watch.Set] in watch.go.
package hostfs
