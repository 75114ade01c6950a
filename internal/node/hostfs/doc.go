// Package hostfs reads and changes the files of the node: durable atomic writes, copies and links, bounded reads,
// a lock, and a watch.
//
// It promises that a reader of a file that [Disk] writes finds the old content or the new one, complete, also after a
// crash of the process or a loss of power; that a crash leaves only temporary files behind, which [Disk.Sweep] finds by
// their names; that no file of any kind makes a read hang; and that a [Watch] misses no change: it notices a change without
// an inotify event within ten seconds. Errors name the path and the operation, keep the errno for errors.Is, and [Hint] has
// a sentence of remedy for those that occur on real nodes.
//
// It never interprets a file, never decides about the content of the node, and follows a symbolic link for writing only to
// an existing regular file.
//
// Every system call that changes the file system is a [Call], so that package hostfstest can end or fail an operation at each of
// them.
//
// Start reading at [Disk.WriteFile] in disk.go, for the watch at [Watch.Set] in watch.go.
package hostfs
